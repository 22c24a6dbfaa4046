"""`python -m book test`: a browser, lint, types, then every test.

Arguments go to pytest: `python -m book test tests/objectives -k float16`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from book import chromium
from book.bootstrap import ROOT

# two processes with one thread each: the two cores of a small machine, and the same bits everywhere
PARALLEL = ["-n", "2", "--dist", "loadfile"]
CHECKS = (
    ("ruff (lint)", ["ruff", "check", "."]),
    ("ruff (format)", ["ruff", "format", "--check", "."]),
    ("mypy (types)", ["mypy"]),
)


def main(arguments: list[str]) -> int:
    try:
        browser = chromium.find() or chromium.install()
    except RuntimeError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    environment = {**os.environ, "BOOK_CHROMIUM": browser, "OMP_NUM_THREADS": "1"}
    print(f"browser: {browser}", flush=True)
    failed = []
    for name, tool in CHECKS:
        print(f"== {name}", flush=True)
        if subprocess.call([sys.executable, "-m", *tool], cwd=ROOT, env=environment) != 0:
            failed.append(name)
    command = [sys.executable, "-m", "pytest", *PARALLEL, *(arguments or ["tests"])]
    print("== pytest", flush=True)
    status = subprocess.call(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    if failed:
        print(f"failed before the tests: {', '.join(failed)}", file=sys.stderr)
    return status or int(bool(failed))
