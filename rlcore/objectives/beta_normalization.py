r"""BNPO, the paper: advantages normalised by a Beta density that follows the batch.

Not TRL's ``loss_type="bnpo"``, which is a token mean over the local micro-batch (``aggregate`` with
``how="token_mean"``) and has no Beta density at all.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.objectives._checks import MAX_WEIGHT, Rewards, check_number
from rlcore.objectives._groups import by_prompt, centre, means

SAME_RATE = 2.0**-40  # success rates that differ by less are equal: a mean of rewards is rounded


def beta_normalized_advantages(
    rewards: Rewards, group_ids: Tensor | Sequence[int], *, max_weight: float = 1e6
) -> Tensor:
    r"""Above the mean $p$ of the group, over the density of such means in the batch.

    $$
    \hat A^{(g)} = \frac{R^{(g)} - p}{f_{Beta}(p;\, 1 + \frac{a}{3},\, 1 + \frac{b}{3})}
    $$

    ``rewards`` (B,), in [0, 1], and ``group_ids`` (B,), as for ``group_advantages``; returns (B,).
    The law of $p$ over the P prompts of the batch is taken to be Beta(a, b), by its moments: with
    the mean $\mu$ of their success rates and the sample variance $s^2$ (``ddof=1``),

    $$
    c = \frac{\mu (1 - \mu)}{s^2} - 1, \qquad a = c \mu, \qquad b = c (1 - \mu).
    $$

    Both parameters of the density are at least 1 (for 0/1 rewards $c$ can be slightly negative),
    and the weight $1/f$ is at most ``max_weight``.  A prompt that is all equal has advantage 0.  If
    the batch gives no law, all weights are 1 and the advantage is $R^{(g)} - p$: with one prompt
    (there is no variance), and where all success rates are equal up to rounding (there the formula
    would send every weight to 0).  Prompts without any reward are not counted in the moments.

    Source: BNPO, arXiv 2506.02864.  The authors' code does the same for one prompt, clamps $1/f$
    to [0, 1e6], and yields NaN where all success rates are equal; other rewards it maps to [0, 1]
    first, as the caller should here.

    ValueError: as ``group_advantages``; a reward outside [0, 1]; ``max_weight`` <= 0.
    """
    limit = check_number("max_weight", max_weight, above=0, at_most=MAX_WEIGHT)
    groups = by_prompt(rewards, group_ids)
    table = groups.table
    outside = (table < 0) | (table > 1)
    if outside.any():
        found = table[outside][0].item()
        raise ValueError(
            f"rewards must be in [0, 1], mean rewards being success rates; got {found:g}"
        )
    weight = (-_log_density(means(groups))).exp().clamp(max=limit)  # NaN where there is no reward
    return groups.rows(centre(groups, weight[:, None]))


def _log_density(rate: Tensor) -> Tensor:
    """log f_Beta(p; 1 + a/3, 1 + b/3) of every prompt's success rate, (P,)."""
    known = rate[~rate.isnan()].sort().values  # in this order sums do not depend on the ids
    if len(known) < 2 or known[-1] - known[0] <= SAME_RATE:
        return torch.zeros_like(rate)
    mean, variance = known.mean(), known.var()
    size = (mean * (1 - mean) / variance - 1) / 3  # (a + b) / 3
    if size <= 0:
        return torch.zeros_like(rate)
    a, b = size * mean, size * (1 - mean)
    # (a+b+1) times a binomial probability for real counts, in Loader's form: lgamma of large
    # numbers, nearly equal, would be subtracted from each other where the rates lie close together
    away = size * (rate - mean)
    peak = _stirling_error(size) - _stirling_error(a) - _stirling_error(b)
    peak = peak + (size + 1).log() + (size / (2 * math.pi * a * b)).log() / 2
    return peak + a * (away / a).log1p() + b * (-away / b).log1p()  # -inf at p = 0 and p = 1


def _stirling_error(n: Tensor) -> Tensor:
    """log n! - log(sqrt(2 pi n) (n/e)^n)."""
    if n < 16:
        return torch.lgamma(n + 1) - (n + 0.5) * n.log() + n - math.log(2 * math.pi) / 2
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680) / n**2) / n**2) / n**2) / n
