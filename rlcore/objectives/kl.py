r"""Question 5: how far from where we started?  Estimates of $KL(\pi_\theta \,\|\, \pi_{ref})$."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.objectives._checks import (
    MAX_LOG_RATIO,
    Difference,
    check_choice,
    check_finite,
    check_number,
    read_difference,
    read_slots,
)

__all__ = ["KL_ESTIMATORS", "kl_per_token"]

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
    r"""One token's estimate of $KL(\pi_\theta \,\|\, \pi_{ref})$ in nats, for tokens drawn from
    $\pi_\theta$.

    With $d = \log\pi_\theta(y_t \mid \cdot) - \log\pi_{ref}(y_t \mid \cdot)$, ``estimator`` is

    - ``"k1"``: $d$.  Unbiased, may be negative.
    - ``"k2"``: $\frac12 d^2$.  Biased, of small variance.
    - ``"k3"``: $e^{-d} - 1 + d$.  Unbiased, never negative.

    An estimate with the right mean need not have the right gradient.  As a loss, over tokens drawn
    from $\pi_\theta$, the mean gradient is

    - of k1: zero.  It teaches nothing; k1 belongs in the reward.
    - of k2: that of this KL, $\nabla KL(\pi_\theta \,\|\, \pi_{ref})$.
    - of k3: that of the other one, $\nabla KL(\pi_{ref} \,\|\, \pi_\theta)$.
    - of $\rho\,k_3$, with the gradient through $\rho$ too (``kl_importance_weighted`` of
      ``policy_loss``): that of this KL.

    All of them see the next token only; how the policy came to its prefix is left out, unlike with
    a KL term in the reward.

    ``logprobs``, ``ref_logprobs`` and ``response_mask`` are $(B, T)$; so is the result, with 0 in
    padded slots.  The gradient flows through ``logprobs`` only.  In k3, $d$ is kept above
    ``-max_log_ratio``, so that $e^{-d}$ stays finite; papers and TRL have no such limit.

    Sources: Schulman, "Approximating KL divergence", 2020; DeepSeekMath, arXiv 2402.03300, eq. 4
    (k3 in the loss).  What differs from them:

    - GRPO's paper has $k_3$ alone; TRL's default (from 1.10 on) is $\rho\,k_3$, DeepSeek-V3.2's
      correction.
    - Some code has k3's ratio the wrong way up, $e^{d} - 1 - d$ over tokens from $\pi_\theta$: its
      mean is $\chi^2 - KL$, not an estimate of this KL.

    ValueError: shapes that differ, log-probs not finite at a real token, an empty response (unless
    ``allow_empty``), an unknown estimator, ``max_log_ratio`` <= 0 or > 80; a result beyond the
    range of its dtype.
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    limit = check_number("max_log_ratio", max_log_ratio, above=0, at_most=MAX_LOG_RATIO)
    slots = read_slots(response_mask, logprobs, allow_empty=allow_empty)
    difference = read_difference(("logprobs", "ref_logprobs"), logprobs, ref_logprobs, slots)
    kl = kl_of(difference, estimator, limit)
    if estimator == "k2":  # only a square leaves the range where the difference did not
        check_finite(kl, slots, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return kl


def kl_of(difference: Difference, estimator: str, limit: float) -> Tensor:
    """``kl_per_token``, of differences of log-probs that are already read (0 in padded slots)."""
    values = difference.values
    if estimator == "k1":
        return values
    if estimator == "k2":
        return values.square() / 2
    if difference.lowest < -limit:  # rarely so, and a clamp costs a pass over the memory
        values = values.clamp(min=-limit)
    return _K3.apply(values)


class _K3(torch.autograd.Function):
    """$e^{-d} - 1 + d$, whose derivative $1 - e^{-d}$ is at hand after the forward pass: it is kept
    in place of what autograd would keep and work out from it."""

    @staticmethod
    def forward(ctx: Any, difference: Tensor) -> Tensor:
        excess = (-difference).expm1_()
        ctx.save_for_backward(excess)
        return excess + difference

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (excess,) = ctx.saved_tensors
        return (gradient * excess).neg_()
