r"""The rewards of a batch, a line for each prompt: what every baseline by group starts from.

A group is known by its prompt's id, never by position.  Sums are taken over ascending rewards, so
all results are the same to the last bit however the batch is shuffled.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    Rewards,
    as_rewards,
    describe,
    is_dense,
    read_integers,
    read_rewards,
    scalar,
)

ROUNDING = 8  # ulps: rewards of a group that are no further apart are equal
TINY = 2.0**-500  # a power of 2: to divide by it rounds nothing


class Groups(NamedTuple):
    """The rewards of a batch by prompt, in float64.  A line ends in NaN where rewards are missing
    or its group is smaller than the largest."""

    table: Tensor  # (P, G): a line per prompt, its rewards in the order of the batch
    ascending: Tensor  # (P, G): the same, each line from its lowest up
    lowest: Tensor  # (P, 1)
    span: Tensor  # (P, 1): highest less lowest; infinite where all are equal, NaN where is none
    whole: bool  # there is no NaN
    ids: Tensor  # (B,) of the prompts; with a `place`, those of the lines, (P,)
    place: Tensor | None  # (B,) the cell of each row, line by line; None: the rows are in order
    dtype: torch.dtype  # of a result

    @property
    def names(self) -> Tensor:
        """(P,): the prompts' ids, ascending."""
        return self.ids if self.place is not None else self.ids.view(self.table.shape)[:, 0].clone()

    @property
    def equal(self) -> Tensor:
        """(P,): whether a prompt's rewards are all equal or missing."""
        return ~self.span[:, 0].isfinite()

    @property
    def line(self) -> Tensor:
        """(B,) of each row of the batch."""
        cells = torch.arange(self.table.numel(), device=self.table.device)
        return (cells if self.place is None else self.place) // self.table.shape[1]

    def cells(self, table: Tensor) -> Tensor:
        """What such a table holds for the rows of the batch, (B,)."""
        cells = table.reshape(-1)
        return cells if self.place is None else cells.index_select(0, self.place)

    def rows(self, table: Tensor) -> Tensor:
        """The same as a result."""
        return self.cells(table).to(self.dtype)


