"""Question 3: how far may one token move?  The importance ratio and the range it is clipped to."""

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_LOG_RATIO,
    MAX_WEIGHT,
    check_choice,
    check_number,
    read_mask,
    read_tokens,
)

RATIO_LEVELS = ("token", "sequence", "sequence_sum")


def importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    level: str = "token",
    max_log_ratio: float = 20.0,
    allow_empty: bool = False,
) -> Tensor:
    """rho_{g,t} = pi_theta(y_t | x, y_<t) / pi_old(y_t | x, y_<t): how far has the policy moved?

    logprobs, old_logprobs, response_mask (B, T) -> (B, T), with 1 in padded slots.  The gradient
    flows through logprobs only, so logprobs itself may be passed as old_logprobs (first step: all
    ratios exactly 1).
    level: "token" (PPO, GRPO); "sequence", GSPO's s_g = (pi_theta(y) / pi_old(y))^(1/|y|), the same
    for each token of a response; "sequence_sum", the whole response's ratio pi_theta(y)/pi_old(y)
    without the root, as TRL's RLOO.
    max_log_ratio: log rho is limited to +-20 before exp (e^20 = 5e8), so that no ratio overflows
    and inf * 0 cannot arise; beyond it the gradient is 0.
    Source: PPO, arXiv 1707.06347, sec. 3; GSPO, arXiv 2507.18071, eq. 7.
    ValueError: shapes that differ, log-probs not finite, an empty response (unless allow_empty),
    an unknown level, max_log_ratio <= 0 or > 80.
    """
    check_choice("level", level, RATIO_LEVELS)
    limit = check_number("max_log_ratio", max_log_ratio, above=0, at_most=MAX_LOG_RATIO)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    new = read_tokens("logprobs", logprobs, mask)
    log_ratio = new - read_tokens("old_logprobs", old_logprobs, mask).detach()
    if level != "token":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    if level == "sequence":
        log_ratio = log_ratio / mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = log_ratio.clamp(-limit, limit).exp()
    return torch.where(mask, ratio, 1.0)


def fixed_clip_range(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
    """(1 - eps_low, 1 + eps_high): the range inside which a ratio still has a gradient.

    PPO and GRPO take both equal (0.2); DAPO raises the upper one (0.28).
    ValueError: epsilon_low outside [0, 1], epsilon_high outside [0, 1e30], either not finite.
    """
    low = check_number("epsilon_low", epsilon_low, at_least=0, at_most=1)
    high = check_number("epsilon_high", epsilon_high, at_least=0, at_most=MAX_WEIGHT)
    return 1 - low, 1 + high
