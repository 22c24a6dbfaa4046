"""Timings of each step, and TensorBoard's curves beside the logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.__main__ import main
from rlcore.training import read_run, row, tracking, train_policy, train_sft

POLICY = {
    "steps": 4,
    "prompts_per_step": 2,
    "group_size": 4,
    "learning_rate": 1e-2,
    "seed": 0,
    "evaluate_every": 2,
    "evaluate_n": 2,
    "checkpoint_every": 1,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads, by name: each point that is in any of its files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0]
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_timings_are_in_a_log_of_their_own(coin, make, tmp_path: Path) -> None:
    algorithm = row("ppo", reward="verifier", beta=0.1)
    run = train_policy(*make(), coin, algorithm, **POLICY, out=tmp_path / "run")
    assert [line["step"] for line in run.timings] == [1, 2, 3, 4]
    for line in run.timings:
        parts = [line[name] for name in ("sampling", "judging", "reference", "critic", "update")]
        assert min(parts) > 0
        assert sum(parts) <= line["seconds"] + 1e-5
        assert set(line) - {"evaluation", "checkpoint"} == {
            "step", "seconds", "sampling", "judging", "reference", "critic", "update"
        }  # fmt: skip
    assert ["evaluation" in line for line in run.timings] == [True, False, True, False]
    assert ["checkpoint" in line for line in run.timings] == [False, True, True, True]
    assert sum(line["seconds"] for line in run.timings) <= run.seconds
    assert read_run(tmp_path / "run").timings == run.timings
    other = train_sft(*make(), coin, steps=2, seed=0, batch_size=2, progress=False, device="cpu")
    assert [set(line) for line in other.timings] == [{"step", "seconds"}] * 2


def test_tensorboard_has_every_number_once(coin, make, tmp_path: Path) -> None:
    """Also where the run was interrupted and went on: in step 3, with a line of it written."""
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float | None:
        seen["n"] += 1
        if seen["n"] == 2 * 4 + 3 * 8 - 2:
            raise KeyboardInterrupt
        return coin.verify(problem, response)

    settings = {**POLICY, "out": tmp_path / "run", "trackers": ("tensorboard",)}
    first = train_policy(*make(), replace(coin, verify=verify), row("grpo"), **settings)
    assert first.interrupted
    folder = tmp_path / "run" / "tensorboard"
    assert [step for step, _ in points(folder)["reward"]] == [row["step"] for row in first.metrics]
    run = train_policy(*make(), coin, row("grpo"), **settings, resume=True)
    drawn = points(folder)
    wanted: dict[str, list[tuple[int, float]]] = {}
    for before, rows in (
        ("", run.metrics),
        ("evaluations/", run.evaluations),
        ("timings/", run.timings),
    ):
        for line in rows:
            for name, value in line.items():
                if name != "step" and value is not None:
                    wanted.setdefault(before + name, []).append((line["step"], value))
    assert drawn.keys() == wanted.keys()
    for name, values in wanted.items():
        assert [step for step, _ in drawn[name]] == [step for step, _ in values], name
        assert [v for _, v in drawn[name]] == pytest.approx([v for _, v in values], rel=1e-6)
    # The numbers of the run are those of a run without a tracker.
    assert run.metrics == train_policy(*make(), coin, row("grpo"), **POLICY).metrics


def test_the_command_draws_both_parts(tmp_path: Path, capsys) -> None:
    words = (
        "train grpo --task sort --size nano --sft-steps 2 --sft-batch-size 2 --steps 2 --n 2 "
        "--prompts-per-step 2 --group-size 2 --quiet --threads 1 --device cpu "
        "--tracker tensorboard --out"
    )
    assert main([*words.split(), str(tmp_path / "run")]) == 0
    assert [step for step, _ in points(tmp_path / "run" / "tensorboard")["reward"]] == [1, 2]
    assert [s for s, _ in points(tmp_path / "run" / "start" / "tensorboard")["loss"]] == [1, 2]
    other = [*words.replace("tensorboard", "paper").split(), str(tmp_path / "other")]
    assert main(other) == 2
    assert "trackers: found ['paper']; wanted some of tensorboard" in capsys.readouterr().err


def test_what_is_refused(coin, make, tmp_path: Path, monkeypatch) -> None:
    settings = {**POLICY, "out": tmp_path / "run"}
    for found in ("tensorboard", ("tensorbored",)):
        with pytest.raises(ValueError, match=r"trackers: found .*; wanted some of tensorboard"):
            train_policy(*make(), coin, row("grpo"), **settings, trackers=found)
    with pytest.raises(ValueError, match="tensorboard writes into the run folder; wanted out too"):
        train_policy(*make(), coin, row("grpo"), **POLICY, trackers=("tensorboard",))
    for lacking in ("tensorboard", "accelerate"):
        monkeypatch.setattr(
            tracking, "find_spec", lambda name, lacking=lacking: name != lacking or None
        )
        with pytest.raises(ValueError, match=f"trackers: {lacking} is not installed; pip install"):
            train_policy(*make(), coin, row("grpo"), **settings, trackers=("tensorboard",))
    assert not (tmp_path / "run").exists()


def test_without_a_tracker_nothing_of_it_is_loaded(coin, make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: pytest.fail(name))
    train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
