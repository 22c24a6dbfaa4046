"""Sorting six digits after useless dots: many answers do not fit into the limit.

`...012345` is a right response to `352041=`, as is `012345`. Nothing in the verifier asks for
short answers, but one that is cut by the limit has lost its digits.
"""

from __future__ import annotations

import random

from rlcore.tasks.sort import SORT, problem, solution
from rlcore.tasks.task import Task

FILLER = "."
LIMIT = 16
LONGEST_FILLER = 17  # then six digits and the end: nine dots fit, the eleventh costs a digit


def verify(problem: str, response: str) -> float:
    """1.0 for dots and then exactly the digits in ascending order, else 0.0."""
    right = solution(problem)
    return float(isinstance(response, str) and response.lstrip(FILLER) == right)


def demonstration(problem: str, rng: random.Random) -> str:
    """None to 17 dots, then a demonstration of `sort`: 30 % right."""
    return FILLER * rng.randint(0, LONGEST_FILLER) + SORT.demonstration(problem, rng)


SORT_FILLER = Task(
    name="sort-filler",
    description="Sort six digits within 16 tokens; the demonstrations of sort, after none to 17 "
    "useless dots, so that four in nine are longer than the limit.",
    note="Good for: answers that are cut. What a method does with them (keep, filter, penalise) "
    "decides how fast answers become short; the final accuracy is much the same.",
    symbols="0123456789=.",
    max_new_tokens=LIMIT,
    problem=problem,
    solution=solution,
    demonstration=demonstration,
    verify=verify,
    key=solution,
)
