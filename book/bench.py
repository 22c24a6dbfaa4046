"""`python -m book bench [objectives | training]`: what things cost, beside TRL.

objectives: time and memory of each. training: a whole GRPO run, single steps, sampling and the
update alone. Without a word both, one after the other. The measuring is done by programs of its
own, in `tests/benchmarks`; the results go to the screen and to `build/bench/*.json`; `training
--record` writes the file that the page *What a step costs* shows. An interrupt (Ctrl-C) keeps what
is measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from book.bootstrap import ROOT

SCRIPTS = ROOT / "tests" / "benchmarks"


def main(arguments: list[str]) -> int:
    """The script's exit status: 0, 1 if a comparison failed, 2 for bad arguments or no TRL, 130
    after an interrupt."""
    # In a session of its own it gets each interrupt once, from here, and has time to save.
    apart = os.name != "nt"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS), *arguments], cwd=ROOT, start_new_session=apart
    )
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            if apart:
                process.send_signal(signal.SIGINT)
