"""A run that was stopped and went on is the run that never stopped, bit for bit."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcore.training import checkpoint as checkpoint_module
from rlcore.training import loop as loop_module
from rlcore.training import read_run, row, train_policy, train_sft
from rlcore.training.checkpoint import read_checkpoint, write_checkpoint
from rlcore.training.record import read_lines

POLICY = {
    "steps": 6,
    "prompts_per_step": 4,
    "group_size": 4,
    "learning_rate": 1e-2,
    "seed": 0,
    "checkpoint_every": 1,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}
SFT = {
    "steps": 6,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "seed": 0,
    "checkpoint_every": 1,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}

# Runs in a process of its own: trains, and kills itself without a word in the middle of step 4.
CHILD = """
import os, signal, sys
from dataclasses import replace
from rlcore import models
from rlcore.tasks import SORT
from rlcore.training import row, train_policy, train_sft

kind, out, kill, settings = sys.argv[1], sys.argv[2], int(sys.argv[3]), eval(sys.argv[4])
calls = 0

def count():
    global calls
    calls += 1
    if calls == kill:
        os.kill(os.getpid(), signal.SIGKILL)

def verify(problem, response):
    count()
    return float(sum(map(ord, response)) % 2 == 0)

def demonstration(problem, rng):
    count()
    return SORT.demonstration(problem, rng)

task = replace(SORT, name="coin", verify=verify, demonstration=demonstration)
tokenizer = models.build_tokenizer(SORT.symbols)
model = models.build_model("nano", tokenizer, seed=0, dropout=0.5, device="cpu")
if kind == "sft":
    train_sft(model, tokenizer, task, **settings, out=out, resume=True)
else:
    reward = "verifier" if kind == "ppo" else None
    algorithm = row(kind, beta=None, reward=reward)
    train_policy(model, tokenizer, task, algorithm, **settings, out=out, resume=True)
"""


def child(kind: str, out: Path, kill: int, settings: dict) -> int:
    arguments = [sys.executable, "-W", "error", "-c", CHILD, kind, str(out), str(kill)]
    return subprocess.run([*arguments, repr(settings)], check=False, timeout=300).returncode


def final_state(out: Path) -> dict:
    """Everything a run leaves that must not depend on where it was stopped."""
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    state.pop("seconds")
    logs = {n: (out / f"{n}.jsonl").read_bytes() for n in ("metrics", "samples", "evaluations")}
    return {**state, **logs}


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))  # type: ignore[arg-type]
    return a == b


@pytest.mark.parametrize(
    ("kind", "settings", "kill"),
    # The kill comes in step 4: after 3 x 8 demonstrations, or after 3 x 16 rewards.
    [
        ("sft", SFT, 27),
        ("grpo", POLICY, 57),
        ("ppo", {**POLICY, "updates_per_batch": 2, "bootstrap_truncated": True}, 57),
        ("vapo", {**POLICY, "value_pretraining_steps": 4}, 57),
    ],
)
def test_case_c01_six_steps_are_three_a_kill_and_three(kind, settings, kill, tmp_path) -> None:
    """With dropout 0.5 (in SFT), AdamW, and the paper's KL term and its reference (in GRPO)."""
    assert child(kind, tmp_path / "whole", 0, settings) == 0
    assert child(kind, tmp_path / "parts", kill, settings) == -signal.SIGKILL
    assert len(read_lines(tmp_path / "parts" / "metrics.jsonl")) == 3
    assert child(kind, tmp_path / "parts", 0, settings) == 0
    whole, parts = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    for name in whole:
        assert equal(whole[name], parts[name]), name
    if kind in ("ppo", "vapo"):
        assert {"critic", "critic_optimizer"} <= set(parts)
    losses = [line["loss"] for line in read_lines(tmp_path / "parts" / "metrics.jsonl")]
    assert len(losses) == 6
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


def stopping_after(task, rewards: int):
    """The task with a verifier that interrupts the run after so many rewards."""
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float:
        seen["n"] += 1
        if seen["n"] > rewards:
            raise KeyboardInterrupt
        return task.verify(problem, response)

    return replace(task, verify=verify)


