"""Differences over seeds: by hand, and how often the interval holds the truth."""

from __future__ import annotations

import math
import random

import pytest

from rlcore.comparison import paired_difference, standard_error, t95


def test_by_hand() -> None:
    """Differences 1, 2 and 3: mean 2, standard error 1 / sqrt(3), t = 4.303."""
    found = paired_difference({0: 2.0, 1: 4.0, 7: 6.0}, {7: 3.0, 0: 1.0, 1: 2.0})
    margin = 4.303 / math.sqrt(3)
    assert (found.mean, found.low, found.high, found.seeds) == pytest.approx(
        (2.0, 2 - margin, 2 + margin, 3)
    )
    assert found.sign == 0
    assert str(found) == "+2 (-0.484 to +4.48)"


def test_the_sign_is_that_of_the_whole_interval() -> None:
    values, base = {0: 1.0, 1: 1.1, 2: 1.2}, dict.fromkeys(range(3), 0.0)
    assert paired_difference(values, base).sign == 1
    assert paired_difference(base, values).sign == -1
    assert paired_difference(base, base).sign == 0


def test_what_is_the_same_in_every_seed_takes_part_in_no_difference() -> None:
    """A start that is good for one seed is good for both sides."""
    noise = {seed: 100.0 * seed for seed in range(5)}
    found = paired_difference({seed: value + 1 for seed, value in noise.items()}, noise)
    assert (found.low, found.high) == (1, 1)


@pytest.mark.parametrize("seeds", [2, 5, 40])
def test_the_interval_holds_the_truth_in_95_of_100_cases(seeds: int) -> None:
    rng, inside, cases = random.Random(0), 0, 4000
    for _ in range(cases):
        values = {seed: rng.gauss(0.3, 1) for seed in range(seeds)}
        found = paired_difference(values, dict.fromkeys(range(seeds), 0.0))
        inside += found.low <= 0.3 <= found.high
    assert inside / cases == pytest.approx(0.95, abs=0.015)


def test_many_values_have_the_points_of_the_normal() -> None:
    assert (t95(2), t95(31), t95(32), t95(1000)) == (12.706, 2.042, 1.96, 1.96)
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_bad_input_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"base: found seeds \[0, 2\]; wanted .* \[0, 1\]"):
        paired_difference({0: 1.0, 1: 1.0}, {0: 1.0, 2: 1.0})
    with pytest.raises(ValueError, match="values: found 1 seeds; wanted at least 2"):
        paired_difference({0: 1.0}, {0: 1.0})
    with pytest.raises(ValueError, match="base: found nan for seed 1; wanted finite numbers"):
        paired_difference({0: 1.0, 1: 1.0}, {0: 1.0, 1: math.nan})
