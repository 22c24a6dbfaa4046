"""`python -m rlcore train` with every name that it takes: each trains, with what it needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore import models
from rlcore.__main__ import main
from rlcore.command import METHODS, NAMES
from rlcore.tasks import get_task
from rlcore.training import read_run

SHARED = ["--threads", "1", "--device", "cpu", "--quiet"]
SFT = ["--size", "nano", "--sft-steps", "100", "--sft-batch-size", "32",
       "--sft-learning-rate", "1e-2", *SHARED]  # fmt: skip
STEPS = ["--steps", "2", "--evaluate-every", "0", "--learning-rate", "1e-3", *SHARED]
OF_POLICY = ["--prompts-per-step", "8", "--group-size", "8", *STEPS]
OF_PAIRS = ["--batch-size", "16", "--n", "8", *STEPS]
Started = Callable[[str], Path]


def train(name: str, task: str, out: Path, *words: object) -> Path:
    """The command's run, in its folder."""
    assert main(["train", name, "--task", task, "--out", str(out), *map(str, words)]) == 0
    return out


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """started(task) -> the folder of an SFT run, made once."""
    made: dict[str, Path] = {}

    def build(task: str) -> Path:
        if task not in made:
            made[task] = train("sft", task, tmp_path_factory.mktemp(task) / "run", *SFT)
        return made[task]

    return build


@pytest.fixture(scope="module")
def judge(started: Started, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a reward model, with the pairs that it was trained on."""
    words = ["--start", started("reviews") / "model", "--pairs", "32", *OF_PAIRS]
    return train("reward-model", "reviews", tmp_path_factory.mktemp("judge") / "run", *words)


def task_of(name: str) -> str:
    """One in which the nano model earns unlike rewards after 100 steps of SFT."""
    if name in METHODS or name == "ppo":
        return "reviews"
    return "sort-box" if name == "gdpo" else "robot"


def embeddings(run: Path) -> torch.Tensor:
    """Of the model that a run left, also of one with a scalar head."""
    return load_file(run / "model" / "model.safetensors")["model.embed_tokens.weight"]


def test_every_name_that_is_listed_is_tried_here(capsys) -> None:
    """Names are where the lines of the list are not indented."""
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split(":")[0] for line in lines if not line.startswith(" ")]
    assert len(listed) == len(set(listed)) > 20
    assert ("sft", *listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_command_trains_it(name: str, started: Started, judge: Path, tmp_path) -> None:
    """Every step is recorded with a finite loss, and the weights are not those before."""
    task = task_of(name)
    start, out, steps = started(task), tmp_path / "run", 2
    before = embeddings(start)
    words: list[object] = ["--start", start / "model"]
    if name == "sft":
        tokenizer = models.build_tokenizer(get_task(task).vocabulary)
        untrained = models.build_model("nano", tokenizer, seed=0)
        before, out, steps = untrained.model.embed_tokens.weight.detach(), start, 100
    elif name == "reward-model":
        out = judge
    elif name in METHODS:
        train(name, task, out, *words, "--pairs-file", judge / "pairs.jsonl", *OF_PAIRS)
    elif name == "ppo":
        train(name, task, out, *words, "--reward-model", judge / "model", *OF_POLICY)
    else:
        train(name, task, out, *words, *OF_POLICY)
    run = read_run(out)
    assert run.finished
    assert run.settings["method"] == name
    assert len(run.metrics) == steps
    pretraining = 1 if name == "vapo" else 0  # a step of the critic alone
    for metrics in run.metrics[pretraining:]:
        assert math.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0
    after = embeddings(out)
    assert after.isfinite().all()
    assert not torch.equal(after, before)