def by_prompt(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Groups:
    """ValueError: as the top of ``advantages`` says."""
    values = as_rewards(rewards)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    wide = values.double()
    whole = _check_values(values, wide, dtype)
    ids = read_ids(group_ids, values)
    names, sizes = torch.unique_consecutive(ids, return_counts=True)
    line = None
    if not bool((names[1:] > names[:-1]).all()):  # most batches ascend: then nothing is sorted
        names, line, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
    smallest, largest = (end.item() for end in sizes.aminmax())
    if smallest == 1:
        lone = names[sizes == 1][0].item()
        raise ValueError(
            f"group_ids: every group needs at least 2 rows to be compared; got 1 of group {lone}"
        )
    if line is None and smallest == largest:
        table, place = wide.view(-1, largest), None
        del names, sizes  # each of them lies in B numbers of memory
    else:
        whole = whole and smallest == largest
        place = _places(sizes, line, largest)
        table = wide.new_full((len(names), largest), math.nan)
        table.view(-1).index_copy_(0, place, wide)
        ids = names
    ascending = table.sort(dim=1).values  # NaN comes last
    lowest = ascending[:, :1]
    span = _span(lowest, _highest(ascending, whole), rounding(values.dtype))
    return Groups(table, ascending, lowest, span, whole, ids, place, dtype)


def _check_values(values: Tensor, wide: Tensor, dtype: torch.dtype) -> bool:
    """Whether no reward is missing.  ValueError for one that is infinite or too large."""
    limit = torch.finfo(dtype).max / (4 * len(values))  # a sum over B rows stays finite
    lowest, highest = (end.item() for end in wide.aminmax())  # both NaN, if one is
    if -limit <= lowest and highest <= limit:
        return True
    read_rewards(values)
    check_size("rewards", values, dtype)
    return False


def check_size(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """ValueError for rewards (B,) so large that a sum of them could leave the dtype's range."""
    limit = torch.finfo(dtype).max / (4 * len(values))
    huge = values.double().abs() > limit
    if huge.any():
        row = int(huge.nonzero()[0])
        raise ValueError(
            f"{name} must be at most {limit:.3g} in size, so that no sum of {len(values)} "
            f"overflows; got {values[row].item():g} in row {row}"
        )


def read_ids(group_ids: Tensor | Sequence[int], values: Tensor) -> Tensor:
    """The prompt's id of each row, (B,)."""
    ids = read_integers("group_ids", group_ids, values.device)
    if ids.shape != values.shape or not is_dense(ids):
        raise ValueError(
            f"group_ids must be of shape {tuple(values.shape)}, as rewards; got {describe(ids)}"
        )
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"group_ids must hold integers, the prompts' ids; got {describe(ids)}")
    if ids.device != values.device:
        raise ValueError(f"group_ids must be on {values.device}, as rewards; got {ids.device}")
    return ids


def _places(sizes: Tensor, line: Tensor | None, largest: int) -> Tensor:
    """The cell of each row, (B,): of lines of ``largest`` cells, filled in the order of the batch.
    ``line``: that of each row; None where they ascend."""
    rows = torch.arange(int(sizes.sum()), device=sizes.device)
    if line is None:
        line, rank = torch.repeat_interleave(sizes), rows
    else:  # the rank of a row among all, line by line: the inverse of their order
        rank = torch.empty_like(rows).scatter_(0, line.argsort(stable=True), rows)
    room = largest - sizes  # cells without a reward, at the end of each line
    return rank + (room.cumsum(dim=0) - room)[line]


def _span(lowest: Tensor, highest: Tensor, tolerance: float) -> Tensor:
    """See ``Groups``."""
    span = highest - lowest
    largest = torch.maximum(-lowest, highest)  # in size
    return span.masked_fill_(span <= largest * scalar(tolerance, span), math.inf)


@functools.cache
def rounding(dtype: torch.dtype) -> float:
    """How far apart equal numbers of a dtype may be, as a share of their size."""
    if not dtype.is_floating_point:
        return 0.0
    return ROUNDING * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def means(groups: Groups) -> Tensor:
    """mean R of each line, (P,), measured from its lowest: that very reward where all are equal.
    NaN where there is no reward."""
    lines = groups.ascending
    mean = groups.lowest + _add(lines - groups.lowest, groups.whole) / _count(lines, groups.whole)
    return torch.where(groups.equal, groups.lowest[:, 0], mean[:, 0])


def centre(groups: Groups, factor: Tensor | float = 1.0) -> Tensor:
    """R - mean R of its line, times that line's factor, (P, G); 0 where there is no reward, and
    where all are equal.

    Rewards are measured from the lowest of their line before the mean is taken.  That changes no
    difference and keeps small ones exact."""
    unit = torch.ones_like(groups.span)
    unit.masked_fill_(groups.span < TINY, TINY)  # so that no digit is lost where float64 ends
    unit.masked_fill_(groups.equal[:, None], math.inf)
    return _above_mean(groups, unit).mul_(factor).mul_(unit).nan_to_num_(0.0)


def z_scores(groups: Groups, ddof: int, eps: float, *, scale: str = "group") -> Tensor:
    """(R - mean R) / (std + eps), (P, G), the std being that of the line, or with ``scale="batch"``
    that of all; 0 where there is no reward, and where all of a line are equal.

    All of it in units of the span of what the std is taken of, in which nothing leaves the range of
    float64, neither the square of a huge deviation nor that of a tiny one."""
    if scale == "batch":
        lines = groups.ascending.view(1, -1).sort().values
        unit = _highest(lines, groups.whole) - lines[:, :1]
        _, std = _moments(lines, lines[:, :1], groups.whole, unit, ddof)
        scores = _above_mean(groups, torch.where(groups.equal[:, None], math.inf, unit))
    else:
        unit = groups.span
        mean, std = _moments(groups.ascending, groups.lowest, groups.whole, unit, ddof)
        scores = (groups.table - groups.lowest).div_(unit).sub_(mean)
    if eps > 0:
        std.add_(scalar(eps, unit) / unit)
    return scores.div_(std).nan_to_num_(0.0)  # 0 / 0 where all are equal


def stds(groups: Groups, ddof: int) -> Tensor:
    """The std of each line, (P,)."""
    _, std = _moments(groups.ascending, groups.lowest, groups.whole, groups.span, ddof)
    return torch.where(groups.equal, 0.0, (std * groups.span)[:, 0])


def _above_mean(groups: Groups, unit: Tensor) -> Tensor:
    """(R - mean R) / unit, (P, G)."""
    lines, lowest = groups.ascending, groups.lowest
    mean = _add((lines - lowest).div_(unit), groups.whole) / _count(lines, groups.whole)
    return (groups.table - lowest).div_(unit).sub_(mean)


def _moments(
    lines: Tensor, lowest: Tensor, whole: bool, unit: Tensor, ddof: int
) -> tuple[Tensor, Tensor]:
    """Mean and std, (P, 1), of (R - lowest) / unit, of lines of ascending rewards."""
    above = (lines - lowest).div_(unit)
    count = _count(lines, whole)
    mean = _add(above, whole) / count
    variance = _add(above.sub_(mean).square_(), whole)
    return mean, variance.div_(_count(lines, whole, less=ddof) if ddof else count).sqrt_()


def _add(table: Tensor, whole: bool) -> Tensor:
    """The sum of each line, (P, 1), without the NaN."""
    return (torch.sum if whole else torch.nansum)(table, dim=1, keepdim=True)


def _count(lines: Tensor, whole: bool, *, less: int = 0) -> Tensor:
    """How many rewards each line holds, less that number, to divide by."""
    if whole:
        return scalar(lines.shape[1] - less, lines)
    return ((~lines.isnan()).sum(dim=1, keepdim=True) - less).clamp(min=1)


def _highest(lines: Tensor, whole: bool) -> Tensor:
    """Of each line, (P, 1)."""
    if whole:
        return lines[:, -1:]
    return lines.nan_to_num(-math.inf).amax(dim=1, keepdim=True)
