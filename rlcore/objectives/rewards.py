"""Question 1: what was the response worth?"""

from torch import Tensor

from rlcore.objectives._checks import (
    MAX_WEIGHT,
    Rewards,
    check_number,
    describe,
    read_mask,
    read_rewards,
    read_tokens,
    to_float,
)


def kl_penalized_rewards(
    rewards: Rewards,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
) -> Tensor:
    """R(x, y) - beta log(pi_old(y | x) / pi_ref(y | x)): the KL penalty inside the reward.

    rewards (B,), a tensor or a list (None: missing); old_logprobs, ref_logprobs, response_mask
    (B, T); returns (B,), float32 or wider.
    The penalty is k1 summed over the tokens, of the SAMPLING policy pi_old, without gradient.
    A missing reward (NaN) stays missing.
    Source: InstructGPT, arXiv 2203.02155, eq. 2; per response as in RLOO, arXiv 2402.14740.
    ValueError: shapes that differ, log-probs not finite, an empty response, +-inf reward, beta < 0.
    """
    beta = check_number("beta", beta, at_least=0, at_most=MAX_WEIGHT)
    mask = read_mask(response_mask)
    values = read_rewards(rewards)
    if values.shape != mask.shape[:1]:
        raise ValueError(
            f"rewards must be of shape {tuple(mask.shape[:1])}, one per row of response_mask; got "
            f"{describe(values)}"
        )
    old = read_tokens("old_logprobs", old_logprobs, mask)
    reference = read_tokens("ref_logprobs", ref_logprobs, mask)
    penalty = beta * (old - reference).sum(dim=1)
    return (to_float(values).to(penalty.device) - penalty).detach()
