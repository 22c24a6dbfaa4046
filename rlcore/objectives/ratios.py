r"""Question 3: how far may one token move?  The importance ratio and the range it is clipped to."""

import math

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_LOG_RATIO,
    MAX_WEIGHT,
    Difference,
    Slots,
    check_choice,
    check_number,
    read_difference,
    read_mask,
    read_slots,
    read_tokens,
)

__all__ = [
    "CLIP_RANGES",
    "RATIO_LEVELS",
    "dynamic_clip_range",
    "fixed_clip_range",
    "importance_ratio",
]

RATIO_LEVELS = ("token", "sequence", "sequence_sum", "sequence_token")
CLIP_RANGES = ("fixed", "dynamic")


def importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    level: str = "token",
    max_log_ratio: float = 20.0,
    allow_empty: bool = False,
) -> Tensor:
    r"""How far the policy has moved since it was sampled from:
    $\rho_{g,t} = \pi_\theta(y_t \mid x, y_{<t}) \,/\, \pi_{old}(y_t \mid x, y_{<t})$.

    ``logprobs``, ``old_logprobs`` and ``response_mask`` are $(B, T)$, log-probs in nats; so is the
    result, with 1 in padded slots.  The gradient flows through ``logprobs`` only, so ``logprobs``
    itself may be passed as ``old_logprobs`` (first step: all ratios exactly 1).

    ``level`` says what the ratio is that of:

    - ``"token"``: one token (PPO, GRPO).
    - ``"sequence"``: GSPO's $s_g = \big(\pi_\theta(y) / \pi_{old}(y)\big)^{1/|y|}$, the same for
      each token of a response.
    - ``"sequence_token"``: GSPO-token's $s_{g,t} = \mathrm{sg}[s_g]\;\pi_\theta(y_t) \,/\,
      \mathrm{sg}[\pi_\theta(y_t)]$: the value of $s_g$, the gradient of its own token, so that
      tokens may have different advantages.  With one advantage per response and
      ``"sequence_mean"`` its loss and gradient are those of ``"sequence"``.
    - ``"sequence_sum"``: the whole response's ratio $\pi_\theta(y) / \pi_{old}(y)$ without the
      root.  Only this one turns an average over old samples into one over the policy's; on long
      responses it leaves any clip range at once.

    ``max_log_ratio``: $\log\rho$ is limited to $\pm$ that many nats before the exponential
    ($e^{20} = 5 \cdot 10^8$), so that no ratio overflows and $\infty \cdot 0$ cannot arise; beyond
    it the gradient is 0.  Papers and TRL have no such limit.

    Sources: PPO, arXiv 1707.06347, sec. 3; GSPO, arXiv 2507.18071, eqs. 7 and 14.  What differs
    from them:

    - GSPO is a mean over responses.  TRL's default ``loss_type="dapo"`` at sequence level (here:
      ``aggregation="token_mean"``) weighs each response by its length, which is not GSPO.
    - The RLOO paper has no ratio; TRL's RLOO clips that of ``"sequence_sum"``.

    ValueError: shapes that differ, log-probs not finite at a real token, an empty response (unless
    ``allow_empty``), an unknown level, ``max_log_ratio`` <= 0 or > 80.
    """
    check_choice("level", level, RATIO_LEVELS)
    limit = check_number("max_log_ratio", max_log_ratio, above=0, at_most=MAX_LOG_RATIO)
    slots = read_slots(response_mask, logprobs, allow_empty=allow_empty)
    difference = read_difference(("logprobs", "old_logprobs"), logprobs, old_logprobs, slots)
    ratio = ratio_of(difference, slots, level, limit)
    return ratio if ratio.shape[1] > 1 else torch.where(slots.mask, ratio, 1.0)


def ratio_of(difference: Difference, slots: Slots, level: str, limit: float) -> Tensor:
    """``importance_ratio``, of differences of log-probs that are already read (0 in padded slots):
    $(B, T)$, 1 in padded slots, or $(B, 1)$ where a response has one ratio."""
    log_ratio, smallest, largest, _ = difference
    if level != "token":
        own, log_ratio = log_ratio, log_ratio.sum(dim=1, keepdim=True)
        if level != "sequence_sum":
            log_ratio = log_ratio / slots.lengths[:, None].clamp(min=1)
        smallest, largest = (end.item() for end in log_ratio.detach().aminmax())
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        found = largest if math.isfinite(smallest) else smallest
        raise ValueError(
            "logprobs must be so close to old_logprobs that the sum over a response is finite; got "
            f"a sum of {found}"
        )
    if level == "sequence_token":
        log_ratio = log_ratio.detach() * slots.real + (own - own.detach())
    if smallest < -limit or largest > limit:  # rarely so, and a clamp costs two passes of memory
        log_ratio = log_ratio.clamp(-limit, limit)
    return log_ratio.exp()


