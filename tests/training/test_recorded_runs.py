"""The recorded runs of the chapters: complete, small, and what the code still gives."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from rlcore.__main__ import main
from rlcore.training import read_records, read_run
from rlcore.training.record import Recorder

RUNS = Path(__file__).resolve().parents[2] / "chapters" / "runs"
EXPERIMENTS = sorted(path.stem for path in RUNS.glob("*.toml"))
STEPS = 3
ABSOLUTE_PATH = re.compile(r"""[\s"'=:](/\w|[A-Za-z]:\\)""")


def experiment(name: str) -> dict:
    return tomllib.loads((RUNS / f"{name}.toml").read_text("utf-8"))


def records(name: str) -> list[dict]:
    return [json.loads(path.read_text("utf-8")) for path in sorted((RUNS / name).glob("*.json"))]


FIRST = [
    pytest.param(path, id=path.stem)
    for name in EXPERIMENTS
    for path in sorted((RUNS / name).glob("*.0.json"))
]


def test_there_are_recorded_runs() -> None:
    assert EXPERIMENTS
    assert FIRST


def test_all_of_them_are_small() -> None:
    """15 MB in the repository, whatever else lies in the folder."""
    size = sum(path.stat().st_size for path in RUNS.rglob("*") if path.is_file())
    assert size <= 15_000_000


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_variant_and_seed_is_recorded(name: str) -> None:
    text = experiment(name)
    judges = [start for start in text["start"] if "start" in start]
    wanted = {
        (variant["name"], seed)
        for variant in (*judges, *text["variant"])
        for seed in variant.get("seeds", text["seeds"])
    }
    found = {(record["name"], record["settings"]["seed"]) for record in records(name)}
    assert found == wanted
    size = sum(path.stat().st_size for path in (RUNS / name).iterdir())
    assert size < 2_000_000


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_record_says_where_it_comes_from(name: str) -> None:
    for record in records(name):
        for command in (*record.get("before", ()), record["command"]):
            assert command.startswith("python -m rlcore train ")
            assert "--threads 1" in command
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
        if "prompts_per_step" not in setting:  # a reward model, a method over pairs
            continue
        samples = setting["prompts_per_step"] * setting["group_size"]
        by_task.setdefault(setting["task"], set()).add((setting["steps"], samples))
    assert by_task
    assert all(len(budgets) == 1 for budgets in by_task.values()), by_task


@pytest.fixture(scope="session")
def made(shared_folder: Path, start: Callable[[str, int], Path]) -> Callable[..., dict[str, Path]]:
    """made(commands) -> {the folder each names: the folder it was made in, once for all tests}."""

    def build(commands: list[str]) -> dict[str, Path]:
        folders: dict[str, Path] = {}
        for command in commands:
            words, out = arguments(command, folders)
            key = hashlib.blake2b(" ".join(words).encode(), digest_size=8).hexdigest()
            folder = shared_folder / f"made-{key}"
            recipe = re.fullmatch(
                r"train sft --task (\S+) --threads 1 --device cpu --seed (\d+)", " ".join(words)
            )
            if recipe:
                folder = start(recipe[1], int(recipe[2])).parent
            with FileLock(f"{folder}.lock"):
                if not (folder / "model").exists():
                    assert main([*words, "--out", str(folder), "--resume", "--quiet"]) == 0
            folders[out] = folder
        return folders

    return build


def arguments(command: str, folders: dict[str, Path]) -> tuple[list[str], str]:
    """What stands behind `python -m rlcore`, with the folders of this run, and --out apart."""
    words = shlex.split(command)[3:]
    place = words.index("--out")
    out = words[place + 1]
    words = words[:place] + words[place + 2 :]
    for i, word in enumerate(words):
        folder, _, name = word.rpartition("/")
        if folder in folders:
            words[i] = (folders[folder] / name).as_posix()
    return words, out


# (relative, absolute): in the first step, and in those that build on what was sampled there.
CLOSE = {
    "reward": ((0.0, 0.05), (0.0, 0.1)),
    "loss": ((0.05, 0.02), (0.15, 0.05)),
    "grad_norm": ((0.1, 1e-6), (0.4, 1e-6)),
    "entropy": ((0.02, 0.0), (0.1, 0.0)),
}
NOTHING_SAMPLED = (1e-3, 1e-5)
ROUNDING = 1e-5  # of a loss that is 0 but for it: advantages of a group that cancel out


@pytest.mark.parametrize("path", FIRST)
def test_the_first_steps_replayed(path: Path, start, made, tmp_path, monkeypatch) -> None:
    """All that a variant builds on and its first three steps, by the recorded commands (seed 0).

    On another processor, and wherever code rounds otherwise than that of the record, the last bits
    of the start differ, and with them about one response in a step. (Trajectories from one and the
    same start are compared to 1e-6, in the tests of the loops.)
    """
    record = json.loads(path.read_text("utf-8"))
    words, _ = arguments(record["command"], made(record.get("before", [])))
    setting = record["settings"]
    if "--start" not in words:
        words += ["--start", str(start(setting["task"], setting["seed"]))]
    usual = Recorder.add

    def add(recorder: Recorder, log: str, *rows: dict) -> None:
        usual(recorder, log, *rows)
        if log == "metrics" and rows[-1]["step"] == STEPS:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "add", add)
    monkeypatch.chdir(RUNS.parents[1])
    short = ["--out", str(tmp_path), "--evaluate-every", "0", "--n", "16", "--quiet"]
    assert main([*words, *short]) == 130
    run = read_run(tmp_path)
    assert len(run.metrics) == STEPS
    of_bits = {"pairs_fingerprint", "reward_model"}
    for name in setting.keys() - {"algorithm"} - of_bits:
        assert run.settings[name] == setting[name], name
    for name, choice in setting.get("algorithm", {}).items():  # it may have gained others since
        assert run.settings["algorithm"][name] == choice, name
    head = record["head"]
    assert head.pop("step")[:STEPS] == [row["step"] for row in run.metrics]
    for name, values in head.items():
        first, later = CLOSE[name] if "reward" in head else (NOTHING_SAMPLED, NOTHING_SAMPLED)
        steps = zip(run.metrics, values[:STEPS], (first, later, later), strict=True)
        for row, value, (rel, absolute) in steps:
            if value is None:  # a step in which the critic alone was trained
                assert row[name] is None
                continue
            if name == "loss" and abs(value) < ROUNDING:
                absolute = ROUNDING
            assert row[name] == pytest.approx(value, rel=rel, abs=absolute), (name, row["step"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_records_are_read_back_as_runs(name: str) -> None:
    runs = read_records(RUNS / name)
    for variant, seeds in runs.items():
        assert [run.settings["seed"] for run in seeds] == list(range(len(seeds))), variant
        assert seeds[0].metrics[0]["step"] == 1
        losses = seeds[0].curve("loss")[1]
        assert all(math.isfinite(loss) for loss in losses)
        assert seeds[0].evaluations[0]["step"] == 0


def test_no_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no recorded run"):
        read_records(tmp_path)