def three_and_three(task, make, out: Path) -> list[float]:
    """Losses of a run interrupted in its fourth step and resumed."""
    settings = {**POLICY, "learning_rate": 0.05}
    run = train_policy(*make(), stopping_after(task, 3 * 16 + 5), row("rloo"), **settings, out=out)
    assert run.interrupted
    assert len(run.metrics) == 3
    return train_policy(*make(), task, row("rloo"), **settings, out=out, resume=True).curve("loss")[
        1
    ]


@pytest.mark.parametrize("forgotten", ["nothing", "generator", "data", "optimizer", "model"])
def test_resuming_needs_every_part_of_the_state(
    forgotten, coin, make, tmp_path, monkeypatch
) -> None:
    """The test above can fail: forget one part of the state, and the losses differ."""
    settings = {**POLICY, "learning_rate": 0.05}
    expected = train_policy(*make(), coin, row("rloo"), **settings).curve("loss")[1]
    true_restore = loop_module.Place.restore
    true_read = loop_module.read_checkpoint

    def restore(place, state):
        kept = {"generator": place.generator.get_state(), "data": place.data.getstate()}
        true_restore(place, {**state, **{k: v for k, v in kept.items() if k == forgotten}})

    def read(path, settings):
        state = true_read(path, settings)
        if state is not None and forgotten == "optimizer":
            state["optimizer"]["state"] = {}
        if state is not None and forgotten == "model":
            state["model"] = make()[0].state_dict()
        return state

    monkeypatch.setattr(loop_module.Place, "restore", restore)
    monkeypatch.setattr(loop_module, "read_checkpoint", read)
    losses = three_and_three(coin, make, tmp_path / "run")
    assert losses[:3] == expected[:3]
    assert (losses == expected) == (forgotten == "nothing")


@pytest.mark.parametrize("forgotten", [False, True])
def test_sft_needs_the_global_random_state(forgotten, make, coin, tmp_path, monkeypatch) -> None:
    """Dropout draws from torch's global generator: without its state, step 4 differs."""
    expected = train_sft(*make(dropout=0.5), coin, **SFT).curve("loss")[1]
    seen = {"n": 0}

    def demonstration(problem, rng):
        seen["n"] += 1
        if seen["n"] > 3 * 8 + 2:
            raise KeyboardInterrupt
        return coin.demonstration(problem, rng)

    stopped = replace(coin, demonstration=demonstration)
    assert train_sft(*make(dropout=0.5), stopped, **SFT, out=tmp_path).interrupted
    if forgotten:
        monkeypatch.setattr(loop_module, "set_random_state", lambda state: None)
    run = train_sft(*make(dropout=0.5), coin, **SFT, out=tmp_path, resume=True)
    losses = run.curve("loss")[1]
    assert losses[:3] == expected[:3]
    assert (losses[3:] == expected[3:]) == (not forgotten)


def test_same_seed_same_bits_and_the_callers_random_state_is_kept(coin, make) -> None:
    import random

    import numpy as np

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    runs = [train_sft(*make(dropout=0.5), coin, **SFT).metrics for _ in range(2)]
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert runs[0] == runs[1]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    other = train_sft(*make(dropout=0.5), coin, **{**SFT, "seed": 1}).metrics
    assert runs[0] != other


