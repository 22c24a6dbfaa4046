"""`python -m book bench training` on tiny sizes: what it writes, says and returns.

No test asks for a speed: that is what the command measures, on a machine with nothing else to do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import training_cases as cases  # noqa: E402
import training_costs as costs  # noqa: E402

TINY = (
    *("--sizes", "nano", "--batches", "16", "--seconds", "0.01", "--threads", "1", "--runs", "1"),
    *("--run-steps", "2", "--sft-steps", "2", "--evaluate-n", "8", "--new-tokens", "4"),
)


def bench(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "book", "bench", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "FRTP_NO_VENV": "1"}


def test_what_the_command_writes_and_shows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "training.json"
    done = subprocess.run(
        bench("training", *TINY, "--output", str(path)),
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text("utf-8"))
    assert found["complete"] is True
    assert found["failed"] == []
    assert found["command"] == f"python -m book bench training {' '.join(reordered())}"
    assert set(found["versions"]) == {"python", "torch", "trl", "transformers"}
    assert found["trl_settings"]["gradient_checkpointing"] is False
    assert found["cpu"]
    run, sampling, update, step = found["comparisons"]
    assert [entry["kind"] for entry in found["comparisons"]] == list(costs.KINDS)
    for entry in found["comparisons"]:
        ratio = entry["ratio"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert all(seconds > 0 for seconds in entry["seconds"].values())
    assert run["responses"] == 2 * 32 * 8
    assert set(run["profile"]) == set(cases.PARTS)
    assert 0 < sum(run["profile"].values()) <= 1
    assert set(run["after"]) == {"ours", "theirs"}
    assert sampling["rounds"] >= 3
    assert all(rate > 0 for rate in sampling["tokens_per_second"].values())
    assert 0 < update["share"]["computed"] < update["share"]["whole_rows"] < 1
    assert update["matmul_gflops"] > 0
    assert step["rows"] == 16
    assert "nano     16 rows" in done.stdout
    assert [file.name for file in path.parent.iterdir()] == ["training.json"]


def test_the_recorded_measurement_is_whole() -> None:
    """The file that the page of the book shows: from a clean checkout, nothing missing."""
    found = json.loads(costs.RECORD.read_text("utf-8"))
    assert found["complete"] is True
    assert found["failed"] == []
    assert len(found["commit"]) == 40
    assert found["command"].startswith("python -m book bench training --threads ")
    kinds = {entry["kind"] for entry in found["comparisons"]}
    assert kinds == set(costs.KINDS)
    rows = {entry["rows"] for entry in found["comparisons"] if entry["kind"] != "run"}
    assert {64, 512} <= rows


def reordered() -> list[str]:
    """TINY as the record says it: --threads first, then what differs from the default."""
    return [
        *("--threads", "1", "--sizes", "nano", "--batches", "16", "--new-tokens", "4"),
        *("--seconds", "0.01", "--runs", "1", "--run-steps", "2", "--sft-steps", "2"),
        *("--evaluate-n", "8"),
    ]


def test_an_interrupt_keeps_what_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    line = bench("training", *TINY, "--kinds", "sampling", "update", "step", "--seconds", "9")
    process = subprocess.Popen(
        [*line, "--output", str(path)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not path.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate()
    assert process.returncode == 130, shown
    assert "Traceback" not in shown
    found = json.loads(path.read_text("utf-8"))
    assert found["complete"] is False
    assert 1 <= len(found["comparisons"]) < 3
    assert f"{len(found['comparisons'])} of 3 comparisons" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--threads", "0"), "--threads: found 0"),
        (("--sizes", "huge"), "--sizes: found ('huge',)"),
        (("--batches", "12"), "--batches: found (12,)"),
        (("--new-tokens", "1"), "--new-tokens: found 1"),
        (("--runs", "0"), "--runs: found 0"),
        (("--kinds", "naps"), "invalid choice: 'naps'"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        costs.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_options_need_a_part() -> None:
    done = subprocess.run(
        bench("--runs", "1"), cwd=ROOT, env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "found '--runs'; wanted objectives or training before it" in done.stderr


def test_a_comparison_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(plan: costs.Plan, what: str, size: str, rows: int) -> Any:
        if rows == 64:
            raise costs.Failed("no luck")
        return {"seconds": {"ours": [1.0, 2.0], "theirs": [2.0, 2.0]}}

    monkeypatch.setattr(costs, "in_a_process", measured)
    shown: list[str] = []
    path = tmp_path / "training.json"
    plan = costs.Plan(1, sizes=("tiny",), batches=(64, 128), kinds=("sampling",))
    assert costs.run(plan, path, shown.append) == 1
    found = json.loads(path.read_text("utf-8"))
    assert found["failed"] == [{"kind": "sampling", "size": "tiny", "rows": 64, "why": "no luck"}]
    (entry,) = found["comparisons"]
    assert entry["ratio"] == {"median": 1.5, "low": 1.0, "high": 2.0, "of_best": 2.0}
    assert any("failed: no luck" in text for text in shown)


def test_sides_take_turns() -> None:
    seen: list[str] = []
    sides = {name: (lambda name=name: seen.append(name)) for name in ("ours", "theirs")}
    times = costs.in_turn(sides, costs.Plan(1, seconds=0.0))
    assert {len(values) for values in times.values()} == {costs.ROUNDS_AT_LEAST}
    assert seen == ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_operations_are_counted_as_said() -> None:
    """2 for each weight and token forward, twice that backward; attention by what torch counts."""
    from torch.utils.flop_counter import FlopCounterMode

    model, _ = cases.random_model("tiny")
    ids = torch.randint(2, 13, (4, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    counted = counter.get_total_flops()
    # The embedding is looked up, not multiplied, but the head is the same matrix. torch counts
    # attention to all tokens, we to those before; the gradient of attention computes scores again.
    assert cases.flops(model, 4, 24) == pytest.approx(counted, rel=0.1)
    whole = cases.flops(model, 16, 12)
    assert cases.computed_flops(model, 16, 6, 16, 6) < whole
    assert cases.computed_flops(model, 2, 6, 16, 6) < 0.6 * whole


def test_both_sides_train_the_same_task(tmp_path: Path) -> None:
    """As many responses a step, new prompts each step, the same rates and optimizer."""
    task = cases.coin_task()
    model, tokenizer = cases.random_model("nano")
    sizes = {"steps": 3, "prompts": 4, "seed": 0}
    trainer = cases.trl_trainer(model, tokenizer, task, str(tmp_path), **sizes)
    assert len(trainer.train_dataset) == 12
    settings = cases.recipe(cases.TASK)
    with cases.quiet_trl():
        trainer.create_optimizer_and_scheduler(3)
    group = trainer.optimizer.param_groups[0]
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.99), 0.0)
    rates = []
    for _ in range(4):
        rates.append(group["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    first, last = settings.learning_rate, settings.learning_rate * settings.final_learning_rate
    wanted = [first + (last - first) * step / 3 for step in range(4)]
    assert rates == pytest.approx(wanted)
