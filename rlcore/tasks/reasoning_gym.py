"""Tasks from the package `reasoning-gym`: its generators as prompts, its scores as verifier.

The package is an extra (`pip install reasoning-gym`) and is imported when a task is made.
"""

from __future__ import annotations

import hashlib
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
EVALUATES = re.compile(
    r"(?<!\bre\.)\b(eval|exec|parse_expr|sympify|compile|__import__|literal_eval)\(|\bpickle\b"
)
# Files that were read, with the sha256 of what was read: they run text, but no response. A file of
# another version is another file, and is not trusted.
READ = {
    # eval: the answer of the data set
    "reasoning_gym.algorithmic.number_sorting": (
        "a481e06274f9a978b213d43abd87d04943b796d73582d4b6febcfbe6a0f369f1"
    ),
    # eval: as it makes a problem
    "reasoning_gym.arithmetic.basic_arithmetic": (
        "9eb222cd9393ee7ce9e60e3cb2d00ba2da038aa0737f9fe46b866b3a6a682934"
    ),
    # eval: its own problem
    "reasoning_gym.arithmetic.bitwise_arithmetic": (
        "d4c0fa2bf34ed1610c4cb3b2ec6ea40bdaf2b190875c3b64536f21e5540eacb5"
    ),
    # compile: the package's own, as it makes a problem
    "reasoning_gym.code.bf": ("dc71afe6d2da76414b4e46f1adcbe3ebba9d361f8995226815d5de98a7038f94"),
    # exec: the package's own programs, for a problem
    "reasoning_gym.code.codeio": (
        "c573957be85a68179520b61cc70ebb22ab39027dd0a876b2f4402df9df6be1a2"
    ),
}
# Scores that run nothing and yet cannot be asked, of data sets without an answer to compare with.
UNFIT = {
    "propositional_logic": "takes as much memory as the names in a response have combinations",
    "rubiks_cube": "takes as much memory as a number in a response says",
}
NO_ANSWER = "~ no answer ~"  # right nowhere


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
    the same): with a response from outside that is somebody else's code on this machine. Another
    one takes any text for right. Such a data set needs exact=True, and loses other answers that are
    as right. Of two data sets no task is made: there a short response can fill the memory.
    A response that the score fails on is malformed, and worth 0.
    A few data sets score well without an answer of their own: there solution and demonstration
    raise ValueError, and so does the verifier with exact=True.
    symbols: for a compact model; a pretrained one has a tokenizer of its own.

    Raises ValueError for a missing package, an unknown data set (the error lists the names), bad
    settings, a bad argument, and for a data set that needs exact=True without it.
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
    _check_score(name, data, exact)
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
        return _score(data, answer, entry)

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


def _score(data: Any, answer: str, entry: dict[str, Any]) -> float:
    """The package's score; 0 where it fails, as by int("seven"): none fails on its own answer."""
    try:
        return float(data.score_answer(answer, entry))
    except Exception:
        return 0.0


def _check_score(name: str, data: Any, exact: bool) -> None:
    """ValueError where the score of a data set, or of one that it is mixed from, is not asked."""
    for part, found in [(name, data), *getattr(data, "datasets", {}).items()]:
        who = part if part == name else f"{part} (a part of {name})"
        if part in UNFIT:
            raise ValueError(f"name: {who} {UNFIT[part]}; no task is made of it")
        if exact:
            continue
        if runs_text(type(found)):
            why = "may run a response as python to score it"
        elif not getattr(found, "datasets", None) and _score(found, NO_ANSWER, found[0]) >= 1:
            why = "scores any text as right"
        else:
            continue
        raise ValueError(
            f"exact: {who} {why}; wanted exact=True, which compares it with the package's answer "
            "as text"
        )


def runs_text(dataset: type) -> bool:
    """Whether a data set's class, or one that it is made from, stands in a file that runs text.

    It looks at whole files, so it may find what never sees a response; it does not miss a call in
    them. Files in READ that are as they were read are taken for harmless.
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
        read = READ.get(cls.__module__)
        if EVALUATES.search(text) and hashlib.sha256(text.encode()).hexdigest() != read:
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
