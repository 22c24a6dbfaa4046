r"""Tasks from questions with a mathematical answer, verified by the package `math-verify`.

It takes `1/2`, `0.5` and `\boxed{\frac12}` for the same answer. The package is an extra
(`pip install math-verify`) and is imported when a task is made.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from rlcore.checks import check_whole
from rlcore.tasks.reasoning_gym import PRINTABLE
from rlcore.tasks.task import Task

LONGEST = 2000  # characters of a response that are looked at, its last ones
SECONDS = 2  # for reading a response, and for comparing it


def math_task(
    name: str,
    problems: Sequence[tuple[str, str]],
    *,
    max_new_tokens: int,
    prompt: Callable[[str], str] = str,
    mistakes: float = 0.0,
    symbols: str = PRINTABLE,
) -> Task:
    r"""A task from (question, answer) pairs; an answer is what `math_verify.parse` reads.

    The reward is 1 where a response's answer is mathematically that of the problem, else 0; of a
    response of several formulas the package takes the last. It reads a response by a grammar of
    LaTeX and of plain arithmetic and stops after 2 seconds; only the last 2,000 characters are
    looked at. Outside the main thread the package cannot stop: there the verifier raises, so that
    the reward is missing (see `rate`) rather than wrong.
    prompt, mistakes, symbols: as in `reasoning_gym_task`. One question in ten is held out.

    Raises ValueError for a missing package, no problems, a question that comes twice, an answer in
    which the package finds no mathematics, and a bad argument.
    """
    check_whole(1, max_new_tokens=max_new_tokens)
    if not 0 <= mistakes <= 1:
        raise ValueError(f"mistakes: found {mistakes!r}; wanted a share, 0 to 1")
    if not len(problems):
        raise ValueError("problems: found none; wanted at least one question with its answer")
    answers: dict[str, str] = {}
    for question, answer in problems:
        text = prompt(question)
        if text in answers:
            raise ValueError(f"problems: found {question!r} twice")
        answers[text] = answer
    package, prompts = _package(), list(answers)

    @cache
    def read(answer: str) -> tuple[Any, ...]:
        found = tuple(package.parse(answer, parsing_timeout=SECONDS))
        if not found:
            raise ValueError(f"problems: found the answer {answer!r}; wanted mathematics")
        return found

    for answer in answers.values():
        read(answer)

    def find(problem: str) -> str:
        if problem not in answers:
            raise ValueError(f"problem: found {problem!r}; it is none of the {len(answers)}")
        return answers[problem]

    def verify(problem: str, response: str) -> float:
        right = list(read(find(problem)))
        if not isinstance(response, str):
            return 0.0
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("math-verify can only stop in the main thread")
        found = package.parse(response[-LONGEST:], parsing_timeout=SECONDS)
        return float(package.verify(right, found, timeout_seconds=SECONDS))

    def demonstration(problem: str, rng: random.Random) -> str:
        return find(rng.choice(prompts)) if rng.random() < mistakes else find(problem)

    return Task(
        name=name,
        description=f"{len(answers)} questions with a mathematical answer.",
        note="Good for: answers that may be written in several ways.",
        symbols=symbols,
        max_new_tokens=max_new_tokens,
        problem=lambda rng: rng.choice(prompts),
        solution=find,
        demonstration=demonstration,
        verify=verify,
        key=str,
    )


def _package() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ValueError("name: math-verify is not installed; pip install math-verify") from error
    return math_verify
