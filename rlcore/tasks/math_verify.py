r"""Tasks from questions with a mathematical answer, verified by the package `math-verify`.

It takes `1/2`, `0.5` and `\boxed{\frac12}` for the same answer. The package is an extra
(`pip install math-verify`) and is imported when a task is made.

What happens to the text of a response: regular expressions of the package choose parts of its
end. A part in LaTeX is read by a grammar (latex2sympy2_extended) and becomes an expression of
sympy. Plain arithmetic, and each number of a LaTeX formula, the package hands to sympy's
`parse_expr`, which is python's `eval`; its regular expressions let digits and operators through,
no names. Nothing here depends on that: while a response is read and compared, `parse_expr` is
replaced by `arithmetic`, a grammar of numbers and operators that evaluates nothing.
"""

from __future__ import annotations

import logging
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from rlcore.checks import check_whole
from rlcore.tasks.limit import VerifierTimeout, limited
from rlcore.tasks.reasoning_gym import PRINTABLE
from rlcore.tasks.task import Task

LONGEST = 2000  # characters of a response that are looked at, its last ones
SECONDS = 2.0  # for reading a response, and for comparing it
DEEPEST = 100  # brackets and signs within each other in plain arithmetic
TOKEN = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+|\*\*|[-+*/()])", re.ASCII)
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)

_strict: ContextVar[bool] = ContextVar("strict", default=False)


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
    response of several formulas the package takes the last. Only the last 2,000 characters are
    looked at, and nothing in them is evaluated (see the module). Reading and comparing have 2
    seconds each, and a response that needs more, such as $9^{9^9}$, is worth 0. Where they could
    not be stopped (outside the main thread, and on Windows) the verifier raises, so that the reward
    is missing (see `rate`) rather than wrong.
    prompt, mistakes, symbols: as in `reasoning_gym_task`. One question in ten is held out.

    Raises ValueError for a missing package, no problems, a question that comes twice, an answer in
    which the package finds no mathematics, and a bad argument.
    """
    check_whole(1, max_new_tokens=max_new_tokens)
    if not 0 <= mistakes <= 1:
        raise ValueError(f"mistakes: found {mistakes!r}; wanted a share, 0 to 1")
    if not len(problems):
        raise ValueError("problems: found none; wanted at least one question with its answer")
    package = _package()
    parse = partial(package.parse, parsing_timeout=None)  # the limits are ours, see verify
    compare = partial(package.verify, timeout_seconds=None)
    answers: dict[str, str] = {}
    for question, answer in problems:
        text = prompt(question)
        if text in answers:
            raise ValueError(f"problems: found {question!r} twice")
        answers[text] = answer
    prompts = list(answers)

    @cache
    def read(answer: str) -> tuple[Any, ...]:
        with strictly():
            found = tuple(parse(answer))
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
            raise RuntimeError("math-verify can only be stopped in the main thread")
        if not hasattr(signal, "setitimer"):
            raise RuntimeError("math-verify can only be stopped on a POSIX system")
        # The package's own limits would end the caller's, since there is one alarm, and ring once.
        try:
            with strictly(), limited(SECONDS) as call:
                found = call(parse, response[-LONGEST:])
                return float(call(compare, right, found))
        except VerifierTimeout:
            return 0.0

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

        # simplify imports it, and it parses names as it is imported: not while `strictly` is on
        import sympy.physics.units  # noqa: F401
    except ImportError as error:
        raise ValueError("name: math-verify is not installed; pip install math-verify") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits that are ours
    return math_verify


@contextmanager
def strictly() -> Iterator[None]:
    """In the block, and in this thread only, sympy's `parse_expr` is `arithmetic`."""
    for name in ("sympy.parsing.sympy_parser", "math_verify.parser"):
        module = sys.modules.get(name)
        if module is not None and not hasattr(module.parse_expr, "evaluates"):
            module.parse_expr = _guarded(module.parse_expr)  # type: ignore[attr-defined]
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def _guarded(evaluates: Callable[..., Any]) -> Callable[..., Any]:
    def parse_expr(text: str, *arguments: Any, evaluate: bool = True, **settings: Any) -> Any:
        if _strict.get():
            return arithmetic(text, evaluate=evaluate)
        return evaluates(text, *arguments, evaluate=evaluate, **settings)

    parse_expr.evaluates = evaluates  # type: ignore[attr-defined]
    return parse_expr


def arithmetic(text: str, *, evaluate: bool = False) -> Any:
    """An expression of sympy from a number or, with evaluate=False, from plain arithmetic.

    Numbers, + - * / ** and brackets, as python reads them; nothing is computed: 1+1 is a sum.
    Raises SyntaxError for anything else (which is what sympy's parser raises).
    """
    import sympy

    if NUMBER.fullmatch(text.strip()):
        number = text.strip()
        return sympy.Integer(number) if number.lstrip("+-").isdigit() else sympy.Float(number)
    if evaluate:
        raise SyntaxError("a number was wanted")
    tokens: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise SyntaxError("numbers and operators were wanted")
        tokens.append(match[1])
        at = match.end()
    tokens = [*tokens, ""][::-1]

    def summed(deep: int) -> Any:
        value = multiplied(deep)
        while tokens[-1] in ("+", "-"):
            minus, other = tokens.pop() == "-", multiplied(deep)
            value = sympy.Add(value, negative(other) if minus else other, evaluate=False)
        return value

    def multiplied(deep: int) -> Any:
        value = signed(deep)
        while tokens[-1] in ("*", "/"):
            over, other = tokens.pop() == "/", signed(deep)
            if over:
                other = sympy.Pow(other, sympy.Integer(-1), evaluate=False)
            value = sympy.Mul(value, other, evaluate=False)
        return value

    def signed(deep: int) -> Any:
        if deep > DEEPEST:
            raise SyntaxError(f"at most {DEEPEST} levels were wanted")
        if tokens[-1] in ("+", "-"):
            minus, value = tokens.pop() == "-", signed(deep + 1)
            return negative(value) if minus else value
        value = atom(deep)
        if tokens[-1] == "**":
            tokens.pop()
            value = sympy.Pow(value, signed(deep + 1), evaluate=False)
        return value

    def negative(value: Any) -> Any:
        return -value if value.is_Number else sympy.Mul(sympy.Integer(-1), value, evaluate=False)

    def atom(deep: int) -> Any:
        token = tokens.pop()
        if token == "(":
            value = summed(deep + 1)
            if tokens.pop() != ")":
                raise SyntaxError("a closing bracket was wanted")
            return value
        if not NUMBER.fullmatch(token):
            raise SyntaxError("a number was wanted")
        return sympy.Integer(token) if token.isdigit() else sympy.Float(token)

    value = summed(0)
    if tokens != [""]:
        raise SyntaxError("an operator was wanted")
    return value
