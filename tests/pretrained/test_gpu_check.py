"""`python -m book gpu-check`: its pieces on the CPU, as small as can be, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import gpu_check  # noqa: E402
import gpu_pieces  # noqa: E402

TOY = ["--device", "cpu", "--toy"]


@pytest.fixture(autouse=True)
def output(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(gpu_check, "OUTPUT", tmp_path / "out")
    monkeypatch.setattr(gpu_check, "RECORD", tmp_path / "record.json")
    return tmp_path / "out" / "cpu.json"


def test_every_piece_on_the_cpu(folder, output, tmp_path, capsys) -> None:
    """The CPU agrees with itself, and bfloat16 is near."""
    status = gpu_check.main([*TOY, "--pretrained", str(folder), "--record"])
    said = capsys.readouterr().out
    assert status == 0, said
    found = json.loads(output.read_text("utf-8"))
    assert json.loads((tmp_path / "record.json").read_text("utf-8")) == found
    assert found["command"].startswith("python -m book gpu-check --device cpu --toy")
    assert set(found) >= {"commit", "device", "versions", "threads", "began", "seconds"}
    rows = {row["what"]: row for row in found["rows"]}
    assert {row["piece"] for row in found["rows"]} == set(gpu_pieces.PIECES)
    assert len(rows) == len(found["rows"])  # no two of a name
    assert rows["greedy tokens and generate"]["value"] == "equal"
    assert 0 < rows["SFT step, grad_norm, bf16"]["value"] < 0.1
    assert rows["attention of the models"]["value"] == "sdpa"
    assert rows["GRPO gradients, bf16"]["ok"]
    assert rows["GRPO gradients, bf16, LoRA"]["ok"]
    rates = [row["value"] for row in found["rows"] if row["unit"] == "tokens/s"]
    assert len(rates) == 3 + 2 + 3
    assert all(rate > 0 for rate in rates)
    assert "0 checks failed" in said
    assert all(row["what"] in said for row in found["rows"])


def test_a_failed_check_and_a_piece_that_stops(output, monkeypatch, capsys) -> None:
    """Each is seen, and the pieces after it are made."""

    def wrong(plan):
        yield gpu_pieces._check("every row", "float32", 0.5, 0.1)

    def stop(plan):
        raise RuntimeError("no memory")
        yield

    good = gpu_pieces.Row("good", "a rate", 2.0, "tokens/s")
    for name, piece in (("wrong", wrong), ("stop", stop), ("good", lambda plan: iter([good]))):
        monkeypatch.setitem(gpu_check.PIECES, name, piece)
    for name in ("objectives", "training step", "speed", "GRPO run", "pretrained"):
        monkeypatch.delitem(gpu_check.PIECES, name)
    assert gpu_check.main(TOY) == 1
    said = capsys.readouterr().out
    assert "FAIL objectives    every row, float32" in said
    assert "0.5 apart  (wanted <= 0.1)" in said
    assert "RuntimeError: no memory" in said
    assert "2 checks failed" in said
    assert json.loads(output.read_text("utf-8"))["rows"][-1]["value"] == 2.0


def test_an_interrupt_keeps_what_is_done(output, monkeypatch) -> None:
    def interrupted(plan):
        yield gpu_pieces.Row("speed", "a rate", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_check.PIECES, "speed", interrupted)
    assert gpu_check.main([*TOY, "--only", "speed", "--only", "objectives"]) == 130
    assert [row["what"] for row in json.loads(output.read_text("utf-8"))["rows"]] == ["a rate"]


def test_a_model_that_is_not_there_is_no_failure(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    assert gpu_check.main([*TOY, "--only", "pretrained"]) == 0
    assert "python -m rlcore fetch smollm2-135m" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "book", "gpu-check"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "FRTP_NO_VENV": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "torch sees no CUDA device here; --device cpu runs the same" in done.stderr
