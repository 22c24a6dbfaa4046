"""The recorded runs of the chapters: complete, small, and what the code still gives."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch

from rlcore import models
from rlcore.algorithms import Algorithm
from rlcore.tasks import get_task
from rlcore.training import read_records, train_policy
from rlcore.training.record import processor

RUNS = Path(__file__).resolve().parents[2] / "chapters" / "runs"
EXPERIMENTS = sorted(path.stem for path in RUNS.glob("*.toml"))
STEPS = 3
ABSOLUTE_PATH = re.compile(r"""[\s"'=:](/\w|[A-Za-z]:\\)""")


def experiment(name: str) -> dict:
    return tomllib.loads((RUNS / f"{name}.toml").read_text("utf-8"))


def records(name: str) -> list[dict]:
    return [json.loads(path.read_text("utf-8")) for path in sorted((RUNS / name).glob("*.json"))]


def replacement(command: str):
    """The function behind `--advantages FILE:FUNCTION` of a recorded command, or None."""
    words = command.split()
    if "--advantages" not in words:
        return None
    file, _, name = words[words.index("--advantages") + 1].rpartition(":")
    return runpy.run_path(str(RUNS.parents[1] / file))[name]


FIRST = [
    pytest.param(path, id=path.stem)
    for name in EXPERIMENTS
    for path in sorted((RUNS / name).glob("*.0.json"))
]


def test_there_are_recorded_runs() -> None:
    assert EXPERIMENTS
    assert FIRST


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_variant_and_seed_is_recorded(name: str) -> None:
    text = experiment(name)
    wanted = {
        (variant["name"], seed)
        for variant in text["variant"]
        for seed in variant.get("seeds", text["seeds"])
    }
    found = {(record["name"], record["settings"]["seed"]) for record in records(name)}
    assert found == wanted
    size = sum(path.stat().st_size for path in (RUNS / name).iterdir())
    assert size < 2_000_000


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_record_says_where_it_comes_from(name: str) -> None:
    for record in records(name):
        assert record["command"].startswith("python -m rlcore train ")
        assert "--threads 1" in record["command"]
        assert not ABSOLUTE_PATH.search(json.dumps(record))
        assert len(record["commit"]) == 40  # a clean checkout: no "+" for changed files
        assert record["seconds"] > 0
        assert record["threads"] == 1
        assert set(record["versions"]) == {"python", "torch", "transformers"}
        steps = record["settings"]["steps"]
        assert record["metrics"]["step"] == list(range(1, steps + 1))
        assert record["evaluations"]["step"][0] == 0
        assert record["evaluations"]["step"][-1] == steps


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_one_budget_for_all_methods(name: str) -> None:
    """Variants of one task differ in what their name says, not in samples or steps."""
    by_task: dict[str, set[tuple[int, int]]] = {}
    for record in records(name):
        setting = record["settings"]
        samples = setting["prompts_per_step"] * setting["group_size"]
        by_task.setdefault(setting["task"], set()).add((setting["steps"], samples))
    assert all(len(budgets) == 1 for budgets in by_task.values()), by_task


@pytest.mark.parametrize("path", FIRST)
def test_the_first_steps_replayed(path: Path, start) -> None:
    """The start and three steps of every variant, against the record (seed 0).

    On the processor and the torch of the record: to 1e-6. On another one the last bits of the start
    differ, and with them some samples: the reward of the first step is then a draw from nearly the
    same distribution, of 256 samples, and is compared as such.
    """
    record = json.loads(path.read_text("utf-8"))
    setting = record["settings"]
    task = get_task(setting["task"])
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float | None:
        seen["n"] += 1
        if seen["n"] > STEPS * setting["prompts_per_step"] * setting["group_size"]:
            raise KeyboardInterrupt
        return task.verify(problem, response)

    model, tokenizer = models.load(start(task.name, setting["seed"]), device="cpu")
    ours = {"method", "task", "algorithm", "parameters", "advantage_function"}
    run = train_policy(
        model,
        tokenizer,
        dataclasses.replace(task, verify=verify),
        Algorithm(**setting["algorithm"]),
        **{name: value for name, value in setting.items() if name not in ours},
        advantage_function=replacement(record["command"]),
        progress=False,
        threads=1,
        device="cpu",
    )
    assert len(run.metrics) == STEPS
    same = record["cpu"] == processor() and record["versions"]["torch"] == torch.__version__
    for name, values in record["head"].items():
        found = [row[name] for row in run.metrics]
        if same:
            assert found == pytest.approx(values[:STEPS], rel=1e-6, abs=1e-6), name
    assert run.metrics[0]["reward"] == pytest.approx(record["head"]["reward"][0], abs=0.15)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_records_are_read_back_as_runs(name: str) -> None:
    runs = read_records(RUNS / name)
    for variant, seeds in runs.items():
        assert [run.settings["seed"] for run in seeds] == list(range(len(seeds))), variant
        steps, rewards = seeds[0].curve("reward")
        assert steps[0] == 1
        assert all(0 <= reward <= 1 for reward in rewards)
        assert seeds[0].curve("sampled")[0][0] == 0


def test_no_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no recorded run"):
        read_records(tmp_path)
