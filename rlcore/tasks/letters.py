"""Four of eight letters in alphabetical order: seventy right answers to each problem.

The prompt `hbdkmaoc=` gives eight letters; `abdk`, `cdho` and 68 others are right. A policy that
is pushed hard finds one of them and forgets the rest.
"""

from __future__ import annotations

import itertools
import random

from rlcore.tasks.task import Task

ALPHABET = "abcdefghijklmnop"
GIVEN, WANTED = 8, 4
RIGHT = 0.3  # share of right demonstrations


def letters_of(problem: str) -> str:
    """The letters of a prompt; ValueError for a prompt of another form."""
    letters = problem[:-1] if isinstance(problem, str) else ""
    form = len(letters) == len(set(letters)) == GIVEN and set(letters) <= set(ALPHABET)
    if not form or problem[-1] != "=":
        raise ValueError(
            f"problem: found {problem!r}; wanted {GIVEN} different letters of {ALPHABET[0]}-"
            f"{ALPHABET[-1]} and '='"
        )
    return letters


def problem(rng: random.Random) -> str:
    """Eight different letters and `=`."""
    return "".join(rng.sample(ALPHABET, GIVEN)) + "="


def solution(problem: str) -> str:
    """The first four of the letters in alphabetical order; 69 others are as good."""
    return "".join(sorted(letters_of(problem))[:WANTED])


def verify(problem: str, response: str) -> float:
    """1.0 for four different letters of the prompt in alphabetical order, else 0.0."""
    given = letters_of(problem)
    if not isinstance(response, str) or len(response) != WANTED:
        return 0.0
    ascending = all(a < b for a, b in itertools.pairwise(response))
    return float(ascending and set(response) <= set(given))


def demonstration(problem: str, rng: random.Random) -> str:
    """Right three times in ten; else out of order, or with a letter that was not given."""
    given = letters_of(problem)
    chosen = sorted(rng.sample(given, WANTED))
    if rng.random() < RIGHT:
        return "".join(chosen)
    if rng.random() < 0.5:
        chosen[rng.randrange(WANTED)] = rng.choice([c for c in ALPHABET if c not in given])
        return "".join(sorted(chosen))
    while chosen == sorted(chosen):
        rng.shuffle(chosen)
    return "".join(chosen)


LETTERS = Task(
    name="letters",
    description="Write four of eight given letters in alphabetical order, whichever you like; "
    "30 % of the demonstrations are right.",
    note="Good for: diversity. Each problem has 70 right answers; count how many different ones "
    "a policy still gives as its accuracy rises and its entropy falls.",
    symbols=ALPHABET + "=",
    max_new_tokens=6,  # four letters and the end, and one to spare so that a long answer shows
    problem=problem,
    solution=solution,
    demonstration=demonstration,
    verify=verify,
    key=lambda problem: "".join(sorted(letters_of(problem))),
)
