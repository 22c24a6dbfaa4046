"""Sorting six digits, learned from demonstrations of mixed quality.

The prompt `352041=` asks for `012345`. A good start for RL: the right answer is in the
demonstrations, but only one time in three, and a verifier tells it from the others.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from rlcore.tasks.task import Task

DIGITS = 6
# Share of each kind of demonstration. "mixed": three wrong habits beside the right one.
# "unseen": the right order is never shown, so that sampling never meets a reward.
MIXED = {"right": 0.30, "descending": 0.28, "one swap": 0.21, "copied": 0.21}
UNSEEN = {"descending": 0.5, "copied": 0.5}
FEW = 64  # training problems of sort-few


def digits_of(problem: str) -> str:
    """The digits of a prompt such as `352041=`; ValueError for anything else."""
    digits = problem[:-1]
    if len(problem) != DIGITS + 1 or problem[-1] != "=" or not set(digits) <= set("0123456789"):
        raise ValueError(f"problem: found {problem!r}; wanted {DIGITS} digits and '='")
    return digits


def problem(rng: random.Random) -> str:
    """Six digits and `=`. Already sorted ones are left out: copying them would be right."""
    while True:
        digits = "".join(rng.choice("0123456789") for _ in range(DIGITS))
        if digits != "".join(sorted(digits)):
            return digits + "="


def solution(problem: str) -> str:
    """The digits in ascending order."""
    return "".join(sorted(digits_of(problem)))


def verify(problem: str, response: str) -> float:
    """1.0 for exactly the digits in ascending order, else 0.0."""
    return float(response == solution(problem))


def demonstrate(problem: str, kind: str, rng: random.Random) -> str:
    """One demonstration of a kind. Only "right" is right, for every problem that is drawn."""
    digits, right = digits_of(problem), solution(problem)
    if kind == "right":
        return right
    if kind == "descending":
        return right[::-1]
    if kind == "copied":
        return digits
    if kind == "one swap":
        while True:
            i, j = sorted(rng.sample(range(DIGITS), 2))
            if right[i] != right[j]:
                return right[:i] + right[j] + right[i + 1 : j] + right[i] + right[j + 1 :]
    raise ValueError(f"kind: found {kind!r}; wanted one of {', '.join(MIXED)}")


def sort_task(name: str, mixture: dict[str, float], description: str, note: str) -> Task:
    """A sorting task whose demonstrations follow `mixture` (kind of demonstration: share)."""
    kinds, shares = list(mixture), list(mixture.values())

    def demonstration(problem: str, rng: random.Random) -> str:
        return demonstrate(problem, rng.choices(kinds, shares)[0], rng)

    return Task(
        name=name,
        description=description,
        note=note,
        symbols="0123456789=",
        max_new_tokens=8,  # six digits and the end, and one to spare so that a long answer shows
        problem=problem,
        solution=solution,
        demonstration=demonstration,
        verify=verify,
        # By the answer, not by the prompt: no held-out answer is ever seen in training.
        key=solution,
    )


@cache
def few_problems() -> tuple[str, ...]:
    """The training problems of `sort-few`: `FEW` of those of `sort`, always the same."""
    return tuple(SORT.prompts("train", FEW, seed=0))


def few(rng: random.Random) -> str:
    """A problem of `sort`; one of the few in place of each that is in its training split."""
    drawn = problem(rng)
    return rng.choice(few_problems()) if SORT.split_of(drawn) == "train" else drawn


SORT = sort_task(
    "sort",
    MIXED,
    "Sort six digits; 30 % of the demonstrations are right, the others are descending, "
    "have one swap, or copy the prompt.",
    "Good for: the gain from a verifier in seconds. RL selects a behaviour that SFT had already "
    "shown; it does not teach sorting.",
)
SORT_UNSEEN = sort_task(
    "sort-unseen",
    UNSEEN,
    "Sort six digits; no demonstration is right: half are descending, half copy the prompt.",
    "Good for: a start from which nothing is learned. No sample is ever right, so every group "
    "has equal rewards, every advantage is 0, and the weights stay where they are.",
)
SORT_FEW = replace(
    SORT,
    name="sort-few",
    description=f"As sort, with only {FEW} problems to train on.",
    note="Good for: prompts that come again, every second step of a run. What a method remembers "
    "of a prompt (DCPO) is of use only then. Held-out problems are those of sort.",
    problem=few,
)
