"""The loss of every online algorithm in this book: the five stages, strung together."""

from typing import Any

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_WEIGHT,
    check_choice,
    check_number,
    describe,
    is_dense,
    read_mask,
    read_tokens,
)
from rlcore.objectives.aggregation import AGGREGATIONS, aggregate
from rlcore.objectives.kl import KL_ESTIMATORS, kl_per_token
from rlcore.objectives.ratios import RATIO_LEVELS, fixed_clip_range, importance_ratio

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
    _check_choices(surrogate, ratio_level, aggregation, kl_estimator)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    logprobs = read_tokens("logprobs", logprobs, mask)
    advantage = _per_token(advantages, mask, logprobs.dtype)

    ratio = importance_ratio(logprobs, old_logprobs, mask, level=ratio_level, allow_empty=True)
    low, high = fixed_clip_range(epsilon_low, epsilon_high)  # how far may one token move?
    if surrogate == "clip":
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        gain = advantage * logprobs
    kl = _kl(logprobs, ref_logprobs, mask, beta, kl_estimator)  # how far from where we started?
    penalty = float(beta) * (ratio * kl if kl_importance_weighted else kl)
    loss = aggregate(  # how much does each token count?
        penalty - gain, mask, how=aggregation, constant=constant, total=total, allow_empty=True
    )

    stats = _statistics(ratio, advantage, mask, low, high, surrogate, ratio_level)
    if ref_logprobs is not None:
        stats["kl"] = stats[f"kl/{kl_estimator}"] = _mean(kl, mask, "token_mean")
    return loss, stats


def _check_choices(surrogate: str, ratio_level: str, aggregation: str, kl_estimator: str) -> None:
    check_choice("surrogate", surrogate, SURROGATES)
    check_choice("ratio_level", ratio_level, RATIO_LEVELS)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_choice("kl_estimator", kl_estimator, KL_ESTIMATORS)


def _per_token(advantages: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,) or (B, T) -> (B, T), without gradient, 0 in padded slots."""
    if not is_dense(advantages) or advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"advantages must be of shape {tuple(mask.shape[:1])} or {tuple(mask.shape)}; got "
            f"{describe(advantages)}"
        )
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(mask.shape)
    return read_tokens("advantages", advantages, mask).to(dtype).detach()


def _kl(
    logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, beta: float, estimator: str
) -> Tensor:
    """KL per token; 0 without a reference."""
    check_number("beta", beta, at_least=0, at_most=MAX_WEIGHT)
    if ref_logprobs is not None:
        return kl_per_token(logprobs, ref_logprobs, mask, estimator=estimator, allow_empty=True)
    if beta > 0:
        raise ValueError(f"ref_logprobs must be given when beta > 0; got None with beta={beta}")
    return torch.zeros_like(logprobs)


def _mean(values: Tensor, mask: Tensor, how: str) -> Tensor:
    return aggregate(values.detach(), mask, how=how, allow_empty=True)


def _statistics(
    ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    surrogate: str,
    ratio_level: str,
) -> dict[str, Tensor]:
    """Under TRL's names: the mean ratio, and the share of tokens (of responses, where they have one
    ratio each) that the clip leaves without a gradient: below the range with A < 0, above it with
    A > 0.  "reinforce" does not clip."""
    how = "token_mean" if ratio_level == "token" else "sequence_mean"
    clips = surrogate == "clip"
    below = (ratio < low) & (advantage < 0) & clips
    above = (ratio > high) & (advantage > 0) & clips
    return {
        "clip_ratio/low_mean": _mean(below, mask, how),
        "clip_ratio/high_mean": _mean(above, mask, how),
        "clip_ratio/region_mean": _mean(below | above, mask, how),
        "ratio_mean": _mean(ratio, mask, how),
    }