def test_an_interrupted_run_is_usable_and_has_a_checkpoint(coin, make, tmp_path) -> None:
    settings = {**POLICY, "checkpoint_every": 0}
    model, tokenizer = make()
    task = stopping_after(coin, 2 * 16 + 3)
    run = train_policy(model, tokenizer, task, row("grpo"), **settings, out=tmp_path)
    assert (run.interrupted, run.finished, len(run.metrics)) == (True, False, 2)
    assert run.curve("reward")[0] == [1, 2]
    again = read_run(tmp_path)
    assert (again.interrupted, again.metrics) == (True, run.metrics)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2
    resumed = train_policy(*make(), coin, row("grpo"), **settings, out=tmp_path, resume=True)
    whole = train_policy(*make(), coin, row("grpo"), **settings)
    assert resumed.finished
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize("out", [False, True])
def test_sigint_lets_the_step_finish(out: bool, coin, make, tmp_path) -> None:
    """Ctrl-C and the kernel's stop button: the step under way is not lost."""
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float:
        seen["n"] += 1
        if seen["n"] == 16 + 5:
            os.kill(os.getpid(), signal.SIGINT)
        return coin.verify(problem, response)

    before = signal.getsignal(signal.SIGINT)
    folder = tmp_path / "run" if out else None
    run = train_policy(*make(), replace(coin, verify=verify), row("grpo"), **POLICY, out=folder)
    assert signal.getsignal(signal.SIGINT) is before
    assert (run.interrupted, len(run.metrics), seen["n"]) == (True, 2, 32)
    if folder is not None:
        resumed = train_policy(*make(), coin, row("grpo"), **POLICY, out=folder, resume=True)
        assert resumed.metrics == train_policy(*make(), coin, row("grpo"), **POLICY).metrics


def test_a_second_sigint_does_not_wait(coin, make) -> None:
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float:
        seen["n"] += 1
        if seen["n"] in (16 + 5, 16 + 7):
            os.kill(os.getpid(), signal.SIGINT)
        return coin.verify(problem, response)

    run = train_policy(*make(), replace(coin, verify=verify), row("grpo"), **POLICY)
    assert (run.interrupted, len(run.metrics), seen["n"]) == (True, 1, 16 + 7)


def test_training_works_in_another_thread(coin, make) -> None:
    runs = []
    model, tokenizer = make()
    thread = threading.Thread(
        target=lambda: runs.append(train_policy(model, tokenizer, coin, row("grpo"), **POLICY))
    )
    thread.start()
    thread.join()
    assert runs[0].finished


def test_interrupt_between_the_updates_of_a_step_keeps_the_last_checkpoint(
    coin, make, tmp_path, monkeypatch
) -> None:
    """Then the weights have moved and the step is not done: its checkpoint would be a lie."""
    true_apply = loop_module.apply_gradient
    from rlcore.training import update as update_module

    calls = {"n": 0}

    def apply(*arguments):
        calls["n"] += 1
        if calls["n"] == 2 * 2 + 2:  # the second update of step 3
            raise KeyboardInterrupt
        return true_apply(*arguments)

    settings = {**POLICY, "updates_per_batch": 2}
    monkeypatch.setattr(update_module, "apply_gradient", apply)
    run = train_policy(*make(), coin, row("grpo"), **settings, out=tmp_path)
    monkeypatch.undo()
    assert (run.interrupted, len(run.metrics)) == (True, 2)
    resumed = train_policy(*make(), coin, row("grpo"), **settings, out=tmp_path, resume=True)
    assert resumed.metrics == train_policy(*make(), coin, row("grpo"), **settings).metrics


