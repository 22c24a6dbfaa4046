r"""The reward model: one number $r_\phi(x, y)$ per response, learned from comparisons.

The model is Bradley and Terry's: $P(y_w \succ y_l \mid x) = \sigma(r(x, y_w) - r(x, y_l))$.  Only
differences enter, so rewards are known up to one constant per prompt.
"""

from typing import Any

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    check_number,
    describe,
    is_dense,
    read_mask,
    read_tokens,
    to_float,
)
from rlcore.objectives._pairs import (
    MAX_FACTOR,
    MAX_SCORE,
    log_sigmoid_loss,
    read_divisor,
    read_scores,
)


def last_token_values(values: Tensor, attention_mask: Tensor) -> Tensor:
    r"""The value at the last real token of each row, whatever side the padding is on.

    values, attention_mask (B, T) -> (B,), float32 or wider.  The mask is 1 at every real token, of
    the prompt too; the last one is the rightmost 1.  It is found by the mask and not by the token:
    where padding and end-of-sequence share an id, a search by id stops inside the prompt or before
    the end of the answer, and index -1 is padding in a row that is padded on the right.
    The gradient flows through that one value of each row.  A reward model reads its score here; a
    critic reads the value that follows the last token of a response that was cut off.
    ValueError: shapes that differ, a row without a real token, values not finite at a real token.
    """
    mask = read_mask(attention_mask, name="attention_mask", allow_empty=True)
    if not mask.any(dim=1).all():
        row = int((~mask.any(dim=1)).nonzero()[0])
        raise ValueError(
            f"attention_mask row {row} is empty: a response needs at least one real token; got 0"
        )
    real = read_tokens("values", values, mask)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=1, keepdim=True)
    return real.gather(1, last)[:, 0]


def reward_model_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    margin: Tensor | None = None,
    center_coef: float = 0.0,
    total: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""The mean of $-\log\sigma(r(x, y_w) - r(x, y_l) - m)$ over pairs, to MINIMISE.

    $$
    L = -\frac1B \sum_i \log\sigma\big(r(x_i, y_{w,i}) - r(x_i, y_{l,i}) - m_i\big)
        + \frac cB \sum_i \big(r(x_i, y_{w,i}) + r(x_i, y_{l,i})\big)^2
    $$

    chosen_rewards, rejected_rewards (B,), from any head (see ``last_token_values``).  Returns the
    loss, float32 or wider, and its statistics, scalars without gradient.

    - ``margin`` (B,): the $m_i$ by which the better answer must win, larger where raters were sure;
      no gradient flows through it.
    - ``center_coef``: the $c$ that keeps rewards near 0, where the comparison leaves them free.
    - ``total``: the pairs of the whole step when this call sees a part of it; parts then add up.

    Statistics under TRL's names: ``accuracy`` (share of pairs with $r_w > r_l$, a tie is none),
    ``margin`` (mean of $r_w - r_l$), ``min_reward``, ``mean_reward``, ``max_reward``.
    Source: InstructGPT, arXiv 2203.02155, eq. 1; the margin: Llama 2, arXiv 2307.09288, eq. 2; the
    centring: TRL (``center_rewards_coefficient``, recommended 0.01), in neither paper.
    ValueError: rewards or margin not finite (or above 1e12 in size), shapes that differ,
    ``center_coef`` < 0, ``total`` below the part's pairs.
    """
    weight = check_number("center_coef", center_coef, at_least=0, at_most=MAX_FACTOR)
    chosen = read_scores("chosen_rewards", chosen_rewards)
    rejected = read_scores(
        "rejected_rewards", rejected_rewards, like=chosen, wanted="chosen_rewards"
    )
    difference = chosen - rejected
    wanted = torch.zeros_like(chosen)
    if margin is not None:
        wanted = read_scores("margin", margin, like=chosen, wanted="chosen_rewards").detach()
    price = log_sigmoid_loss(difference - wanted) + weight * (chosen + rejected).square()
    loss = price.sum() / read_divisor(total, len(price), "pairs")

    every = torch.cat([chosen, rejected]).detach()
    return loss, {
        "accuracy": (chosen > rejected).to(every.dtype).mean(),
        "margin": difference.detach().mean(),
        "min_reward": every.min(),
        "mean_reward": every.mean(),
        "max_reward": every.max(),
    }


def ranking_loss(rewards: Tensor, *, total: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    r"""The mean of $-\log\sigma(r_i - r_j)$ over all pairs of a ranking, then over rankings.

    $$
    L = -\frac1B \sum_b \binom{K_b}2^{-1} \sum_{i<j} \log\sigma(r_{b,i} - r_{b,j})
    $$

    rewards (B, K), each row from the best answer to the worst, K >= 2; NaN is a place that is not
    filled, for rankings of fewer than K answers.  Returns the loss, float32 or wider, to MINIMISE,
    and its statistics: those of ``reward_model_loss`` (``accuracy`` and ``margin`` with the same
    weights as the loss).  total: the rankings of the whole step when this call sees a part of it.
    All pairs of one ranking stand in one batch element and weigh 1 together: as separate pairs,
    each answer would be seen K-1 times per epoch and be overfitted.  With K = 2 it is
    ``reward_model_loss``.  There is no place for ties.
    Source: InstructGPT, arXiv 2203.02155, eq. 1 (K from 4 to 9).  TRL has pairs only.
    ValueError: not of shape (B, K) with K >= 2, +-inf (or above 1e12 in size), a ranking with fewer
    than two answers, ``total`` below the part's rankings.
    """
    scores, filled = _read_rankings(rewards)
    divisor = read_divisor(total, len(scores), "rankings")
    places = scores.shape[1]
    better, worse = torch.triu_indices(places, places, offset=1, device=scores.device)
    pairs = filled[:, better] & filled[:, worse]  # (B, K(K-1)/2)
    difference = scores[:, better] - scores[:, worse]
    weight = pairs.to(scores.dtype) / pairs.sum(dim=1, keepdim=True)  # bool / int is float32
    loss = (weight * log_sigmoid_loss(difference)).sum() / divisor

    won = weight * (difference > 0)
    every = scores.detach()[filled]
    return loss, {
        "accuracy": won.sum() / len(scores),
        "margin": (weight * difference.detach()).sum() / len(scores),
        "min_reward": every.min(),
        "mean_reward": every.mean(),
        "max_reward": every.max(),
    }


def _read_rankings(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """-> scores (B, K), 0 where no answer is, and which places are filled."""
    fits = is_dense(rewards) and rewards.dim() == 2 and not rewards.is_complex()
    if not fits or rewards.shape[0] < 1 or rewards.shape[1] < 2:
        raise ValueError(
            "rewards must be real and of shape (B, K), B >= 1 and K >= 2, best first; got "
            f"{describe(rewards)}"
        )
    values = to_float(rewards)
    filled = ~values.isnan()
    scores = torch.where(filled, values, 0.0)
    large = scores.abs() > MAX_SCORE
    if large.any():
        row, place = large.nonzero()[0].tolist()
        raise ValueError(
            f"rewards must be at most {MAX_SCORE:g} in size, or NaN where no answer is; got "
            f"{values[row, place].item():g} in row {row}, place {place}"
        )
    few = filled.sum(dim=1) < 2
    if few.any():
        row = int(few.nonzero()[0])
        raise ValueError(
            f"rewards row {row} must rank at least 2 answers; got {int(filled[row].sum())}"
        )
    return scores, filled
