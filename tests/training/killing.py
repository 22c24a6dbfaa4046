"""A process that trains in forks of itself and kills them, for `test_killed.py`.

One import of torch serves all: each attempt is a fork that trains with `resume=True` and dies by
SIGKILL, either at a numbered operation on a file (in the middle of a write, before or after a
rename or a sync) or when its parent's clock says so. After each death the folder is compared with
a run that nobody disturbed: a checkpoint is that run's after some step, bit for bit, or absent; a
log is a beginning of that run's, but for a cut last line; a model is that run's model. Prints what
was found as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcore import files, models
from rlcore import training as train
from rlcore.preferences import DPO
from rlcore.tasks import SORT, PreferencePairs
from rlcore.training import record

STEPS = 5
COMMON = {
    "steps": STEPS,
    "learning_rate": 1e-2,
    "seed": 0,
    "evaluate_every": 2,
    "checkpoint_every": 1,
    "progress": False,
    "threads": 1,
    "device": "cpu",
    "resume": True,
}
POLICY = {**COMMON, "prompts_per_step": 2, "group_size": 4, "samples_every": 1, "evaluate_n": 2}
LOGS = ("metrics", "evaluations", "samples", "errors")
MODELS = ("model", "model.old")
KINDS = ("sft", "grpo", "dcpo", "vapo", "dpo", "reward")


def verify(problem: str, response: str) -> float:
    """Now and then it raises, so that there is a log of errors too."""
    total = sum(map(ord, response))
    if total % 7 == 0:
        raise ZeroDivisionError("a multiple of seven")
    return float(total % 2 == 0)


TASK = replace(SORT, name="coin", verify=verify)


def pairs(n: int = 12) -> PreferencePairs:
    rng = random.Random(0)
    prompts = tuple(SORT.draw(rng) for _ in range(n))
    right = tuple(SORT.solution(prompt) for prompt in prompts)
    return PreferencePairs(prompts, right, tuple(text[::-1] + "0" for text in right))


def train_one(kind: str, out: Path) -> Any:
    """A run of six loops, or what is left of it."""
    tokenizer = models.build_tokenizer(SORT.symbols)
    dropout = 0.5 if kind == "sft" else 0.0
    model = models.build_model("nano", tokenizer, seed=0, dropout=dropout, device="cpu")
    if kind == "sft":
        return train.train_sft(
            model, tokenizer, TASK, **COMMON, batch_size=4, evaluate_n=2, out=out
        )
    if kind == "reward":
        scalar = models.build_scalar_model(model, seed=0)
        return train.train_reward_model(
            scalar, tokenizer, pairs(), **COMMON, batch_size=4, held_out=pairs(4), out=out
        )
    if kind == "dpo":
        return train.train_preference(
            model, tokenizer, pairs(), DPO, **COMMON, batch_size=4, held_out=pairs(4), out=out
        )
    row = train.row(kind, beta=None)
    own = {"value_pretraining_steps": 2} if kind == "vapo" else {}
    return train.train_policy(model, tokenizer, TASK, row, **POLICY, **own, out=out)


class Doom:
    """Counts the operations on files, and dies at one of them."""

    def __init__(self) -> None:
        self.count, self.at, self.report = 0, 0, -1
        self.seen: list[str] = []

    def due(self, label: str) -> bool:
        self.count += 1
        self.seen.append(label)
        return self.count == self.at

    def die(self, label: str) -> None:
        if self.report >= 0:
            os.write(self.report, label.encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way

    def reached(self, label: str) -> None:
        if self.due(label):
            self.die(label)


DOOM = Doom()


class DoomedFile:
    """A file whose every write may be the last thing that its process does, half done."""

    def __init__(self, file: Any) -> None:
        self.file, self.name = file, Path(file.name).name

    def write(self, data: Any) -> int:
        label = f"write {self.name}"
        if DOOM.due(label):
            view = memoryview(data).cast("B")
            self.file.write(view[: len(view) // 2])
            self.file.flush()
            DOOM.die(label)
        written: int = self.file.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> DoomedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()


def doomed_open(path: Any, mode: str = "r", **settings: Any) -> Any:
    file = open(path, mode, **settings)  # noqa: SIM115
    if mode == "rb+":  # to sync it
        return file
    DOOM.reached(f"open {Path(path).name}")
    return DoomedFile(file)


class DoomedSystem:
    """`os` or `shutil` with moments to die before and after what changes names."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        if name == "fsync":  # a death of the process needs no disk
            return lambda number: DOOM.reached("fsync")
        if name not in ("replace", "rmtree"):
            return function

        def call(path: Any, *rest: Any, **settings: Any) -> Any:
            target = Path(rest[0] if rest else path).name
            DOOM.reached(f"before {name} {target}")
            result = function(path, *rest, **settings)
            DOOM.reached(f"after {name} {target}")
            return result

        return call


def haunt() -> None:
    """Put the moments of death into the modules that write."""
    files.open = doomed_open  # type: ignore[attr-defined]
    files.os = DoomedSystem(os)  # type: ignore[assignment]
    models.os, models.shutil = DoomedSystem(os), DoomedSystem(shutil)  # type: ignore[assignment]
    record.commit = lambda: "0" * 40
    true_save = PreTrainedModel.save_pretrained

    def save(self: Any, folder: Any) -> None:
        true_save(self, folder)
        if DOOM.due("write model"):
            weights = Path(folder) / "model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)
            DOOM.die("write model")

    PreTrainedModel.save_pretrained = save  # type: ignore[method-assign]


