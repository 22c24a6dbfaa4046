"""`python -m book test`: a browser, lint, types, every test, then parity with TRL by itself.

Arguments go to pytest, which is then called once, with them alone:
`python -m book test tests/objectives -k float16`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

from book import chromium
from book.bootstrap import ROOT

# two processes with one thread each: the two cores of a small machine, and the same bits everywhere
PARALLEL = ["-n", "2", "--dist", "loadfile"]
PARITY = "parity with TRL"
# Their result is to be seen by itself, or why they are skipped.
TRL = ("tests/parity/test_trl_live.py", "tests/parity/test_trl_training.py")
NO_TESTS = 5  # pytest's exit status when all that it was given is skipped as a whole
CHECKS = (
    ("ruff (lint)", ["ruff", "check", "."]),
    ("ruff (format)", ["ruff", "format", "--check", "."]),
    ("mypy (types)", ["mypy"]),
)


def suites(arguments: list[str]) -> tuple[tuple[str, list[str]], ...]:
    """What pytest is called with, and the name of each call."""
    if arguments:
        return (("pytest", [*PARALLEL, *arguments]),)
    return (
        ("pytest", [*PARALLEL, *(f"--ignore={file}" for file in TRL), "tests"]),
        (PARITY, [*TRL]),
    )


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        browser = chromium.find() or chromium.install()
    except RuntimeError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    environment = {**os.environ, "BOOK_CHROMIUM": browser, "OMP_NUM_THREADS": "1"}
    print(f"browser: {browser}", flush=True)
    steps = [(name, tool) for name, tool in CHECKS]
    steps += [(name, ["pytest", *given]) for name, given in suites(arguments)]
    failed = {}
    for name, tool in steps:
        print(f"== {name}", flush=True)
        status = subprocess.call(
            [sys.executable, "-m", *tool],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        nothing_to_run = name == PARITY and status == NO_TESTS and find_spec("trl") is None
        if status != 0 and not nothing_to_run:
            failed[name] = status
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return max(failed.values(), key=abs, default=0)
