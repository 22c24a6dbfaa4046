r"""Question 2: worth more than what?  From rewards $R^{(g)}$ to advantages $\hat A^{(g)}$.

A group is the set of responses $y^{(1)}, \ldots, y^{(G)}$ to one prompt $x$; it is known by the
prompt's id, never by position, so the order of the rows means nothing.

The same everywhere in this file:

- ``rewards`` (B,): a tensor of any real dtype, or a list of numbers.  ``NaN`` (``None`` in a list)
  is a missing reward, the verifier abstained: it is left out of the statistics and its own
  advantage is 0.  An infinite reward is an error, and so is one so large that a sum of B could
  overflow the result's dtype.
- ``group_ids`` (B,): integers, the id of the prompt that each row answers.  A group of one row is
  an error (there is nothing to compare with); a group with one reward that is not missing gets 0.
- Statistics are computed in float64.  The result is float64 for float64 rewards (and for lists),
  else float32, and carries no gradient.
- If all rewards of a group are equal, its advantages are exactly 0, in every dtype and for every
  setting (a mean of equal numbers can miss them by a bit: see ``_centre``).  Equal means up to
  rounding, as 0.1 + 0.2 and 0.3 are: no further apart than 8 times the machine epsilon of the
  rewards, float64's for float64 and lists, float32's for narrower floats, times the largest of them
  in size.  Integers are compared exactly.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    Rewards,
    check_choice,
    check_count,
    check_ddof,
    check_number,
    describe,
    is_dense,
    read_pair,
    read_rewards,
    to_float,
)
from rlcore.objectives.rewards import _read_integers

ROUNDING = 8  # ulps: rewards of a group that are no further apart are equal


def group_advantages(
    rewards: Rewards,
    group_ids: Tensor | Sequence[int],
    *,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 0.0,
) -> Tensor:
    r"""Above the mean of the group, in stds: $\hat A = (R^{(g)} - \bar R) / (\sigma_R + \epsilon)$.

    ``rewards`` (B,), ``group_ids`` (B,); returns (B,), in units of the std (with
    ``scale="none"``, of the reward).  ``scale`` says whose std divides:

    - ``"group"``: that of the same prompt's rewards (GRPO);
    - ``"batch"``: that of all rewards of the batch together;
    - ``"none"``: none, only the mean is subtracted (Dr. GRPO).

    ``ddof``: 0 for the population std, with which a lone success gets exactly $\sqrt{G-1}$; 1 for
    the sample std, $(G-1)/\sqrt{G}$.  The two differ by the factor $\sqrt{(G-1)/G}$.

    The mean contains the own reward; that scales the mean gradient by $(G-1)/G$ and does nothing
    else.  Dividing by the group's std does change what is optimised.  With rewards 0 and 1,
    ``ddof=0`` and ``eps=0``, a prompt with success rate $p$ adds the gradient of

    $$
    F_G(p) = \sum_{s=1}^{G-1} \frac{P(\mathrm{Bin}(G-1, p) \ge s)}{\sqrt{s (G-s)}}
    $$

    instead of that of $p$: $F_2 = p$, $F_3 = \sqrt{2}\,p$, and for large $G$
    $2 \arcsin \sqrt{p}$, whose slope $1/\sqrt{p(1-p)}$ favours prompts that are nearly always or
    nearly never solved.  With graded rewards no function at all has this mean gradient.

    Source: DeepSeekMath, arXiv 2402.03300, sec. 4.1.2, which states neither ``ddof`` nor ``eps``.
    TRL's ``scale_rewards`` ("group", "batch", "none") takes the sample std, ``ddof=1``, with
    ``eps=1e-4``; verl ``ddof=1`` with ``eps=1e-6``.  ``scale="none"``: Dr. GRPO, arXiv 2503.20783,
    sec. 3.2; TRL needs ``scale_rewards="none"`` set apart from ``loss_type="dr_grpo"``.

    ValueError: the top of this module; an unknown ``scale``, another ``ddof``, ``eps`` negative.
    """
    check_choice("scale", scale, ("group", "batch", "none"))
    ddof = check_ddof(ddof)
    eps = check_number("eps", eps, at_least=0)
    groups = _by_prompt(rewards, group_ids)
    table = groups.table  # R^(1), ..., R^(G): a line per prompt
    if scale == "none":
        lift = _lift(table)
        return groups.rows(_centre(table * lift) / lift)
    compared = table.view(1, -1).sort().values if scale == "batch" else table
    return groups.rows(_z_scores(table, compared, ddof, eps))


def leave_one_out_advantages(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Tensor:
    r"""Above the mean of the OTHER rewards of the group.

    $$
    \hat A^{(g)} = R^{(g)} - \frac{1}{G-1} \sum_{j \ne g} R^{(j)}
    = \frac{G}{G-1} (R^{(g)} - \bar R)
    $$

    ``rewards`` (B,), ``group_ids`` (B,); returns (B,), in units of reward.  The baseline does not
    depend on $y^{(g)}$, so the policy gradient is unbiased.

    Source: RLOO, Ahmadian et al., arXiv 2402.14740; $R$ there includes the KL penalty, which is
    ``kl_penalized_rewards``.  TRL's RLOOTrainer has the same advantages, and adds a clip of the
    whole response's ratio, which the paper removes.

    ValueError: the top of this module.
    """
    groups = _by_prompt(rewards, group_ids)
    size = _count(groups.table)  # G, or fewer where rewards are missing
    lift = _lift(groups.table)
    advantages = _centre(groups.table * lift) * size / (size - 1).clamp(min=1)
    return groups.rows(advantages / lift)


def batch_mean_advantages(rewards: Rewards) -> Tensor:
    r"""Above the mean of the batch, whatever the prompt: $\hat A_i = R_i - \frac1B \sum_j R_j$.

    ``rewards`` (B,); returns (B,), in units of reward.  The baseline contains $R_i$ itself, which
    shrinks the mean gradient by $(B-1)/B$, no more.

    Source: REINFORCE with a baseline, Williams 1992, where the baseline is any number that does not
    depend on the response.

    ValueError: a batch of one row; the top of this module.
    """
    values = read_rewards(rewards)
    if len(values) < 2:
        raise ValueError(f"rewards must hold at least 2 rows for a batch mean; got {len(values)}")
    return group_advantages(values, torch.zeros_like(values, dtype=torch.int64), scale="none")


def self_critical_advantages(rewards: Rewards, greedy_rewards: Rewards) -> Tensor:
    r"""Above the reward of the greedy answer $\hat y$: $\hat A = R(x, y) - R(x, \hat y)$.

    ``rewards`` (B,), of the sampled responses; ``greedy_rewards`` (B,), one per row: what the same
    policy's greedy answer to that row's prompt got.  Returns (B,), in units of reward, float64 if
    either is float64 (or a list), else float32.  If either is missing the advantage is 0.

    The greedy answer does not depend on the sample, so the policy gradient is unbiased; the policy
    is trained to beat what it would do at test time.  It costs one more answer per prompt.

    Source: SCST, Rennie et al. 2017, arXiv 1612.00563.  Not in TRL.  verl's ``remax`` takes
    the same baseline.

    ValueError: shapes or devices that differ, an infinite reward, one too large to be subtracted.
    """
    values, greedy = read_pair(rewards, "greedy_rewards", greedy_rewards)
    dtype = torch.promote_types(to_float(values).dtype, to_float(greedy).dtype)
    _check_size("rewards", values, dtype)
    _check_size("greedy_rewards", greedy, dtype)
    return (values.double() - greedy.double()).nan_to_num(nan=0.0).to(dtype)


class EqualGroups(NamedTuple):
    """Which groups teach nothing: see ``equal_groups``."""

    group_ids: Tensor  # (P,) the distinct prompt ids, ascending
    equal: Tensor  # (P,) bool
    share: Tensor  # 0-d float64: the fraction of groups that are all equal


def equal_groups(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> EqualGroups:
    """Which groups have rewards that are all equal, so that every advantage is 0.

    ``rewards`` (B,), ``group_ids`` (B,); returns, for the P prompts in ascending order of their
    ids, whether each is all equal, and their share.  Missing rewards do not count; a group left
    with one reward or none is all equal.  The share is TRL's ``frac_reward_zero_std``.

    ValueError: the top of this module.
    """
    groups = _by_prompt(rewards, group_ids)
    equal = (_centre(groups.table) == 0).all(dim=1)
    return EqualGroups(groups.names, equal, equal.double().mean())


def probability_all_equal(p: float | Tensor, group_size: int) -> float | Tensor:
    r"""How often a group is all equal, if rewards are 0 or 1: $p^G + (1-p)^G$.

    ``p`` in [0, 1], the chance of a 1, a number or a tensor of any shape; the result is alike, in
    float32 or wider.  So many prompts give no gradient, and dynamic sampling draws
    $1/(1 - p^G - (1-p)^G)$ groups for one that does.

    ValueError: ``p`` outside [0, 1], ``group_size`` < 2.
    """
    check_count("group_size", group_size, at_least=2)
    given = p
    if isinstance(p, Tensor):
        inside = is_dense(p) and not p.is_complex() and not p.is_meta
        p = to_float(p) if inside else p
        inside = inside and bool(((p >= 0) & (p <= 1)).all())
    else:
        inside = isinstance(p, Real) and not isinstance(p, bool) and 0 <= p <= 1
        p = float(p) if inside else p
    if not inside:
        raise ValueError(f"p must be a probability, in [0, 1]; got {describe(given)}")
    return p**group_size + (1 - p) ** group_size


def largest_group_advantage(group_size: int, *, ddof: int = 0) -> float:
    r"""The bound on $|\hat A^{(g)}|$ of a z-scored group.

    $\sqrt{G-1}$ for ``ddof=0``, $(G-1)/\sqrt{G}$ for ``ddof=1``.  Met with equality by
    one success among $G-1$ failures (and by one failure among successes).
    It is Samuelson's inequality, or Cantelli's one-sided bound on the uniform law over the group:
    $1/G \le P(R - \bar R \ge k \sigma_R) \le 1/(1 + k^2)$.

    ValueError: ``group_size`` < 2, ``ddof`` not 0 or 1.
    """
    check_count("group_size", group_size, at_least=2)
    ddof = check_ddof(ddof)
    return math.sqrt(group_size - 1) if ddof == 0 else (group_size - 1) / math.sqrt(group_size)


class _Groups(NamedTuple):
    """The rewards of a batch by prompt."""

    table: Tensor  # (P, G) float64: a line per prompt, its rewards ascending, then NaN (none)
    names: Tensor  # (P,) the prompts' ids, ascending
    line: Tensor  # (B,) of every row of the batch, and
    place: Tensor  # (B,) its cell, counted through the table line by line
    dtype: torch.dtype  # of a result

    def cells(self, table: Tensor) -> Tensor:
        """What such a table holds for the rows of the batch."""
        return table.reshape(-1).index_select(0, self.place)

    def rows(self, table: Tensor) -> Tensor:
        """The same as a result."""
        return self.cells(table).to(self.dtype)


def _by_prompt(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> _Groups:
    """A line of the table ends in NaN where rewards are missing or its group is smaller than the
    largest.  The ascending order makes sums, and so all results, the same to the last bit however
    the batch is shuffled."""
    values = read_rewards(rewards)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    _check_size("rewards", values, dtype)
    ids = _read_ids(group_ids, values)
    ascending = bool((ids[1:] >= ids[:-1]).all())  # as most batches are: then nothing is sorted
    find = torch.unique_consecutive if ascending else torch.unique
    names, line, size = find(ids, return_inverse=True, return_counts=True)
    smallest, largest = (int(end) for end in size.aminmax())
    if smallest == 1:
        lone = names[size == 1][0].item()
        raise ValueError(
            f"group_ids: every group needs at least 2 rows to be compared; got 1 of group {lone}"
        )
    place = torch.arange(len(ids), device=ids.device)  # line by line, in the order of the batch
    if not ascending:
        place = _inverse(line.argsort(stable=True))
    if smallest < largest:  # past the NaN that fill up the lines before
        place = place + ((largest - size).cumsum(dim=0) - (largest - size))[line]
    table = values.new_full((len(names), largest), math.nan, dtype=torch.float64)
    table.view(-1).index_copy_(0, place, values.double())
    table, order = table.sort(dim=1, stable=True)  # NaN comes last
    table = _without_rounding(table, _rounding(values.dtype))
    column = _inverse(order).view(-1).index_select(0, place)
    return _Groups(table, names, line, line * largest + column, dtype)


def _without_rounding(table: Tensor, tolerance: float) -> Tensor:
    """Lines whose rewards are equal up to rounding, with the lowest of them for all."""
    lowest = table[:, :1]
    highest = table.nan_to_num(-math.inf).amax(dim=1, keepdim=True)
    largest = torch.maximum(lowest.abs(), highest.abs())
    near = (highest > lowest) & (highest - lowest <= tolerance * largest)  # false where no reward
    if not near.any():
        return table
    return torch.where(near & ~table.isnan(), lowest, table)


def _rounding(dtype: torch.dtype) -> float:
    """How far apart equal numbers of a dtype may be, as a share of their size: see the top."""
    if not dtype.is_floating_point:
        return 0.0
    return ROUNDING * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _inverse(order: Tensor) -> Tensor:
    """Where each element went, from where each was taken, along the last axis."""
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _check_size(name: str, values: Tensor, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max / (4 * len(values))  # a sum over B rows stays finite
    huge = values.double().abs() > limit
    if huge.any():
        row = int(huge.nonzero()[0])
        raise ValueError(
            f"{name} must be at most {limit:.3g} in size, so that no sum of {len(values)} "
            f"overflows; got {values[row].item():g} in row {row}"
        )


def _read_ids(group_ids: Tensor | Sequence[int], values: Tensor) -> Tensor:
    ids = _read_integers("group_ids", group_ids, values.device)
    if ids.shape != values.shape or not is_dense(ids):
        raise ValueError(
            f"group_ids must be of shape {tuple(values.shape)}, as rewards; got {describe(ids)}"
        )
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"group_ids must hold integers, the prompts' ids; got {describe(ids)}")
    if ids.device != values.device:
        raise ValueError(f"group_ids must be on {values.device}, as rewards; got {ids.device}")
    return ids


def _count(table: Tensor) -> Tensor:
    """How many rewards each line holds, (P, 1)."""
    return (~table.isnan()).sum(dim=1, keepdim=True)


def _lift(table: Tensor) -> Tensor:
    """What each line is multiplied by before its statistics, (P, 1): 1, but 2^500 if all of it is
    below 2^-500, so that no digit is lost where float64 ends (5e-324).  A power of 2 adds none."""
    largest = table.abs().nan_to_num(0.0).amax(dim=1, keepdim=True)
    return torch.where(largest < 2.0**-500, torch.full_like(largest, 2.0**500), 1.0)


def _centre(table: Tensor, count: Tensor | None = None) -> Tensor:
    """R^(g) - mean R of its line; 0 where there is no reward.

    Rewards are measured from the lowest of their line (the first) before the mean is taken.  That
    changes no difference, keeps small ones exact, and makes an all-equal line a line of zeros,
    whatever rounding would do to its mean."""
    above = table - table[:, :1]
    count = _count(table) if count is None else count
    mean = above.nansum(dim=1, keepdim=True) / count.clamp(min=1)
    return (above - mean).nan_to_num(nan=0.0)


def _z_scores(table: Tensor, compared: Tensor, ddof: int, eps: float) -> Tensor:
    """(R^(g) - mean R) / (std + eps), the std being that of ``compared``, the table or one line."""
    lift, count = _lift(compared), _count(compared)
    deviation = _centre(compared * lift, count)
    centred = deviation if compared is table else _centre(table * lift)
    std = _spread(deviation, count, ddof)
    return (centred / (std + eps * lift)).nan_to_num(nan=0.0)  # 0 / 0 where all are equal


def _std(table: Tensor, ddof: int) -> Tensor:
    """The std of each line, (P, 1)."""
    count = _count(table)
    return _spread(_centre(table, count), count, ddof)


def _spread(deviation: Tensor, count: Tensor, ddof: int) -> Tensor:
    """The std of lines of so many rewards, (P, 1), from what ``_centre`` made of them.  Deviations
    are divided by the largest before they are squared, so that no square leaves the range of
    float64."""
    largest = deviation.abs().amax(dim=1, keepdim=True)
    unit = deviation / largest.clamp(min=torch.finfo(torch.float64).tiny)
    mean_square = unit.square().sum(dim=1, keepdim=True) / (count - ddof).clamp(min=1)
    return largest * mean_square.sqrt()
