"""Tasks whose answers are programs: the verifier runs them, in a sandbox, on the problem's tests.

A program is right where it returns the right values, however it is written. Only the values are
compared, and they are compared here: see `rlcore.tasks.sandbox`.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.checks import check_whole
from rlcore.tasks.reasoning_gym import PRINTABLE
from rlcore.tasks.sandbox import Outcome, Program, Sandbox
from rlcore.tasks.task import Task

REWARDS = ("all", "share")
FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*(\w*)[ \t]*$")
REMEMBERED = 20_000  # rewards that a verifier keeps, of (problem, program)


@dataclass(frozen=True)
class CodeProblem:
    """A question, the function that an answer has to define, its tests, and a right answer.

    tests: pairs of arguments and the value wanted, such as `((2, 3), 5)`: plain data (None, bool,
    int, float, str, list, dict with str keys). A value that is a tuple comes back as a list.
    Keep them out of the question: a program may contain what it has seen.

    Raises ValueError for no tests, and for a test that is not such a pair.
    """

    question: str
    function: str
    tests: tuple[tuple[Sequence[Any], Any], ...]
    solution: str

    def __post_init__(self) -> None:
        if not self.tests:
            raise ValueError(f"tests: found none for {self.question!r}; wanted at least one")
        for test in self.tests:
            try:
                arguments, wanted = test
                given = [*arguments]
            except (TypeError, ValueError):
                raise ValueError(f"tests: found {test!r}; wanted (arguments, value)") from None
            if not _is_plain([given, wanted]):
                raise ValueError(f"tests: found {test!r}; wanted plain data, of finite numbers")


def python_block(response: str) -> str:
    """The program in a response: its last fenced block, or all of it where there is no fence.

    A fence is a line of three or more ` or ~, the opening one with a language name or without; a
    block of another language than `python`, `py` or `python3` is passed over. A block that is not
    closed ends with the response.
    """
    blocks: list[list[str]] = []
    fence, fenced = "", False
    for line in response.split("\n"):
        found = FENCE.match(line)
        if found is not None and not fence:
            fence, fenced = found[1], True
            if found[2].lower() in ("", "python", "py", "python3"):
                blocks.append([])
                keep = True
            else:
                keep = False
        elif found is not None and found[1].startswith(fence) and not found[2]:
            fence = ""
        elif fence and keep:
            blocks[-1].append(line)
    if not fenced:
        return response
    return "\n".join(blocks[-1]) if blocks else ""


class CodeVerifier:
    """`verify` of a task whose responses are programs; `many` of them are run side by side.

    tests(problem) -> (function, tests) as in `CodeProblem`; ValueError for no problem of the task.
    program(response) -> source. reward: "all", 1 where every test is passed, else 0; "share", the
    share of the tests that are passed. A value passes where it equals the one wanted: numbers by
    value, up to `tolerance` (relative, and absolute near 0), True and 1 apart.
    A response that does not come to an end, asks for what it may not have, or is no program, is
    worth what it has passed until then: wrong, never missing. The same program for the same
    problem is run once, so that a reward does not change within a run.

    Raises ValueError for an unknown reward and a tolerance that is none.
    """

    def __init__(
        self,
        tests: Callable[[str], tuple[str, Sequence[tuple[Sequence[Any], Any]]]],
        program: Callable[[str], str],
        *,
        reward: str = "all",
        tolerance: float = 0.0,
        sandbox: Sandbox | None = None,
    ) -> None:
        if reward not in REWARDS:
            raise ValueError(f"reward: found {reward!r}; wanted one of {', '.join(REWARDS)}")
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance: found {tolerance!r}; wanted 0 to 1")
        self.tests, self.program = tests, program
        self.reward, self.tolerance = reward, tolerance
        self.sandbox = Sandbox() if sandbox is None else sandbox
        self._known: OrderedDict[tuple[str, str], tuple[float, str | None]] = OrderedDict()

    def __call__(self, problem: str, response: str) -> float:
        """The reward of one response. Raises SandboxError where no program can be run."""
        return self.many([problem], [response])[0][0]

    def many(
        self, problems: Sequence[str], responses: Sequence[str]
    ) -> list[tuple[float, str | None]]:
        """(reward, why its program did not come to its end or None) for each response."""
        keys, wanted, new = [], {}, {}
        for problem, response in zip(problems, responses, strict=True):
            function, tests = self.tests(problem)
            source = self.program(response) if isinstance(response, str) else ""
            keys.append(key := (problem, source))
            if key not in self._known:
                wanted[key] = [value for _, value in tests]
                new[key] = Program(source, function, [list(given) for given, _ in tests])
        outcomes = self.sandbox.run(list(new.values())) if new else []
        for key, outcome in zip(new, outcomes, strict=True):
            self._known[key] = self._worth(wanted[key], outcome), outcome.ended or None
        found = [self._known[key] for key in keys]
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    def _worth(self, wanted: Sequence[Any], outcome: Outcome) -> float:
        pairs = zip(outcome.returned, wanted, strict=False)  # fewer returned: it ended before
        passed = sum(done and equal(value, one, self.tolerance) for (done, value), one in pairs)
        share = passed / len(wanted)
        return share if self.reward == "share" else float(share == 1)


def equal(found: Any, wanted: Any, tolerance: float = 0.0) -> bool:
    """Whether plain data are equal: numbers up to the tolerance, True and 1 apart."""
    if isinstance(wanted, list | tuple):
        same = isinstance(found, list) and len(found) == len(wanted)
        return same and all(equal(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, dict):
        same = isinstance(found, dict) and found.keys() == wanted.keys()
        return same and all(equal(found[key], wanted[key], tolerance) for key in wanted)
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        return type(found) is type(wanted) and found == wanted
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    if found == wanted:
        return True
    try:
        return tolerance > 0 and math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int that no float holds
        return False


def code_task(
    name: str,
    problems: Sequence[CodeProblem],
    *,
    max_new_tokens: int,
    prompt: Callable[[str], str] = str,
    extract: Callable[[str], str] = python_block,
    reward: str = "all",
    tolerance: float = 0.0,
    mistakes: float = 0.0,
    symbols: str = PRINTABLE,
    sandbox: Sandbox | None = None,
) -> Task:
    """A task from programming problems; their own solutions are run first, and must pass.

    extract: the program in a response. reward, tolerance, sandbox: see `CodeVerifier`. prompt,
    mistakes, symbols: as in `reasoning_gym_task`. One question in ten is held out.

    Raises ValueError for no problems, a question that comes twice, a solution that fails its tests
    and a bad argument; SandboxError where programs cannot be run safely.
    """
    check_whole(1, max_new_tokens=max_new_tokens)
    if not 0 <= mistakes <= 1:
        raise ValueError(f"mistakes: found {mistakes!r}; wanted a share, 0 to 1")
    if not len(problems):
        raise ValueError("problems: found none; wanted at least one")
    known: dict[str, CodeProblem] = {}
    for one in problems:
        if known.setdefault(prompt(one.question), one) is not one:
            raise ValueError(f"problems: found {one.question!r} twice")
    prompts = list(known)

    def find(problem: str) -> CodeProblem:
        if problem not in known:
            raise ValueError(f"problem: found {problem!r}; it is none of the {len(known)}")
        return known[problem]

    verify = CodeVerifier(
        lambda problem: (find(problem).function, find(problem).tests),
        extract,
        reward=reward,
        tolerance=tolerance,
        sandbox=sandbox,
    )
    solutions = [one.solution for one in known.values()]
    for (worth, why), one in zip(verify.many(prompts, solutions), known.values(), strict=True):
        if worth != 1:
            raise ValueError(
                f"problems: the solution of {one.question!r} fails its tests"
                + (f" ({why})" if why else "")
            )

    def demonstration(problem: str, rng: random.Random) -> str:
        other = rng.random() < mistakes
        return find(rng.choice(prompts) if other else problem).solution

    return Task(
        name=name,
        description=f"{len(known)} programming problems.",
        note="Good for: answers that only running them can judge.",
        symbols=symbols,
        max_new_tokens=max_new_tokens,
        problem=lambda rng: rng.choice(prompts),
        solution=lambda problem: find(problem).solution,
        demonstration=demonstration,
        verify=verify,
        key=str,
    )


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps it, a tuple's being a tuple apart."""
    try:
        return equal(json.loads(json.dumps(value, allow_nan=False)), value)
    except (TypeError, ValueError, RecursionError):
        return False
