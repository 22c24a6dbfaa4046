"""Writing an expression in x from the steps of a calculation: a program of one line.

The prompt `+3*2-4*5=` says: add 3, double, take away 4, times 5. `((x+3)*2-4)*5` is right, and so
are `5*(2*(x+3)-4)`, `x*10+10` and every other expression of the same values: the verifier does not
read it, it runs it. Written down in the order of the steps, without parentheses, it is wrong.
"""

from __future__ import annotations

import random
import re

from rlcore.tasks.code import CodeVerifier
from rlcore.tasks.task import Task

STEPS = 4
FORM = re.compile(rf"(?:[-+*][2-9]){{{STEPS}}}=")
TESTS = (0, 1, 2, 5, 10, -7, 100)  # values of x; two lines or parabolas meet in two at most
# Share of each kind of demonstration.
MIXED = {"right": 0.30, "no parentheses": 0.35, "reversed": 0.20, "one step short": 0.15}


def steps_of(problem: str) -> list[tuple[str, int]]:
    """The steps of a prompt such as `+3*2-4*5=`; ValueError for anything else."""
    if not isinstance(problem, str) or FORM.fullmatch(problem) is None:
        raise ValueError(
            f"problem: found {problem!r}; wanted {STEPS} times one of + - * and a digit 2-9, "
            "then '='"
        )
    return [(problem[i], int(problem[i + 1])) for i in range(0, len(problem) - 1, 2)]


def problem(rng: random.Random) -> str:
    """Four steps, with a * somewhere behind a + or -: parentheses are needed."""
    while True:
        operations = [rng.choice("+-*") for _ in range(STEPS)]
        text = "".join(operations)
        if "+*" in text or "-*" in text:
            return "".join(o + rng.choice("23456789") for o in operations) + "="


def value(problem: str, x: int) -> int:
    """What the steps make of x."""
    for operation, number in steps_of(problem):
        x = x * number if operation == "*" else x + (number if operation == "+" else -number)
    return x


def write(steps: list[tuple[str, int]], parentheses: bool = True) -> str:
    """The expression of some steps; without parentheses it is only their list behind an x."""
    text, sums = "x", False
    for operation, number in steps:
        if operation == "*" and sums and parentheses:
            text = f"({text})"
        sums = operation != "*"
        text += f"{operation}{number}"
    return text


def solution(problem: str) -> str:
    """The steps in order, with parentheses where * is behind + or -."""
    return write(steps_of(problem))


def demonstrate(problem: str, kind: str, rng: random.Random) -> str:
    """One demonstration of a kind; a wrong kind is right where it happens to mean the same."""
    steps = steps_of(problem)
    if kind == "right":
        return write(steps)
    if kind == "no parentheses":
        return write(steps, parentheses=False)
    if kind == "reversed":
        return write(steps[::-1])
    if kind == "one step short":
        drop = rng.randrange(STEPS)
        return write(steps[:drop] + steps[drop + 1 :])
    raise ValueError(f"kind: found {kind!r}; wanted one of {', '.join(MIXED)}")


def demonstration(problem: str, rng: random.Random) -> str:
    """Right three times in ten; else without parentheses, in reversed order, or a step short."""
    return demonstrate(problem, rng.choices(list(MIXED), list(MIXED.values()))[0], rng)


FORMULA = Task(
    name="formula",
    description="Write an expression in x that takes four steps in order; 30 % of the "
    "demonstrations are right, the others lack parentheses, are reversed, or miss a step.",
    note="Good for: code as the answer. Whoever runs it need not know how it was to be written: "
    "any expression with the right values counts. Every response is run in the sandbox (Linux).",
    symbols="0123456789x+-*()=",
    max_new_tokens=16,  # ((x+3)*2-4)*5 has 13, the end, and two to spare
    problem=problem,
    solution=solution,
    demonstration=demonstration,
    verify=CodeVerifier(
        lambda problem: ("f", [((x,), value(problem, x)) for x in TESTS]),
        lambda response: f"def f(x):\n    return {response}\n",
    ),
    key=str,
)
