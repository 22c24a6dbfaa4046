"""`python -m book gpu-check`: does a GPU compute what the CPU does, and how fast?

The checking is done by a program of its own, `tests/benchmarks/gpu_check.py`, which says what it
looks at; the results go to the screen and to `build/gpu-check`. An interrupt (Ctrl-C) keeps what is
done.
"""

from __future__ import annotations

import subprocess
import sys

from book.bootstrap import ROOT

SCRIPT = ROOT / "tests" / "benchmarks" / "gpu_check.py"


def main(arguments: list[str]) -> int:
    """The script's exit status: 0, 1 if a check failed, 2 without a GPU, 130 after an interrupt."""
    process = subprocess.Popen([sys.executable, str(SCRIPT), *arguments], cwd=ROOT)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the script got it as well, and ends
            continue
