"""Sorting six digits in a box, without filler: three rewards for one response.

`[012345]` is the right response to `352041=`. Dots may stand before the digits or the box, and
are of no use. Each reward asks for one thing only, so that a response may earn any of them alone.
"""

from __future__ import annotations

import random

from rlcore.tasks.sort import DIGITS, MIXED, demonstrate, problem, solution
from rlcore.tasks.task import Task

NAMES = ("correct", "box", "short")
FILLER = "."
LONGEST_FILLER = 4
# What the demonstrations are like. One in ten is sorted; box and filler are even chances.
SORTED, BOXED, SHORT = 0.1, 0.5, 0.5
WRONG = [kind for kind in MIXED if kind != "right"]


def parts(response: str) -> tuple[str, bool, bool] | None:
    """(digits, whether they are in a box, whether there is no filler); None for another form.

    The form is dots, then six digits or six digits in a box: nothing before, between or after.
    """
    if not isinstance(response, str):
        return None
    rest = response.lstrip(FILLER)
    boxed = len(rest) > 2 and rest[0] == "[" and rest[-1] == "]"
    digits = rest[1:-1] if boxed else rest
    if len(digits) != DIGITS or not set(digits) <= set("0123456789"):
        return None
    return digits, boxed, rest == response


def verify(problem: str, response: str) -> float:
    """1.0 when the digits are in ascending order, in a box or not, with filler or not."""
    right, found = solution(problem), parts(response)
    return float(found is not None and found[0] == right)


def demonstration(problem: str, rng: random.Random) -> str:
    """Sorted one time in ten, in a box and without filler one time in two each."""
    kind = "right" if rng.random() < SORTED else rng.choice(WRONG)
    digits = demonstrate(problem, kind, rng)
    boxed = f"[{digits}]" if rng.random() < BOXED else digits
    return boxed if rng.random() < SHORT else FILLER * rng.randint(1, LONGEST_FILLER) + boxed


def sort_box_task(
    name: str, description: str, note: str, scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> Task:
    """The task whose rewards correct, box and short are worth `scales` each (and 0 if missed)."""

    def rewards(problem: str, response: str) -> dict[str, float]:
        right, found = verify(problem, response), parts(response)
        earned = (right, *map(float, found[1:])) if found is not None else (0.0, 0.0, 0.0)
        return {n: s * r for n, s, r in zip(NAMES, scales, earned, strict=True)}

    return Task(
        name=name,
        description=description,
        note=note,
        symbols="0123456789=[].",
        max_new_tokens=DIGITS + 2 + LONGEST_FILLER + 2,  # the end, and one to spare
        problem=problem,
        solution=lambda problem: f"[{solution(problem)}]",
        demonstration=demonstration,
        verify=verify,
        key=solution,
        rewards=rewards,
        reward_names=NAMES,
    )


SORT_BOX = sort_box_task(
    "sort-box",
    "Sort six digits, put them in a box, write no filler: three rewards; 10 % of the "
    "demonstrations are sorted, half have the box, half have no filler.",
    "Good for: several rewards of one scale. The sum of the rewards and their normalised "
    "advantages lead to the same place here, unless groups are small.",
)
SORT_BOX_UNEVEN = sort_box_task(
    "sort-box-uneven",
    "As sort-box, with rewards of unlike scales: correct is worth 0.1, the box 1, no filler 2.",
    "Good for: several rewards of unlike scales. In their sum the small one is drowned until the "
    "large ones are earned; normalised apart, all count from the first step.",
    scales=(0.1, 1.0, 2.0),
)
