"""`python -m book record`: every run of an experiment once, with its provenance."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from book import record

SMALL = "--n 8 --prompts-per-step 4 --group-size 4 --threads 1 --device cpu"
EXPERIMENT = f"""
seeds = [0, 1]
shared = "--threads 1 --device cpu"

[[start]]
name = "sort"
command = "train sft --task sort --size nano --sft-steps 3 --sft-batch-size 4"

[[variant]]
name = "sort/grpo"
start = "sort"
command = "train grpo --task sort --steps 6 {SMALL}"

[[variant]]
name = "sort/rloo"
start = "sort"
seeds = [1]
command = "train rloo --task sort --steps 6 {SMALL}"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """An experiment of its own, outside the chapters."""
    monkeypatch.setattr(record, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(record, "WORK", tmp_path / "work")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "trial.toml").write_text(EXPERIMENT, encoding="utf-8")
    return tmp_path


def test_jobs_of_an_experiment(place: Path) -> None:
    starts, between, variants = record.read_experiment(place / "runs" / "trial.toml")
    assert between == []
    assert [job.file for job in starts] == ["sort.0", "sort.1"]
    assert [job.file for job in variants] == ["sort.grpo.0", "sort.grpo.1", "sort.rloo.1"]
    words = variants[0].arguments(Path("w"))
    assert words[:2] == ["train", "grpo"]
    assert words[-8:] == [
        "--seed", "0", "--out", str(Path("w/runs/sort.grpo.0")),
        "--start", str(Path("w/starts/sort.0/model")), "--resume", "--quiet",
    ]  # fmt: skip
    # What a reader can run: no folder of this machine, no start that only this machine has.
    # The start has settings of its own, so the reader makes it first.
    assert variants[0].retold() == [
        "python -m rlcore train sft --task sort --size nano --sft-steps 3 --sft-batch-size 4 "
        "--threads 1 --device cpu --seed 0 --out runs/sort.0",
        f"python -m rlcore train grpo --task sort --steps 6 {SMALL} --threads 1 --device cpu "
        "--seed 0 --start runs/sort.0/model --out runs/sort.grpo.0",
    ]


def test_a_start_by_the_recipe_needs_no_telling(place: Path) -> None:
    """The command makes the same start by itself: for the same task alone."""
    text = EXPERIMENT.replace(" --size nano --sft-steps 3 --sft-batch-size 4", "")
    source = place / "runs" / "trial.toml"
    source.write_text(text, encoding="utf-8")
    grpo = record.read_experiment(source)[2][0]
    assert grpo.retold() == [
        f"python -m rlcore train grpo --task sort --steps 6 {SMALL} --threads 1 --device cpu "
        "--seed 0 --out runs/sort.grpo.0"
    ]
    source.write_text(text.replace("grpo --task sort", "grpo --task sort-few"), encoding="utf-8")
    assert len(record.read_experiment(source)[2][0].retold()) == 2


def test_one_start_for_all_seeds(place: Path) -> None:
    """The other seed's command cannot make that start, so it is told."""
    text = EXPERIMENT.replace(" --size nano --sft-steps 3 --sft-batch-size 4", "")
    source = place / "runs" / "trial.toml"
    source.write_text(
        text.replace('start = "sort"\n', 'start = "sort"\nstart_seed = 0\n'), encoding="utf-8"
    )
    variants = record.read_experiment(source)[2]
    assert [job.before[0].file for job in variants] == ["sort.0"] * 3
    assert [len(job.retold()) for job in variants] == [1, 2, 2]
    assert "--seed 1 --start runs/sort.0/model" in variants[1].retold()[1]
    source.write_text(text.replace('start = "sort"\n', 'start = "sort"\nstart_seed = 7\n'))
    with pytest.raises(ValueError, match="found 'sort' for seed 7"):
        record.read_experiment(source)


JUDGED = """
seeds = [0]
shared = "--threads 1 --device cpu"

[[start]]
name = "reviews"
command = "train sft --task reviews --size nano --sft-steps 3 --sft-batch-size 4"

[[start]]
name = "reviews/judge"
start = "reviews"
command = "train reward-model --task reviews --pairs 64 --steps 2 --n 8"

[[variant]]
name = "reviews/rloo"
start = "reviews"
reward_model = "reviews/judge"
command = "train rloo --task reviews --steps 2 --prompts-per-step 4 --group-size 4 --n 8"

[[variant]]
name = "reviews/dpo"
start = "reviews"
command = "train dpo --task reviews --steps 2 --pairs 64 --n 8 --set beta=0.5"
"""


def test_reward_models_and_methods_over_pairs(place: Path) -> None:
    """A reward model is a start and is recorded; a variant is told with all that it builds on."""
    (place / "runs" / "trial.toml").write_text(JUDGED, encoding="utf-8")
    assert record.main(["trial", "--jobs", "1"]) == 0
    found = {
        path.name: json.loads(path.read_text("utf-8")) for path in (place / "runs/trial").iterdir()
    }
    assert set(found) == {f"reviews.{name}.0.json" for name in ("judge", "rloo", "dpo")}
    rloo, dpo = found["reviews.rloo.0.json"], found["reviews.dpo.0.json"]
    assert [line.split()[4] for line in (*rloo["before"], rloo["command"])] == [
        "sft", "reward-model", "rloo",
    ]  # fmt: skip
    assert (
        "--start runs/reviews.0/model --reward-model runs/reviews.judge.0/model" in rloo["command"]
    )
    assert len(dpo["before"]) == 1
    assert len(rloo["metrics"]["true_reward"]) == 2
    assert dpo["settings"]["row"]["beta"] == 0.5
    assert len(dpo["metrics"]["rewards/margins"]) == 2
    assert found["reviews.judge.0.json"]["evaluations"]["eval_true_accuracy"]