def fixed_clip_range(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
    r"""$[1 - \epsilon_{low},\ 1 + \epsilon_{high}]$: where a ratio still has a gradient.

    PPO and GRPO take both alike (0.2); DAPO raises the upper one (0.28: "clip-higher"); GSPO, whose
    ratios are those of whole responses, takes $3 \cdot 10^{-4}$ and $4 \cdot 10^{-4}$.  Both ends
    are plain numbers: the same range for all tokens.

    Sources: PPO, arXiv 1707.06347, eq. 7; DAPO, arXiv 2503.14476, eq. 10.  In TRL ``epsilon_high``
    is such an offset too, except for CISPO (see ``policy_loss``).

    ValueError: ``epsilon_low`` outside [0, 1], ``epsilon_high`` outside [0, 1e30], either not
    finite.
    """
    low = check_number("epsilon_low", epsilon_low, at_least=0, at_most=1)
    high = check_number("epsilon_high", epsilon_high, at_least=0, at_most=MAX_WEIGHT)
    return 1 - low, 1 + high


def dynamic_clip_range(
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    epsilon_low: float = 0.16,
    epsilon_high: float = 0.20,
    ratio_max: float = 10.0,
    allow_empty: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""DCPO's range for each token: the rarer the token was, the further it may move.

    With $q = \pi_{old}(y_t \mid x, y_{<t})$, the probability itself is limited,
    $|(\rho - 1)\,\rho\,q| \le \epsilon$, which solved for $\rho$ is

    $$
    \tfrac12 + \tfrac12 \sqrt{\max\!\Big(1 - \frac{4\epsilon_{low}}{q},\ 0\Big)}
    \ \le\ \rho\ \le\
    \min\!\Big(\tfrac12 + \tfrac12 \sqrt{1 + \frac{4\epsilon_{high}}{q}},\ r_{max}\Big) .
    $$

    ``old_logprobs`` (nats) and ``response_mask`` are $(B, T)$; the result is the two ends, $(B, T)$
    each, without gradient.  The lower one is $\tfrac12$ for $q \le 4\epsilon_{low}$.  For
    $q \to 0$ both stay finite: $\tfrac12$ and $r_{max}$ = ``ratio_max``.  A padded slot gets the
    range of $q = 1$.

    The default $\epsilon_{low} = \epsilon(1 - \epsilon)$ and $\epsilon_{high} = \epsilon$ meet the
    fixed range of $\epsilon = 0.2$ at $q = 1$ below and at $q = 1 / (1 + \epsilon)$ above; the
    paper says "approximately", it is exact.

    Source: DCPO, arXiv 2509.02333, eqs. 4 and 27.  What differs in the released code: its scripts
    set 0.2 and 0.28, its function defaults to 0.1 and 0.2, and its upper cap is the larger of 10
    and its ``clip_ratio_c``, while the cap for $A < 0$ is ``clip_ratio_c`` itself; the paper has
    one $r_{max}$ for both.

    ValueError: as ``fixed_clip_range``; ``ratio_max`` < 1; log-probs not finite at a real token, an
    empty response (unless ``allow_empty``).
    """
    fixed_clip_range(epsilon_low, epsilon_high)
    ratio_max = check_number("ratio_max", ratio_max, at_least=1, at_most=MAX_WEIGHT)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    old = read_tokens("old_logprobs", old_logprobs, mask)
    return dynamic_range_of(old, epsilon_low, epsilon_high, ratio_max)


def dynamic_range_of(
    old: Tensor, epsilon_low: float, epsilon_high: float, ratio_max: float
) -> tuple[Tensor, Tensor]:
    """``dynamic_clip_range``, of arguments that are already checked."""
    # 1/q in the range of float32: there the upper end has long met r_max, and 0 * inf cannot arise
    inverse = old.detach().clamp(min=-MAX_LOG_RATIO).neg_().exp_()
    low = (1 - 4 * float(epsilon_low) * inverse).clamp_(min=0).sqrt_().add_(1).div_(2)
    high = (1 + 4 * float(epsilon_high) * inverse).sqrt_().add_(1).div_(2).clamp_(max=ratio_max)
    return low, high
