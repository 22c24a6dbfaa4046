"""Question 5: how far from where we started?  Estimates of KL(pi_theta || pi_ref)."""

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_LOG_RATIO,
    check_choice,
    check_number,
    read_mask,
    read_tokens,
)

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_per_token(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    estimator: str = "k3",
    max_log_ratio: float = 20.0,
    allow_empty: bool = False,
) -> Tensor:
    """One token's estimate of KL(pi_theta || pi_ref), for tokens drawn from pi_theta.

    With d = log pi_theta(y_t | .) - log pi_ref(y_t | .), in nats:
    "k1"  d                 unbiased; may be negative; AS A LOSS its mean gradient is 0
    "k2"  d^2 / 2           biased, small variance; as a loss: the gradient of this KL
    "k3"  e^-d - 1 + d      unbiased, >= 0; as a loss: the gradient of KL(pi_ref || pi_theta)

    logprobs, ref_logprobs, response_mask (B, T) -> (B, T), with 0 in padded slots.  The gradient
    flows through logprobs only.  In k3, d is kept above -max_log_ratio, so that e^-d stays finite.
    Source: Schulman, "Approximating KL divergence", 2020; DeepSeekMath, arXiv 2402.03300, eq. 4.
    ValueError: shapes that differ, log-probs not finite, an empty response (unless allow_empty),
    an unknown estimator, max_log_ratio <= 0 or > 80.
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    limit = check_number("max_log_ratio", max_log_ratio, above=0, at_most=MAX_LOG_RATIO)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    policy = read_tokens("logprobs", logprobs, mask)
    difference = policy - read_tokens("ref_logprobs", ref_logprobs, mask).detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    difference = difference.clamp(min=-limit)
    return torch.expm1(-difference) + difference
