"""What a task is: problems, demonstrations of mixed quality, and a verifier."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

SPLITS = ("train", "held-out")
LARGEST_REWARD = 1e100  # beyond it squares, and so standard deviations, overflow


@dataclass(frozen=True)
class Task:
    """A family of problems with a verifier. A problem is its prompt, a string.

    problem(rng) draws a problem. solution(problem) is a right response.
    demonstration(problem, rng) is what the teacher of SFT writes, right or wrong.
    verify(problem, response) is the reward in [0, 1], or None where it abstains; a response is
    text from outside: it is compared, never evaluated, and a malformed one is worth 0.
    key(problem) decides the split: problems with one key are all in "train" or all in "held-out".
    """

    name: str
    description: str
    note: str
    symbols: str
    max_new_tokens: int
    problem: Callable[[random.Random], str]
    solution: Callable[[str], str]
    demonstration: Callable[[str, random.Random], str]
    verify: Callable[[str, str], float | None]
    key: Callable[[str], str]

    def split_of(self, problem: str) -> str:
        """ "held-out" for one key in ten, by a checksum, else "train"."""
        return "held-out" if crc32(self.key(problem).encode()) % 10 == 0 else "train"

    def draw(self, rng: random.Random, split: str = "train") -> str:
        """One problem of a split, drawn with `rng`; ValueError where 1,000 draws give none."""
        if split not in SPLITS:
            raise ValueError(f"split: found {split!r}; wanted one of {', '.join(SPLITS)}")
        for _ in range(1000):
            problem = self.problem(rng)
            if self.split_of(problem) == split:
                return problem
        raise ValueError(f"split: 1,000 problems of {self.name!r} and none of {split!r}")

    def prompts(self, split: str = "held-out", n: int = 512, *, seed: int = 0) -> list[str]:
        """`n` different problems of a split, the same ones for the same seed.

        Raises ValueError for an unknown split, and when the split does not hold n problems
        (found out by drawing: after 1,000 n draws).
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n: found {n!r}; wanted a whole number of at least 1")
        rng = random.Random(f"{self.name}/{split}/{seed}")
        found: dict[str, None] = {}
        for _ in range(1000 * n):
            found[self.draw(rng, split)] = None
            if len(found) == n:
                return list(found)
        raise ValueError(f"n: {n} different problems wanted; {split!r} gave only {len(found)}")


def rate(task: Task, prompt: str, response: str) -> tuple[float, str | None]:
    """(reward, error) of a response: what the verifier says, or NaN for a missing reward.

    None and NaN mean that it abstains. A verifier that raises, or returns something that is not a
    finite number of at most `LARGEST_REWARD`, does not stop a run: the reward is missing, and the
    error says why.
    """
    try:
        value = task.verify(prompt, response)
        reward = math.nan if value is None else float(value)
        if abs(reward) > LARGEST_REWARD:
            raise ValueError(f"the verifier returned {reward}")
    except Exception as error:  # any error of a verifier is the verifier's
        return math.nan, f"{type(error).__name__}: {error}"
    return reward, None
