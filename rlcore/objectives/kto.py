r"""KTO: single responses, each marked desirable or not, instead of pairs.

Where DPO compares a response with its rival, KTO compares it with a reference point $z_0$: how far
the policy has moved from $\pi_{ref}$ on the whole.
"""

from typing import Any

import torch
from torch import Tensor

from rlcore.objectives._checks import check_number, describe, is_dense, read_mask, read_tokens
from rlcore.objectives._pairs import MAX_FACTOR, check_size, mean_of, read_divisor, read_scores


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    desirable: Tensor,
    *,
    mismatched_log_ratios: Tensor,
    beta: float = 0.1,
    weight_desirable: float = 1.0,
    weight_undesirable: float = 1.0,
    total: Any = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""The mean over responses of $\lambda\,(1 - \sigma(\pm\beta(d - z_0)))$, to MINIMISE.

    $$
    \ell(y) = \begin{cases}
      \lambda_D\,\big(1 - \sigma(\beta (d(y) - z_0))\big) & y \text{ desirable} \\
      \lambda_U\,\big(1 - \sigma(\beta (z_0 - d(y)))\big) & y \text{ undesirable}
    \end{cases}
    \qquad d(y) = \log\frac{\pi_\theta(y \mid x)}{\pi_{ref}(y \mid x)}
    $$

    logprobs, ref_logprobs, response_mask (B, T), the sums over tokens are taken here; desirable
    (B,), booleans or 0 and 1.  Returns the loss, float32 or wider, and its statistics, scalars
    without gradient.  The gradient flows through logprobs only.

    - ``mismatched_log_ratios`` (M,): $d(x_i, y_{i+1})$, summed over tokens, of prompts with the
      answer to ANOTHER prompt; $z_0 = \max(0, \text{their mean})$ stands for
      $KL(\pi_\theta \| \pi_{ref})$ and has no gradient.
    - ``weight_desirable``, ``weight_undesirable``: $\lambda_D$ and $\lambda_U$; see ``kto_weights``
      where one kind is rare.
    - ``total``: the responses of the whole step when this call sees a part of it; parts add up to
      the whole if each is given the mismatched log-ratios of the whole step.
    - ``allow_empty``: an empty response is left out; else it is an error.

    Statistics under TRL's names: ``rewards/chosen`` and ``rewards/rejected`` (mean of $\beta d$
    over the desirable and over the undesirable), ``logps/chosen``, ``logps/rejected``,
    ``rewards/margins``, and ``kl`` ($z_0$).  Of a kind that has no response there is no statistic.
    Source: KTO, arXiv 2402.01306, eq. 8 (TRL's comment calls it eq. 7).  Differences: the paper's
    loss is $\lambda_y - v$, that is $\ell$ itself; TRL shifts answers within one device's batch to
    get mismatched pairs and therefore needs more than one row there.
    ValueError: shapes that differ, log-probs not finite at a real token, desirable neither 0 nor 1,
    no mismatched pair, beta <= 0, a weight < 0, an empty response, ``total`` below the part's.
    """
    beta = check_number("beta", beta, above=0, at_most=MAX_FACTOR)
    good_weight, bad_weight = (
        check_number(name, value, at_least=0, at_most=MAX_FACTOR)
        for name, value in (
            ("weight_desirable", weight_desirable),
            ("weight_undesirable", weight_undesirable),
        )
    )
    mask = read_mask(response_mask, allow_empty=allow_empty)
    good, kept = _read_labels(desirable, mask), mask.any(dim=1)
    policy = read_tokens("logprobs", logprobs, mask)
    log_ratio = (policy - read_tokens("ref_logprobs", ref_logprobs, mask).detach()).sum(dim=1)
    check_size("logprobs - ref_logprobs", log_ratio, " when summed over a response")
    mismatched = read_scores("mismatched_log_ratios", mismatched_log_ratios).detach()

    reference_point = mismatched.mean().clamp(min=0).to(log_ratio.device)  # z_0
    ahead = beta * (log_ratio - reference_point)
    price = torch.where(
        good, good_weight * torch.sigmoid(-ahead), bad_weight * torch.sigmoid(ahead)
    )
    price = torch.where(kept, price, 0.0)
    loss = price.sum() / read_divisor(total, int(kept.sum()), "responses")
    stats = _statistics(beta * log_ratio, policy.sum(dim=1), good & kept, ~good & kept)
    return loss, {**stats, "kl": reference_point}


def kto_weights(desirable: Tensor, *, ratio: float = 1.0) -> tuple[float, float]:
    r"""$(\lambda_D, \lambda_U)$ with $\lambda_D n_D / (\lambda_U n_U)$ = ratio, the smaller one 1.

    desirable (N,): the marks of the whole data set, booleans or 0 and 1.  The rarer kind is weighed
    up, the other keeps 1.  ratio: the paper wants it between 1 and 3/2, TRL's documentation between
    1 and 4/3.
    Source: KTO, arXiv 2402.01306, sec. 4.2.
    ValueError: marks that are neither 0 nor 1, only one kind of them, ratio <= 0.
    """
    ratio = check_number("ratio", ratio, above=0, at_most=MAX_FACTOR)
    fits = is_dense(desirable) and desirable.dim() == 1 and not desirable.is_complex()
    if not fits or not bool(((desirable == 0) | (desirable == 1)).all()):
        raise ValueError(
            "desirable must be real, of shape (N,) and hold only 0 and 1; got "
            f"{describe(desirable)}"
        )
    good, bad = int((desirable == 1).sum()), int((desirable == 0).sum())
    if good == 0 or bad == 0:
        raise ValueError(
            f"desirable must hold both kinds; got {good} desirable and {bad} undesirable"
        )
    wanted = ratio * bad / good  # lambda_D / lambda_U
    return max(wanted, 1.0), max(1 / wanted, 1.0)


def _read_labels(desirable: Tensor, mask: Tensor) -> Tensor:
    fits = is_dense(desirable) and desirable.shape == mask.shape[:1]
    if not fits or desirable.is_complex():
        raise ValueError(
            f"desirable must be real and of shape {tuple(mask.shape[:1])}, one per row of "
            f"response_mask; got {describe(desirable)}"
        )
    if desirable.device != mask.device:
        raise ValueError(f"desirable must be on {mask.device}, as the mask; got {desirable.device}")
    strange = (desirable != 0) & (desirable != 1)
    if strange.any():
        found = desirable[strange][0].item()
        raise ValueError(f"desirable must hold only 0 and 1 (or booleans); got {found}")
    return desirable == 1


def _statistics(rewards: Tensor, logps: Tensor, good: Tensor, bad: Tensor) -> dict[str, Tensor]:
    """Under TRL's names; a kind without a response is left out, as there is no mean of nothing."""
    stats = {}
    for name, rows in (("chosen", good), ("rejected", bad)):
        if rows.any():
            stats[f"rewards/{name}"] = mean_of(rewards, rows, rows.sum())
            stats[f"logps/{name}"] = mean_of(logps, rows, rows.sum())
    if good.any() and bad.any():
        stats["rewards/margins"] = stats["rewards/chosen"] - stats["rewards/rejected"]
    return stats
