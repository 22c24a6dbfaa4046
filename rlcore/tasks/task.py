"""What a task is: problems, demonstrations of mixed quality, and a verifier."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from rlcore.checks import check_positive, shown, words
from rlcore.tasks.limit import Call, limited

SPLITS = ("train", "held-out")
LARGEST_REWARD = 1e100  # beyond it squares, and so standard deviations, overflow


class VerifierUnavailable(OSError):
    """A verifier that cannot work on this machine at all: unlike other errors it stops a run."""


PASSED_ON = (VerifierUnavailable, KeyboardInterrupt)


@dataclass(frozen=True)
class Task:
    """A family of problems with a verifier. A problem is its prompt, a string.

    symbols: the characters of prompts and responses, a token each; words, for a task whose tokens
    are words: its texts are words with a space between them, and symbols is "".
    problem(rng) draws a problem. solution(problem) is a right response.
    demonstration(problem, rng) is what the teacher of SFT writes, right or wrong.
    verify(problem, response) is the reward in [0, 1], or None where it abstains; a response is
    text from outside: it is compared, never evaluated, and a malformed one is worth 0. Nothing
    holds a verifier to that range, which is its own business: any finite number is trained on as it
    is, what is called accuracy is then its mean, and correct still means 1. It may have a method
    many(problems, responses) -> [(reward, what to name or None), ...], to be asked of a batch at
    once; what is named is listed among a run's errors, beside a reward that counts.
    key(problem) decides the split: problems with one key are all in "train" or all in "held-out".

    rewards(problem, response), where a task has several rewards: one for each of reward_names, None
    where it abstains; verify is then the one that is reported as accuracy.
    preference_scale, where a task has a true reward for preferences: a rater with this much noise
    prefers a to b with probability sigmoid((R(a) - R(b)) / preference_scale). R is verify, which
    may then return any finite number, and less than 0 for a malformed response.
    verifier_timeout: seconds that verify and rewards have for one response; None, no limit. It is
    there against one that hangs: rewards of one that needs nearly so long depend on the machine.
    A verify with a method `many` keeps its own limits.

    Raises ValueError where these do not fit together.
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
    rewards: Callable[[str, str], Mapping[str, float | None]] | None = None
    reward_names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    preference_scale: float | None = None
    verifier_timeout: float | None = 10.0

    def __post_init__(self) -> None:
        if bool(self.symbols) == bool(self.words):
            raise ValueError(
                f"words: found {self.words!r} beside symbols {self.symbols!r}; wanted either"
            )
        for name in ("verify", "rewards"):
            found = getattr(self, name)
            if not callable(found) and (name == "verify" or found is not None):
                or_none = "" if name == "verify" else " or None"
                wanted = f"a function of (problem, response){or_none}"
                raise ValueError(f"{name}: found {shown(found)}; wanted {wanted}")
        names = self.reward_names
        if (self.rewards is None) != (not names) or len(set(names)) != len(names):
            raise ValueError(
                f"reward_names: found {names!r}; wanted the names of what rewards returns, each "
                "once, and none without rewards"
            )
        scale = self.preference_scale
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"preference_scale: found {scale!r}; wanted a finite number above 0")
        if self.verifier_timeout is not None:
            check_positive(verifier_timeout=self.verifier_timeout)

    @property
    def vocabulary(self) -> str | tuple[str, ...]:
        """What `build_tokenizer` takes: the characters, or the words."""
        return self.words or self.symbols

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

    None and NaN mean that it abstains. A verifier that raises (SystemExit too, as a program does
    that it calls), that needs more than `task.verifier_timeout`, or returns something that is not a
    finite number of at most `LARGEST_REWARD`, does not stop a run: the reward is missing, and the
    error says why. One that cannot work here at all does: VerifierUnavailable is passed on, and so
    is KeyboardInterrupt.
    """
    return rate_all(task, [prompt], [response])[0]


def rate_all(
    task: Task, prompts: Sequence[str], responses: Sequence[str]
) -> list[tuple[float, str | None]]:
    """`rate` of each response; at once, where the verifier has a method `many`."""
    many = getattr(task.verify, "many", None)
    if many is not None:
        try:
            found = list(many(prompts, responses))
            if len(found) != len(responses):
                raise ValueError(f"the verifier returned {len(found)} of {len(responses)} rewards")
        except PASSED_ON:
            raise
        except BaseException as error:
            return [(math.nan, _said(error))] * len(responses)
        return [_named(one) for one in found]
    with limited(task.verifier_timeout) as call:
        return [_rate(task, call, *pair) for pair in zip(prompts, responses, strict=True)]


def _rate(task: Task, call: Call, prompt: str, response: str) -> tuple[float, str | None]:
    try:
        return _number(call(task.verify, prompt, response), "the verifier"), None
    except PASSED_ON:
        raise
    except BaseException as error:  # any error of a verifier is the verifier's
        return math.nan, _said(error)


def _named(found: Any) -> tuple[float, str | None]:
    """One of the (reward, error) that `many` gives; the error is None or says what went wrong."""
    try:
        value, error = found
        reward = _number(value, "the verifier")
    except Exception as wrong:
        return math.nan, _said(wrong)
    return reward, None if error is None else words(error) or "the verifier named no reason"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {words(error)}"


def rate_each(task: Task, prompt: str, response: str) -> tuple[tuple[float, ...], str | None]:
    """(rewards, error) of a response, in the order of `task.reward_names`; NaN where missing.

    As `rate`: a function that raises, or does not return exactly the named rewards, leaves all of
    them missing; a number out of range leaves that one missing. ValueError for a task that has one
    reward only.
    """
    if task.rewards is None:
        raise ValueError(f"task: {task.name!r} has no several rewards; wanted one with rewards")
    try:
        with limited(task.verifier_timeout) as call:
            values = dict(call(task.rewards, prompt, response))
        if set(values) != set(task.reward_names):
            raise ValueError(f"rewards returned {sorted(values)}, not {list(task.reward_names)}")
    except PASSED_ON:
        raise
    except BaseException as error:
        return (math.nan,) * len(task.reward_names), _said(error)
    rewards, first = [], None
    for name in task.reward_names:
        try:
            rewards.append(_number(values[name], name))
        except Exception as error:
            rewards.append(math.nan)
            first = first or _said(error)
    return tuple(rewards), first


def _number(value: Any, who: str) -> float:
    """NaN for None. ValueError for what is no number, text too, or is beyond `LARGEST_REWARD`."""
    if value is None:
        return math.nan
    try:
        reward = math.inf if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.inf
    if abs(reward) > LARGEST_REWARD:
        raise ValueError(f"{who} returned {shown(value)}; wanted a number, or None to abstain")
    return reward