def test_resume_with_other_settings_is_refused(coin, make, tmp_path) -> None:
    train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path)
    for change, said in (
        ({"learning_rate": 0.1}, "learning_rate was 0.01, now 0.1"),
        ({"steps": 7}, "steps was 6, now 7"),
        ({"seed": 1}, "seed was 0, now 1"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another run: {said}"):
            train_policy(
                *make(), coin, row("grpo"), **{**POLICY, **change}, out=tmp_path, resume=True
            )
    said = "run: algorithm.advantage was 'group_zscore', now 'leave_one_out'; "
    with pytest.raises(ValueError, match=f"{said}.*method was 'grpo', now 'rloo'$"):
        train_policy(*make(), coin, row("rloo"), **POLICY, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="parameters was 10752, now 132224"):
        train_policy(*make("tiny"), coin, row("grpo"), **POLICY, out=tmp_path, resume=True)


def test_resuming_a_finished_run_returns_it(coin, make, tmp_path) -> None:
    model, tokenizer = make()
    first = train_policy(model, tokenizer, coin, row("grpo"), **POLICY, out=tmp_path)
    other, _ = make()
    again = train_policy(other, tokenizer, coin, row("grpo"), **POLICY, out=tmp_path, resume=True)
    assert again.finished
    assert again.metrics == first.metrics
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_resume_without_a_checkpoint_starts_anew_and_says_so(coin, make, tmp_path, capsys) -> None:
    run = train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path / "new", resume=True)
    said = f"resume: {tmp_path / 'new'} holds no checkpoint; the run starts anew\n"
    assert capsys.readouterr().err == said
    assert run.metrics == train_policy(*make(), coin, row("grpo"), **POLICY).metrics


def test_log_lines_after_the_checkpoint_are_neither_lost_nor_doubled(coin, make, tmp_path) -> None:
    """A crash between the log line and the checkpoint, in the middle of a line."""
    settings = {**POLICY, "checkpoint_every": 2, "samples_every": 1}
    task = stopping_after(coin, 3 * 16 + 3)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(loop_module, "save", lambda *arguments: None)
    train_policy(*make(), task, row("grpo"), **{**settings, "checkpoint_every": 2}, out=tmp_path)
    monkey.undo()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 3  # the interrupt wrote one; go back to what a crash leaves
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 4, "reward": 9.0}) + '\n{"step": 5, "rew')
    resumed = train_policy(*make(), coin, row("grpo"), **settings, out=tmp_path, resume=True)
    whole = train_policy(*make(), coin, row("grpo"), **settings)
    assert resumed.metrics == whole.metrics
    assert read_lines(tmp_path / "metrics.jsonl") == whole.metrics
    assert read_lines(tmp_path / "samples.jsonl") == whole.samples


def test_a_checkpoint_is_whole_or_the_old_one(tmp_path, monkeypatch) -> None:
    path = tmp_path / "checkpoint.pt"
    write_checkpoint(path, {"settings": {}, "n": 1})

    def breaks(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module.torch, "save", breaks)
    with pytest.raises(OSError, match=r"checkpoint .* could not be written: .*No space left"):
        write_checkpoint(path, {"settings": {}, "n": 2})
    monkeypatch.undo()
    assert read_checkpoint(path, {})["n"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def damaged(good: bytes) -> dict[str, bytes]:
    """What may stand in a checkpoint's place."""
    whole = torch.load(io.BytesIO(good), weights_only=True)
    files = {"truncated": good[: len(good) // 2], "empty": b"", "text": b"not a checkpoint\n"}
    changed = {
        "foreign dict": {"a": 1},
        "list": [1, 2],
        "settings of no kind": {**whole, "settings": 3},
        "no model": {name: part for name, part in whole.items() if name != "model"},
        "another model": {**whole, "model": {"w": torch.zeros(2)}},
        "no optimizer": {**whole, "optimizer": None},
        "no generator": {**whole, "generator": torch.zeros(3)},
    }
    for name, state in changed.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        files[name] = buffer.getvalue()
    return files


def test_a_damaged_checkpoint_is_named(coin, make, tmp_path) -> None:
    train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path)
    path = tmp_path / "checkpoint.pt"
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    for kind, content in damaged(path.read_bytes()).items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"resume: {path} is damaged") as raised:
            train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path, resume=True)
        assert "\n" not in str(raised.value), kind
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("line", [b"garbage", b"", b"[1]", b"3", b'{"reward": 1}', b"\xff"])
def test_a_damaged_log_is_named(line: bytes, coin, make, tmp_path) -> None:
    train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    number = POLICY["steps"] + 1
    with pytest.raises(ValueError, match=f"{path}: line {number} is damaged"):
        train_policy(*make(), coin, row("grpo"), **POLICY, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match=f"{path}: line {number} is damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"settings": {}}'])
def test_a_damaged_description_is_named(text: str, tmp_path) -> None:
    (tmp_path / "run.json").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"run\.json is damaged or not of a run"):
        read_run(tmp_path)
