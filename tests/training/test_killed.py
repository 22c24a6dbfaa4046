"""A run that is killed at any moment leaves whole files, and goes on to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork and SIGKILL")
HERE = Path(__file__).resolve().parent
# The operations of one attempt that each must have been somebody's last one.
MOMENTS = (
    *("write checkpoint.pt.tmp", "before replace checkpoint.pt", "after replace checkpoint.pt"),
    *("write metrics.jsonl", "write evaluations.jsonl", "write samples.jsonl"),
    *("write metrics.jsonl.tmp", "before replace metrics.jsonl", "after replace samples.jsonl"),
    *("write run.json.tmp", "before replace run.json", "after replace run.json", "fsync"),
    *("write model", "before replace model.old", "after replace model.old"),
    *("before replace model", "after replace model", "before rmtree model.old"),
)


def test_sigkill_at_any_moment(tmp_path: Path) -> None:
    """Ten deaths of each loop at random moments, and one at every operation on a file.

    After each of them no file is half of one, and no log line is lost or doubled; after the last
    attempt the folder is that of a run that was never disturbed, to the bit. See `killing.py`.
    """
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "killing.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    by_kind = {kind: 0 for kind in ("sft", "grpo", "dcpo", "vapo", "dpo", "reward")}
    for death, count in found["deaths"].items():
        by_kind[death.partition(": ")[0]] += count
    assert min(by_kind.values()) >= 10
    missed = [moment for moment in MOMENTS if f"grpo: {moment}" not in found["deaths"]]
    assert missed == []
