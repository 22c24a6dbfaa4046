"""Ctrl-C, a kernel's stop button and SIGTERM in every phase of a run: nothing done is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.__main__ import main
from rlcore.training import Run, checkpoint, draw, read_run, record, row, train_policy, update
from rlcore.training.record import read_lines

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
POLICY = {
    "steps": STEPS,
    "prompts_per_step": 2,
    "group_size": 4,
    "learning_rate": 1e-2,
    "seed": 0,
    "evaluate_every": 2,
    "evaluate_n": 2,
    "checkpoint_every": 2,
    "samples_every": 1,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}
# Where a signal comes: the place of a function, which of its calls, and the steps that are then
# done after one signal and after two. An evaluation asks the verifier 4 times, a step 8 times.
PHASES = {
    "sampling": (draw, "sample", 2, 2, 1),
    "judging": (None, "verify", 4 + 8 + 3, 2, 1),
    "update": (update, "compute_loss", 3, 3, 2),
    "evaluation": (None, "verify", 4 + 2 * 8 + 2, 2, 2),
    "log": (record, "append", 5 + 3, 1, 1),  # that of the metrics; five are made empty
    "checkpoint": (checkpoint.torch, "save", 1, 2, 2),
    "last checkpoint": (checkpoint.torch, "save", 2, STEPS, STEPS),
    "model": (PreTrainedModel, "save_pretrained", 1, STEPS, STEPS),
}


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def undisturbed(coin, make) -> tuple[Run, torch.Tensor]:
    """The run that nobody stops, and its weights."""
    model, tokenizer = make()
    return train_policy(model, tokenizer, coin, row("grpo"), **POLICY), weights(model)


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_in_each_phase(
    phase, signals, coin, make, undisturbed, tmp_path, monkeypatch
) -> None:
    owner, name, when, *steps = PHASES[phase]
    whole, wanted = undisturbed
    seen = {"n": 0}

    def interrupting(function: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            seen["n"] += 1
            if seen["n"] == when:
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGINT)
            return function(*arguments, **settings)

        return call

    task, out, before = coin, tmp_path / "run", signal.getsignal(signal.SIGINT)
    if owner is None:
        task = replace(coin, verify=interrupting(coin.verify))
    else:
        monkeypatch.setattr(owner, name, interrupting(getattr(owner, name)))
    model, tokenizer = make()
    run = train_policy(model, tokenizer, task, row("grpo"), **POLICY, out=out)
    monkeypatch.undo()
    assert seen["n"] >= when
    assert signal.getsignal(signal.SIGINT) is before
    done = steps[signals - 1]
    assert (len(run.metrics), run.finished) == (done, done == STEPS)
    assert run.interrupted != run.finished
    assert run.metrics == whole.metrics[:done]
    assert read_run(out).metrics == run.metrics
    assert (out / "model" / "model.safetensors").exists()
    assert not [path.name for path in out.rglob("*.tmp")]
    again, _ = make()
    rest = train_policy(again, tokenizer, coin, row("grpo"), **POLICY, out=out, resume=True)
    assert torch.equal(weights(again), wanted)
    for log in ("metrics", "evaluations", "samples", "errors"):
        assert getattr(rest, log) == getattr(whole, log), log
        assert read_lines(out / f"{log}.jsonl") == getattr(whole, log), log


def test_sigterm_finishes_the_step_and_is_then_what_it_was(
    coin, make, undisturbed, tmp_path
) -> None:
    """The handler of the caller's is called after everything is written down."""
    seen, heard = {"n": 0}, []

    def verify(problem: str, response: str) -> float | None:
        seen["n"] += 1
        if seen["n"] == 4 + 8 + 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return coin.verify(problem, response)

    def handler(number: int, frame: object) -> None:
        heard.append((number, read_run(tmp_path).interrupted))

    before = signal.signal(signal.SIGTERM, handler)
    try:
        task = replace(coin, verify=verify)
        run = train_policy(*make(), task, row("grpo"), **POLICY, out=tmp_path)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (run.interrupted, len(run.metrics)) == (True, 2)
    assert heard == [(signal.SIGTERM, True)]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2
    rest = train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path, resume=True)
    assert rest.metrics == undisturbed[0].metrics


