"""Two runs do not write one folder; a killed one is not in the way of the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore import checks
from rlcore.__main__ import main
from rlcore.locks import NAME, hold, is_held
from rlcore.training import read_run, train_sft
from rlcore.training.record import read_lines

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SFT = {"steps": 2, "batch_size": 2, "seed": 0, "progress": False, "threads": 1, "device": "cpu"}

# Holds a folder, forks a process that outlives it, and waits.
HOLDER = """
import os, sys, time
from rlcore.locks import hold
lock = hold(sys.argv[1])
child = os.fork() if len(sys.argv) > 2 else -1
if child == 0:
    os.setsid()
    os.close(1)  # nobody waits for its end
    time.sleep(600)
print(lock is not None, child, flush=True)
time.sleep(600)
"""


def holder(*words: object) -> tuple[subprocess.Popen[str], int]:
    """A process that holds a folder, and its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *map(str, words)],
        stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    held, child = process.stdout.readline().split()
    assert held == "True"
    return process, int(child)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


def test_two_commands_with_one_folder(tmp_path: Path, capsys) -> None:
    """The second says who is in its way, a reader sees no lock, and a SIGKILL leaves none."""
    out = tmp_path / "run"
    words = ["train", "sft", "--task", "sort", "--size", "nano", "--sft-batch-size", "2",
             "--quiet", "--device", "cpu", "--threads", "1", "--out", str(out)]  # fmt: skip
    command = [sys.executable, "-m", "rlcore", *words, "--sft-steps", "100000"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while len(read_lines(out / "metrics.jsonl")) < 101:  # a checkpoint is there
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for more in ([], ["--resume"]):
            assert main([*words, "--sft-steps", "100000", *more]) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert f"out: '{out}' is being written by another run" in said
        assert len(read_run(out).metrics) >= 101
    finally:
        process.kill()
        process.wait(timeout=60)
    assert not is_held(out)
    steps = len(read_lines(out / "metrics.jsonl"))
    text = (out / "run.json").read_text("utf-8")
    assert '"status": "running"' in text
    assert main([*words, "--sft-steps", str(steps), "--resume"]) == 2  # other settings, no lock
    assert "belongs to another run: steps was 100000" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_lock_of_a_killed_process_is_not_its_childs(tmp_path: Path) -> None:
    process, child = holder(tmp_path, "fork")
    try:
        assert hold(tmp_path) is None
        assert is_held(tmp_path)
        end(process)
        os.kill(child, 0)  # it is alive
        lock = hold(tmp_path)
        assert lock is not None
        lock.release()
    finally:
        end(process)
        os.kill(child, signal.SIGKILL)


def test_a_folder_that_another_run_took_meanwhile(make, coin, tmp_path: Path, monkeypatch) -> None:
    """Between the check of the arguments and the first write; nothing is written then."""
    process, _ = holder(tmp_path)
    try:
        with pytest.raises(ValueError, match=f"out: '{tmp_path}' is being written by another"):
            train_sft(*make(), coin, **SFT, out=tmp_path)
        monkeypatch.setattr(checks, "is_held", lambda folder: False)
        with pytest.raises(ValueError, match=f"out: '{tmp_path}' is being written by another"):
            train_sft(*make(), coin, **SFT, out=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [NAME]
    finally:
        end(process)
    assert train_sft(*make(), coin, **SFT, out=tmp_path).finished
    assert not is_held(tmp_path)


def test_two_in_one_process(tmp_path: Path) -> None:
    """By whatever name they have the folder."""
    (tmp_path / "other").symlink_to(tmp_path)
    lock = hold(tmp_path)
    assert lock is not None
    assert hold(tmp_path / "other") is None
    assert is_held(tmp_path)
    lock.release()
    assert not is_held(tmp_path)


def test_where_there_is_no_lock_to_be_had(make, coin, tmp_path: Path) -> None:
    """A run is not refused for that, and a folder that nobody locked stays as it is."""
    assert not is_held(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / NAME).mkdir()
    assert train_sft(*make(), coin, **SFT, out=tmp_path).finished