def test_records_resumes_and_reports(place: Path, monkeypatch, capsys) -> None:
    assert record.main(["trial", "--jobs", "2"]) == 0
    files = sorted((place / "runs" / "trial").iterdir())
    assert [file.name for file in files] == [
        f"sort.{n}.json" for n in ("grpo.0", "grpo.1", "rloo.1")
    ]
    text = json.loads(files[0].read_text("utf-8"))
    assert text["name"] == "sort/grpo"
    assert text["settings"]["seed"] == 0
    assert text["settings"]["method"] == "grpo"
    assert text["threads"] == 1
    assert len(text["metrics"]["reward"]) == 6
    assert text["head"]["step"] == [1, 2, 3, 4, 5]
    assert text["evaluations"]["step"] == [0, 6]
    whole = [
        json.loads(line)
        for line in (place / "work/trial/runs/sort.grpo.0/metrics.jsonl").read_text().splitlines()
    ]
    assert text["head"]["loss"] == [row["loss"] for row in whole[:5]]
    assert text["metrics"]["entropy"] == pytest.approx([r["entropy"] for r in whole], rel=1e-3)

    # The second time nothing is trained; a record of a variant that is gone is removed.
    monkeypatch.setattr(record.subprocess, "Popen", lambda *a, **k: pytest.fail("trained again"))
    before = [file.read_bytes() for file in files]
    (place / "runs" / "trial" / "sort.old.0.json").write_text("{}", encoding="utf-8")
    assert record.main(["trial"]) == 0
    assert [file.read_bytes() for file in sorted((place / "runs" / "trial").iterdir())] == before
    assert "trial: 3/3 sort.rloo.1" in capsys.readouterr().out


def test_an_interrupt_keeps_what_is_done(place: Path, capsys) -> None:
    """A run is recorded, another one is in its middle: it finishes its step and can go on."""
    source = place / "runs" / "trial.toml"
    long = EXPERIMENT.replace("rloo --task sort --steps 6", "rloo --task sort --steps 100000")
    source.write_text(long.replace("seeds = [0, 1]", "seeds = [1]"), encoding="utf-8")
    done = place / "runs" / "trial" / "sort.grpo.1.json"
    folder = place / "work" / "trial" / "runs" / "sort.rloo.1"

    def interrupt() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            log = folder / "metrics.jsonl"
            if done.exists() and log.exists() and log.read_bytes().count(b"\n") > 2:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread, before = threading.Thread(target=interrupt), signal.getsignal(signal.SIGTERM)
    thread.start()
    assert record.main(["trial", "--jobs", "2"]) == 130
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "trial: interrupted; runs finish their step, the same command" in capsys.readouterr().err
    assert json.loads(done.read_text("utf-8"))["name"] == "sort/grpo"
    assert [file.name for file in done.parent.iterdir()] == ["sort.grpo.1.json"]
    assert json.loads((folder / "run.json").read_text("utf-8"))["status"] == "interrupted"
    assert (folder / "checkpoint.pt").exists()


def test_a_failed_run_is_reported_and_not_recorded(place: Path, capsys) -> None:
    source = place / "runs" / "trial.toml"
    bad = EXPERIMENT.replace("train rloo --task sort", "train rloo --task chess")
    source.write_text(bad.replace("seeds = [0, 1]", "seeds = [1]"), encoding="utf-8")
    assert record.main(["trial"]) == 1
    seen = capsys.readouterr()
    assert "sort.rloo.1: exit 2: rlcore: error: task: found 'chess'" in seen.err
    names = {file.name for file in (place / "runs" / "trial").iterdir()}
    assert names == {"sort.grpo.1.json"}


def test_bad_arguments(place: Path, capsys) -> None:
    assert record.main(["nothing"]) == 2
    assert "experiment: found 'nothing'; there are: trial" in capsys.readouterr().err
    source = place / "runs" / "trial.toml"
    source.write_text(EXPERIMENT.replace('start = "sort"', 'start = "none"', 1), encoding="utf-8")
    assert record.main(["trial"]) == 2
    assert "start: found 'none' for seed 0" in capsys.readouterr().err
    for words in (["trial", "--jobs", "0"], ["trial", "--jobs", "x"]):
        with pytest.raises(SystemExit) as stopped:
            record.main(words)
        assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (0.123456, 0.1235),
        (1.0, 1),
        (3, 3),
        (None, None),
        (1e-9, 0),
        (-0.98765, -0.9877),
        (2e5, 200000),
    ],
)
def test_rounding(value, kept) -> None:
    assert record.rounded(value) == kept


def test_book_record_does_not_import_rlcore() -> None:
    code = "import sys, book.record; sys.exit(any(m.startswith('rlcore') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
