r"""Question 1: what was the response worth?

The reward $R(x, y)$ of a whole response comes from a verifier or a reward model; what is here turns
such numbers into the reward that is optimised: a KL penalty inside the reward, per response or per
token, a penalty for responses that come near the length limit, and a reward that counts only where
another one was earned.

A reward is ``NaN`` (``None`` in a list) where it is missing, because the verifier abstained.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_WEIGHT,
    Rewards,
    check_count,
    check_number,
    describe,
    read_lengths,
    read_mask,
    read_pair,
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
    r"""The KL penalty inside the reward of a response.

    $$
    R(x, y) - \beta \log \frac{\pi_{old}(y \mid x)}{\pi_{ref}(y \mid x)}
    $$

    ``rewards`` (B,), a tensor or a list (``None``: missing); ``old_logprobs``, ``ref_logprobs``,
    ``response_mask`` (B, T); returns (B,), float32 or wider, without gradient.  ``beta`` is the
    reward that one nat costs.  A missing reward stays missing.

    The penalty is k1 summed over the tokens, of the policy that SAMPLED the response.  Its mean is
    $\beta\,KL(\pi_{old} \| \pi_{ref})$ of whole responses, and REINFORCE with it follows the
    gradient of the regularised objective (see ``rlcore.objectives.rlhf``), exactly.

    Source: InstructGPT, arXiv 2203.02155, eq. 2; per response as in RLOO, arXiv 2402.14740.  TRL's
    RLOOTrainer does the same, with its own defaults (beta 0.05; the paper: 0.03 for TL;DR, 0.10
    for HH).

    ValueError: shapes that differ, log-probs not finite, an empty response, an infinite reward,
    ``beta`` negative or above 1e30, a result beyond the range of its dtype.
    """
    values, penalty = _penalty(rewards, old_logprobs, ref_logprobs, response_mask, beta)
    return values - penalty.sum(dim=1)


def kl_shaped_rewards(
    rewards: Rewards,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
) -> Tensor:
    r"""The KL penalty inside the reward, given out token by token, as a critic needs it.

    $$
    r_t = -\beta \left( \log \pi_{old}(y_t \mid x, y_{<t}) - \log \pi_{ref}(y_t \mid x, y_{<t})
    \right) + \mathbf{1}[t = |y|]\, R(x, y).
    $$

    ``rewards`` (B,), a tensor or a list; ``old_logprobs``, ``ref_logprobs``, ``response_mask``
    (B, T); returns (B, T), float32 or wider, without gradient, and 0 in padded slots.  The last
    token is the last slot that the mask holds.  A row sums to what ``kl_penalized_rewards`` gives.

    A row whose reward is missing is 0 everywhere, its KL penalty too: no NaN runs into a sum over
    time.  The row teaches nothing then, so leave it out of the update (``rewards.isnan()``).

    Source: InstructGPT, arXiv 2203.02155, sec. 3.5, says only "a per-token KL penalty from the SFT
    model at each token"; this k1 form is what verl and TRL compute.  TRL's PPO (up to 1.12) puts
    the reward one slot after the last token where a row is shorter than the widest; here, as in
    verl, it is on the last token.

    ValueError: as ``kl_penalized_rewards``.
    """
    values, penalty = _penalty(rewards, old_logprobs, ref_logprobs, response_mask, beta)
    mask = read_mask(response_mask)
    slots = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, slots, -1).amax(dim=1, keepdim=True)
    shaped = (slots == last) * values[:, None] - penalty
    return torch.where(values.isnan()[:, None], 0.0, shaped)


def overlong_penalty(
    lengths: Tensor | Sequence[int], *, max_length: int, cache_length: int
) -> Tensor:
    r"""The soft overlong punishment of a response of length $|y|$, to be ADDED to its reward.

    $$
    R_{length}(y) = \begin{cases}
    0 & |y| \le L_{max} - L_{cache} \\
    \dfrac{(L_{max} - L_{cache}) - |y|}{L_{cache}} & L_{max} - L_{cache} < |y| \le L_{max} \\
    -1 & |y| > L_{max}
    \end{cases}
    $$

    ``lengths`` (B,), integers, in TOKENS (not characters), the stop token included; returns (B,)
    in float64.  The zone of rising punishment is the last ``cache_length`` tokens BEFORE
    ``max_length``; with ``cache_length=0`` there is none: 0 up to ``max_length``, -1 above.

    Source: DAPO, arXiv 2503.14476, eq. 13.  In its sec. 4.1 the "expected maximum" of 16,384 tokens
    is $L_{max} - L_{cache}$, with $L_{max}$ = 20,480 and $L_{cache}$ = 4,096, as in TRL's
    ``get_soft_overlong_punishment``.

    ValueError: lengths that are not integers >= 0, ``max_length`` < 1, ``cache_length`` negative or
    above ``max_length`` (every response would be punished).
    """
    limit = check_count("max_length", max_length)
    cache = check_count("cache_length", cache_length, at_least=0)
    if cache > limit:
        raise ValueError(
            f"cache_length must be at most max_length = {limit}, or every length is punished; got "
            f"{cache}"
        )
    counts = read_lengths(lengths).double()
    rising = (limit - cache - counts) / max(cache, 1)
    return torch.where(counts > limit, -1.0, rising.clamp(max=0))


def conditioned_rewards(rewards: Rewards, condition: Rewards, *, threshold: float) -> Tensor:
    r"""A reward that counts only where another one is high enough: $r_k \mathbf{1}[r_l \ge t]$.

    ``rewards`` and ``condition`` (B,), tensors or lists; returns (B,), float64 if ``rewards`` is
    (or is a list), else float32, without gradient.  Example: a reward for short answers, given only
    to right ones.  Where either is missing the result is missing: what is not known to be earned is
    not counted as 0.

    Source: GDPO, arXiv 2601.05242, eq. 8.  It comes before any normalisation.

    ValueError: shapes or devices that differ, an infinite reward, ``threshold`` not finite.
    """
    threshold = check_number("threshold", threshold)
    values, earned = read_pair(rewards, "condition", condition)
    missing = values.isnan() | earned.isnan()
    counted = torch.where(earned.double() >= threshold, to_float(values), 0.0)
    return counted.masked_fill(missing, torch.nan)


def _penalty(
    rewards: Rewards, old_logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """R (B,) and beta (log pi_old - log pi_ref) per token (B, T), of one dtype and device."""
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
    penalty = (beta * (old - reference)).detach()
    dtype = torch.promote_types(to_float(values).dtype, penalty.dtype)
    values, penalty = values.to(penalty.device, dtype), penalty.to(dtype)
    left = values - penalty.sum(dim=1)
    bad = ~left.isfinite() & ~values.isnan()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            "old_logprobs must be so near to ref_logprobs that the reward less beta times the "
            f"difference fits {dtype}; got {left[row].item()} in row {row}, beta={beta:g}"
        )
    return values, penalty
