"""The loss of every online algorithm in this book: the five stages, strung together."""

import math
from typing import Any

import torch
from torch import Tensor

from rlcore.objectives._checks import check_choice, check_number, describe, read_mask, read_tokens
from rlcore.objectives.aggregation import aggregate
from rlcore.objectives.kl import kl_per_token
from rlcore.objectives.ratios import fixed_clip_range, importance_ratio

SURROGATES = ("clip", "reinforce")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    surrogate: str = "clip",
    ratio_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    aggregation: str = "sequence_mean",
    constant: float | None = None,
    total: Any = None,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance_weighted: bool = False,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -aggregate( min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) - beta KL ), to MINIMISE.

    logprobs, old_logprobs, ref_logprobs, response_mask (B, T); advantages (B,), one for all tokens
    of a response, or (B, T).  Returns the loss and its statistics, scalars without gradient.
    surrogate: "clip" as above; "reinforce", A log pi_theta instead of the min (no ratio).
    ref_logprobs with beta=0 only measures the KL.  kl_importance_weighted: rho KL instead of KL
    (with k3, the gradient of KL(theta || ref): TRL's use_bias_correction_kl, DeepSeek-V3.2).
    The other arguments, and what is an error: importance_ratio, fixed_clip_range, aggregate,
    kl_per_token.  Source: PPO, arXiv 1707.06347, eq. 7; GRPO, arXiv 2402.03300, eq. 3.
    """
    check_choice("surrogate", surrogate, SURROGATES)
    check_number("beta", beta, at_least=0)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    logprobs = read_tokens("logprobs", logprobs, mask)
    advantage = _per_token(advantages, mask, logprobs.dtype)

    ratio = importance_ratio(
        logprobs, old_logprobs, mask, level=ratio_level, allow_empty=allow_empty
    )
    low, high = fixed_clip_range(epsilon_low, epsilon_high)
    if surrogate == "clip":
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        gain = advantage * logprobs
    token_loss, kl = -gain, None
    if ref_logprobs is not None:
        kl = kl_per_token(
            logprobs, ref_logprobs, mask, estimator=kl_estimator, allow_empty=allow_empty
        )
        token_loss = token_loss + beta * (ratio * kl if kl_importance_weighted else kl)
    elif beta > 0:
        raise ValueError(f"ref_logprobs must be given when beta > 0; got None with beta={beta}")
    loss = aggregate(
        token_loss, mask, how=aggregation, constant=constant, total=total, allow_empty=allow_empty
    )
    how = "token_mean" if ratio_level == "token" else "sequence_mean"
    clip = (low, high) if surrogate == "clip" else (0.0, math.inf)
    stats = _statistics(ratio, advantage, mask, clip, how)
    if kl is not None:
        stats["kl"] = stats[f"kl/{kl_estimator}"] = _mean(kl, mask, "token_mean")
    return loss, stats


def _per_token(advantages: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,) or (B, T) -> (B, T), without gradient, 0 in padded slots."""
    if not isinstance(advantages, Tensor) or advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"advantages must be of shape {tuple(mask.shape[:1])} or {tuple(mask.shape)}; got "
            f"{describe(advantages)}"
        )
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(mask.shape)
    return read_tokens("advantages", advantages.detach(), mask).to(dtype)


def _mean(values: Tensor, mask: Tensor, how: str) -> Tensor:
    return aggregate(values.detach(), mask, how=how, allow_empty=True)


def _statistics(
    ratio: Tensor, advantage: Tensor, mask: Tensor, clip: tuple[float, float], how: str
) -> dict[str, Tensor]:
    """Under TRL's names: the share of tokens (of responses, for a ratio per response) whose ratio
    has left the range on the side where the clip takes the gradient away, and the mean ratio."""
    low = (ratio < clip[0]) & (advantage < 0)
    high = (ratio > clip[1]) & (advantage > 0)
    return {
        "clip_ratio/low_mean": _mean(low, mask, how),
        "clip_ratio/high_mean": _mean(high, mask, how),
        "clip_ratio/region_mean": _mean(low | high, mask, how),
        "ratio_mean": _mean(ratio, mask, how),
    }