EVALUATIONS = {
    "at the start": (0, 2),
    "between": (2, 4 + 2 * 8 + 1),
    "at the end": (STEPS, 4 + 2 * 8 + 4 + 2 * 8 + 1),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", EVALUATIONS)
def test_an_evaluation_is_given_up(where, number, coin, make, undisturbed, tmp_path) -> None:
    """No other batch is sampled after one signal, and a run that goes on makes the evaluation."""
    step, when = EVALUATIONS[where]
    whole, wanted = undisturbed
    seen, heard = {"n": 0}, []

    def verify(problem: str, response: str) -> float | None:
        seen["n"] += 1
        if seen["n"] == when:
            os.kill(os.getpid(), number)
        return coin.verify(problem, response)

    before = signal.signal(signal.SIGTERM, lambda *signalled: heard.append(signalled[0]))
    try:
        task = replace(coin, verify=verify)
        run = train_policy(*make(), task, row("grpo"), **POLICY, out=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen["n"] == when + when % 2  # the rest of the batch: two problems, a response each
    assert heard == [signal.SIGTERM] * (number == signal.SIGTERM)
    assert (len(run.metrics), run.finished, run.interrupted) == (step, False, True)
    assert run.evaluations == [row for row in whole.evaluations if row["step"] < step]
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == step
    again, tokenizer = make()
    rest = train_policy(again, tokenizer, coin, row("grpo"), **POLICY, out=tmp_path, resume=True)
    assert rest.finished
    assert (rest.metrics, rest.evaluations) == (whole.metrics, whole.evaluations)
    assert torch.equal(weights(again), wanted)


def test_the_command_ends_after_sigterm_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = "train sft --task sort --size nano --sft-steps 100000 --sft-batch-size 2 --quiet"
    command = [sys.executable, "-m", "rlcore", *words.split(), "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while len(read_lines(out / "metrics.jsonl")) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == "stopped by SIGTERM; what was done is kept"
    run = read_run(out)
    assert run.interrupted
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert state["step"] == len(run.metrics) >= 3
    assert main(["evaluate", "--task", "sort", "--model", str(out / "model"), "--n", "4"]) == 0


CELL = """
from dataclasses import replace
from rlcore import models
from rlcore.tasks import SORT
from rlcore.training import train_policy, row
def verify(problem, response):
    if len(seen) < 20:
        seen.append(response)
        print("judged", flush=True)
    return float(len(response) % 2)
seen = []
tokenizer = models.build_tokenizer(SORT.symbols)
model = models.build_model("nano", tokenizer, seed=0, device="cpu")
task = replace(SORT, verify=verify)
run = train_policy(model, tokenizer, task, row("grpo"), steps=1000000, prompts_per_step=2,
                   group_size=4, learning_rate=1e-2, seed=0, threads=1, device="cpu")
print("here", run.interrupted, len(run.metrics) > 0, len(run.curve("reward")[0]))
"""


def test_the_stop_button_of_a_kernel(tmp_path: Path) -> None:
    """What Jupyter does: the cell goes on after the run, which it has."""
    from jupyter_client.manager import start_new_kernel

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(tmp_path), env=environment, startup_timeout=300
    )
    said: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        text = message["content"].get("text", "")
        said.append(text)
        if "judged" in text and not said[:-1].count(text):
            manager.interrupt_kernel()

    try:
        reply = client.execute_interactive(CELL, timeout=300, output_hook=hook)
        assert reply["content"]["status"] == "ok", said
        assert "here True True" in "".join(said)
        reply = client.execute_interactive("run.metrics[0]", timeout=300, output_hook=hook)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
