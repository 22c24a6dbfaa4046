"""Tasks from the package `reasoning-gym`: its generators as prompts, its scores as verifier.

The package is an extra (`pip install reasoning-gym`) and is imported when a task is made.
"""

from __future__ import annotations

import inspect
import itertools
import random
import re
import sys
from collections.abc import Callable
from typing import Any

from rlcore.checks import check_seed, check_whole
from rlcore.tasks.task import Task

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
# What makes text run in python. A module that holds one of these may use it on a response.
EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify|compile|__import__)\(")


def reasoning_gym_task(
    name: str,
    *,
    max_new_tokens: int,
    size: int = 10_000,
    seed: int = 0,
    exact: bool = False,
    extract: Callable[[str], str] = str.strip,
    prompt: Callable[[str], str] = str,
    mistakes: float = 0.0,
    symbols: str = PRINTABLE,
    **settings: Any,
) -> Task:
    """A task from one of the package's data sets, such as "chain_sum".

    size, seed, settings: what the package makes the data of. Problems are told apart by their
    prompt, and one in ten is held out.
    extract: the answer in a response (the score is mostly a comparison of texts; the default only
    drops white space around it). prompt: the prompt from a question, such as a chat template.
    mistakes: the share of demonstrations that give the answer to another problem; the others are
    the package's own answer.
    exact: the reward is 1 for the package's own answer as text, else 0; the package's score is not
    asked. A few of its scores run a response as python (`eval`, or sympy's `parse_expr`, which does
    the same): with a response from outside that is somebody else's code on this machine. Such a
    data set needs exact=True, and loses other answers that are as right.
    A few data sets score well without an answer of their own: there solution and demonstration
    raise ValueError, and so does the verifier with exact=True.
    symbols: for a compact model; a pretrained one has a tokenizer of its own.

    Raises ValueError for a missing package, an unknown data set (the error lists the names), bad
    settings, a bad argument, and for a data set that runs responses without exact=True.
    """
    check_whole(1, max_new_tokens=max_new_tokens, size=size)
    check_seed(seed)
    if not 0 <= mistakes <= 1:
        raise ValueError(f"mistakes: found {mistakes!r}; wanted a share, 0 to 1")
    package = _package()
    if name not in package.factory.DATASETS:
        names = ", ".join(sorted(package.factory.DATASETS))
        raise ValueError(f"name: found {name!r}; wanted one of {names}")
    try:
        data = package.create_dataset(name, size=size, seed=seed, **settings)
    except (AssertionError, TypeError) as error:  # how the package says that settings are bad
        raise ValueError(f"settings: {name} takes no such settings ({error})") from error
    if not exact and runs_text(type(data)):
        raise ValueError(
            f"exact: {name} may run a response as python to score it; wanted exact=True, which "
            "compares it with the package's answer as text"
        )
    seen: dict[str, dict[str, Any]] = {}
    rest = itertools.count()

    def item(i: int) -> str:
        """The prompt of item i, which is remembered by it."""
        entry = data[i]
        text = prompt(entry["question"])
        seen.setdefault(text, entry)
        return text

    def find(problem: str) -> dict[str, Any]:
        """The item of a prompt; those not drawn yet are looked through in order."""
        while problem not in seen:
            i = next(rest)
            if i >= size:
                raise ValueError(f"problem: found {problem!r}; it is none of the {size} of {name}")
            item(i)
        return seen[problem]

    def solution(problem: str) -> str:
        answer = find(problem)["answer"]
        if not isinstance(answer, str):
            raise ValueError(f"problem: {name} gives no answer to {problem!r}")
        return answer

    def verify(problem: str, response: str) -> float:
        entry = find(problem)
        if not isinstance(response, str):
            return 0.0
        answer = extract(response)
        if exact:
            return float(answer == solution(problem).strip())
        return float(data.score_answer(answer, entry))

    def demonstration(problem: str, rng: random.Random) -> str:
        other = rng.random() < mistakes
        return solution(item(rng.randrange(size)) if other else problem)

    return Task(
        name=f"reasoning-gym/{name}",
        description=f"The data set {name} of reasoning-gym.",
        note="Good for: problems of somebody else's making, for a pretrained model.",
        symbols=symbols,
        max_new_tokens=max_new_tokens,
        problem=lambda rng: item(rng.randrange(size)),
        solution=solution,
        demonstration=demonstration,
        verify=verify,
        key=str,
    )


def runs_text(dataset: type) -> bool:
    """Whether a data set's class, or one that it is made from, stands in a file that runs text.

    It looks at whole files, so it may find what never sees a response; it does not miss a call in
    them.
    """
    for cls in dataset.__mro__:
        module = sys.modules.get(cls.__module__)
        if module is None or cls.__module__.partition(".")[0] in ("builtins", "abc", "typing"):
            continue
        if cls.__module__.partition(".")[0] == "collections":
            continue
        try:
            text = inspect.getsource(module)
        except (OSError, TypeError):
            return True  # what cannot be read is not trusted
        if EVALUATES.search(text):
            return True
    return False


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(
            "name: reasoning-gym is not installed; pip install reasoning-gym"
        ) from error
    return reasoning_gym