def attempt(kind: str, out: Path, at: int = 0, after: float | None = None) -> str | None:
    """One fork: how it died ("a clock", or at which operation), or None for a finished run."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            DOOM.count, DOOM.at, DOOM.report, DOOM.seen = 0, at, writer, []
            run = train_one(kind, out)
            status = 0 if run.finished else 3
            Path(f"{out}.seen").write_text(json.dumps(DOOM.seen), encoding="utf-8")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    label = os.read(reader, 200).decode()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return label or "a clock"
    if status != 0:
        raise RuntimeError(f"{kind}: the run itself failed with status {status}")
    return None


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def state_of(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    state.pop("seconds")
    return state


class Undisturbed:
    """The run that nobody kills: its checkpoint after each step, its logs, its model."""

    def __init__(self, kind: str, out: Path) -> None:
        self.kind, self.out = kind, out
        self.states: dict[int, dict[str, Any]] = {}
        true_write = record.write_checkpoint

        def write(path: Path, state: dict[str, Any]) -> None:
            true_write(path, state)
            self.states[state["step"]] = state_of(path)

        record.write_checkpoint = write
        before, began = DOOM.count, time.monotonic()
        train_one(kind, out)
        self.seconds, self.operations = time.monotonic() - began, DOOM.count - before
        self.seen = DOOM.seen[before:]
        record.write_checkpoint = true_write
        self.logs = {name: (out / f"{name}.jsonl").read_bytes() for name in LOGS}
        self.weights = (out / "model" / "model.safetensors").read_bytes()

    def differences(self, out: Path, finished: bool) -> list[str]:
        """What a reader of the folder would take for whole and is not."""
        wrong, steps = [], 0
        if (out / "checkpoint.pt").exists():
            state = state_of(out / "checkpoint.pt")
            steps = state["step"]
            if not equal(state, self.states.get(steps)):
                wrong.append(f"the checkpoint of step {steps}")
        for name, whole in self.logs.items():
            path = out / f"{name}.jsonl"
            if not path.exists():
                continue
            found = path.read_bytes()
            lines = found[: found.rfind(b"\n") + 1]
            if not whole.startswith(lines) or (finished and found != whole):
                wrong.append(path.name)
            if name == "metrics" and lines.count(b"\n") < steps:
                wrong.append(f"{path.name} is behind its checkpoint")
            record.read_lines(path)
        if (out / "run.json").exists():
            record.read_run(out)
        for folder in (out / name for name in MODELS):
            if folder.exists() and (folder / "model.safetensors").read_bytes() != self.weights:
                wrong.append(str(folder.name))
        if finished:
            left = {path.name for path in out.iterdir()}
            wanted = {path.name for path in self.out.iterdir()}
            if left != wanted:
                wrong.append(f"the folder has {sorted(left ^ wanted)} more or less")
            if not record.read_run(out).finished:
                wrong.append("it is not finished")
        return wrong


def chains(whole: Undisturbed, out: Path, rng: random.Random, wanted: int) -> tuple[list, list]:
    """Runs that die and go on until they are through, `wanted` deaths in all, at random moments."""
    deaths: list[str] = []
    wrong, runs = [], 0
    while len(deaths) < wanted or runs == 0:
        folder, death, runs = out / str(runs), "", runs + 1
        while death is not None:
            if len(deaths) >= wanted:
                death = attempt(whole.kind, folder)
            elif rng.random() < 0.5:
                death = attempt(whole.kind, folder, after=rng.random() * whole.seconds)
            else:
                death = attempt(whole.kind, folder, at=rng.randrange(1, whole.operations))
            wrong += [
                f"{whole.kind} after {death}: {what}"
                for what in whole.differences(folder, finished=death is None)
            ]
            deaths += [death] if death else []
    return deaths, wrong


def every_moment(whole: Undisturbed, out: Path) -> tuple[list, list]:
    """From one folder on: a death at every operation of the rest of a run.

    The folder's logs are ahead of its checkpoint, so that the rest begins with cutting them. Of the
    many writes of a checkpoint, every sixteenth. Then, from the finished run on, at every operation
    that saves its model anew.
    """
    deaths, wrong = [], []
    source, done = out / "source", out / "done"
    ahead = [i for i, label in enumerate(whole.seen) if label == "open checkpoint.pt.tmp"][3]
    assert attempt(whole.kind, source, at=ahead + 1) == "open checkpoint.pt.tmp"
    shutil.copytree(source, done)
    for begin in (source, done):
        assert attempt(whole.kind, done) is None
        labels = json.loads((out / "done.seen").read_text("utf-8"))
        for number, label in enumerate(labels, 1):
            often = label == "write checkpoint.pt.tmp" and number % 16
            if often or (begin == done and "model" not in label):
                continue
            folder = out / "copy"
            shutil.copytree(begin, folder)
            death = attempt(whole.kind, folder, at=number)
            assert death == label, (death, label)
            deaths.append(death)
            different = whole.differences(folder, finished=False)
            if begin == done and not any((folder / name).exists() for name in MODELS):
                different.append("no model")
            if "model" in label or "run.json" in label:  # that of the others is in the chains
                attempt(whole.kind, folder)
                different += whole.differences(folder, finished=True)
            wrong += [f"{whole.kind} at {number}, {death}: {what}" for what in different]
            shutil.rmtree(folder)
    return deaths, wrong


def main(out: Path) -> None:
    torch.set_num_threads(1)
    haunt()
    rng = random.Random("kill")
    deaths: Counter = Counter()
    wrong: list[str] = []
    for kind in KINDS:
        whole = Undisturbed(kind, out / kind)
        jobs = [chains(whole, out / f"{kind}-killed", rng, wanted=10)]
        if kind == "grpo":
            jobs.append(every_moment(whole, out / "every"))
        for killed, different in jobs:
            deaths.update(f"{kind}: {death}" for death in killed)
            wrong += different
    print(json.dumps({"deaths": deaths, "wrong": wrong}))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(Path(sys.argv[1]))
