"""Does a change show? The same seeds with and without it, compared one by one.

Two runs with one seed have the same start and the same problems, so that their difference says more
than the difference of two means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; after 30, the normal's.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
       2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
       2.052, 2.048, 2.045, 2.042)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of a value minus its baseline's, and the 95 % interval of that mean."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 where the whole interval lies above or below 0, else 0: it does not show."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ({self.low:+.3g} to {self.high:+.3g})"


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference:
    """Of a value for each seed and that of the same seed's baseline.

    The interval is Student's, over the seeds: mean ± t s / sqrt(n), s with n - 1.
    Raises ValueError for other seeds on one side than on the other, fewer than two of them, and a
    value that is not finite.
    """
    if values.keys() != base.keys():
        raise ValueError(
            f"base: found seeds {sorted(base)}; wanted those of values, {sorted(values)}"
        )
    if len(values) < 2:
        raise ValueError(f"values: found {len(values)} seeds; wanted at least 2")
    for name, given in (("values", values), ("base", base)):
        wrong = [seed for seed, value in given.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(
                f"{name}: found {given[wrong[0]]} for seed {wrong[0]}; wanted finite numbers"
            )
    found = [values[seed] - base[seed] for seed in values]
    mean, margin = statistics.fmean(found), t95(len(found)) * standard_error(found)
    return Difference(mean, mean - margin, mean + margin, len(found))


def t95(count: int) -> float:
    """By how many standard errors the 95 % interval of a mean of `count` values reaches out."""
    return T95[count - 2] if count - 2 < len(T95) else 1.96


def standard_error(values: list[float]) -> float:
    """Of the mean of at least two values, their std with n - 1."""
    return statistics.stdev(values) / math.sqrt(len(values))
