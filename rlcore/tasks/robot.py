"""A robot on a 4 x 4 board that wraps around and has walls: where does it end?

The prompt `f:RRUDLLUR=` gives the start cell and eight moves; the answer is the last cell. A
response may name that cell at once, or write down every cell on the way: the verifier looks at
the last one only. Four demonstrations in five answer at once.
"""

from __future__ import annotations

import random

from rlcore.tasks.task import Task

SIDE, MOVES = 4, 8
CELLS = "abcdefghijklmnop"  # row by row, from the top left
STEPS = {"R": (0, 1), "L": (0, -1), "D": (1, 0), "U": (-1, 0)}
BACK = {"R": "L", "L": "R", "D": "U", "U": "D"}
# A move through one of these walls leaves the robot where it is, from either side.
WALLS = (("b", "R"), ("e", "D"), ("g", "R"), ("h", "D"), ("j", "U"), ("k", "D"), ("m", "L"))
ANSWER_AT_ONCE = 0.8


def neighbour(cell: str, move: str) -> str:
    """The cell one move away, walls ignored; the board wraps around."""
    row, column = divmod(CELLS.index(cell), SIDE)
    down, right = STEPS[move]
    return CELLS[(row + down) % SIDE * SIDE + (column + right) % SIDE]


BLOCKED = frozenset(WALLS) | {(neighbour(cell, move), BACK[move]) for cell, move in WALLS}


def walk(problem: str) -> str:
    """The cells after each move, as a string; ValueError for a prompt of another form."""
    cell, moves = problem[:1], problem[2:-1]
    form = problem[1:2] == ":" and problem[-1:] == "=" and len(moves) == MOVES
    if not form or cell not in CELLS or not cell or not set(moves) <= set(STEPS):
        raise ValueError(
            f"problem: found {problem!r}; wanted a cell a-p, ':', {MOVES} moves of RLUD and '='"
        )
    visited = ""
    for move in moves:
        if (cell, move) not in BLOCKED:
            cell = neighbour(cell, move)
        visited += cell
    return visited


def problem(rng: random.Random) -> str:
    """A start cell and eight moves."""
    return rng.choice(CELLS) + ":" + "".join(rng.choice("RLUD") for _ in range(MOVES)) + "="


def solution(problem: str) -> str:
    """Every cell on the way, the last one being the answer."""
    return walk(problem)


def demonstration(problem: str, rng: random.Random) -> str:
    """The last cell alone (four times in five), or every cell on the way."""
    cells = walk(problem)
    return cells[-1] if rng.random() < ANSWER_AT_ONCE else cells


def verify(problem: str, response: str) -> float:
    """1.0 when the response is written in cells and the last one is right, else 0.0.

    How long the response is, and whether the cells before the last are right, does not count.
    """
    last = walk(problem)[-1]
    if not isinstance(response, str):
        return 0.0
    return float(set(response) <= set(CELLS) and response[-1:] == last)


def board() -> str:
    """A picture of the board in text; `|` and `-` are the walls."""
    lines = []
    for row in range(SIDE):
        cells = CELLS[row * SIDE : (row + 1) * SIDE]
        above = " ".join("-" if (cell, "U") in BLOCKED else " " for cell in cells)
        left = "".join(("|" if (cell, "L") in BLOCKED else " ") + cell for cell in cells)
        lines += [" " + above, left + ("|" if (cells[-1], "R") in BLOCKED else " ")]
    below = " ".join("-" if (c, "D") in BLOCKED else " " for c in CELLS[-SIDE:])
    return "\n".join(line.rstrip() for line in [*lines, " " + below])


ROBOT = Task(
    name="robot",
    description="Follow eight moves on a 4 x 4 board with walls; 80 % of the demonstrations "
    "answer at once, 20 % write down every cell.",
    note="Good for: answers that grow by themselves. First the policy chooses to write the way "
    "down (a habit that was there), then it gets better at it (a skill that was poor).",
    symbols=CELLS + "RLUD" + ":=",
    max_new_tokens=12,
    problem=problem,
    solution=solution,
    demonstration=demonstration,
    verify=verify,
    key=str,
)
