"""`python -m book record [EXPERIMENT]`: train and record the runs that a chapter plots.

An experiment is a file `chapters/runs/NAME.toml`: seeds, starts and variants, each a command of
`python -m rlcore`. Each run trains in a process of its own, as many at a time as there are cores,
in `build/record/NAME/`; a record of it, small enough for the repository, goes to
`chapters/runs/NAME/`. Runs that are finished in `build/record` are not trained again, one that was
interrupted goes on; `--fresh` trains everything anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "chapters" / "runs"
WORK = ROOT / "build" / "record"
# What a chapter may plot, per step; `metrics.jsonl` of a run has more.
METRICS = (
    "step",
    "reward",
    "frac_reward_zero_std",
    "advantage_min",
    "advantage_max",
    "entropy",
    "kl",
    "length",
    "truncated",
    "rows_used",
    "loss",
    "grad_norm",
)
DIGITS = 4  # significant ones, in a record
HEAD = 5  # steps kept with all digits, for the test that replays them


@dataclass(frozen=True)
class Job:
    """One command with one seed: a start, or a variant from its start."""

    name: str
    command: str
    seed: int
    start: str | None = None

    @property
    def file(self) -> str:
        return f"{self.name.replace('/', '.')}.{self.seed}"

    def arguments(self, work: Path) -> list[str]:
        """Arguments of `python -m rlcore`, with the folders of this machine."""
        folder = work / "runs" / self.file
        words = [*shlex.split(self.command), "--seed", str(self.seed), "--out", str(folder)]
        if self.start is not None:
            words += ["--start", str(work / "starts" / f"{self.start}.{self.seed}" / "model")]
        else:
            words[-1] = str(work / "starts" / self.file)
        return [*words, "--resume", "--quiet"]

    def folder(self, work: Path) -> Path:
        return work / ("runs" if self.start is not None else "starts") / self.file

    def retold(self) -> str:
        """The command for a reader: without --start, it makes the same start itself."""
        return f"python -m rlcore {self.command} --seed {self.seed} --out runs/{self.file}"


def read_experiment(path: Path) -> tuple[list[Job], list[Job]]:
    """Starts and variants, one job for each seed. ValueError for a start that is not listed."""
    text = tomllib.loads(path.read_text(encoding="utf-8"))
    shared, seeds = text.get("shared", ""), text["seeds"]
    known = {start["name"] for start in text["start"]}
    for variant in text["variant"]:
        if variant["start"] not in known:
            listed = ", ".join(sorted(known))
            raise ValueError(f"start: found {variant['start']!r} in {path}; wanted one of {listed}")
    starts = [
        Job(start["name"], f"{start['command']} {shared}".strip(), seed)
        for start in text["start"]
        for seed in start.get("seeds", seeds)
    ]
    variants = [
        Job(one["name"], f"{one['command']} {shared}".strip(), seed, one["start"])
        for one in text["variant"]
        for seed in one.get("seeds", seeds)
    ]
    return starts, variants


def run_job(job: Job, work: Path) -> str | None:
    """Train one job unless it is finished; what went wrong, or None."""
    folder = job.folder(work)
    if is_finished(folder):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", *job.arguments(work)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and is_finished(folder):
        return None
    return f"{job.file}: exit {done.returncode}: {done.stderr.strip()[-500:]}"


def is_finished(folder: Path) -> bool:
    """Whether the run in this folder is done."""
    try:
        return json.loads((folder / "run.json").read_text("utf-8"))["status"] == "finished"
    except (OSError, ValueError, KeyError):
        return False


def compact(job: Job, work: Path) -> dict[str, Any]:
    """The record of a finished run: what was run and where, and its curves by column, rounded."""
    folder = job.folder(work)
    described = json.loads((folder / "run.json").read_text("utf-8"))
    rows = read_lines(folder / "metrics.jsonl")
    names = [name for name in METRICS if name in rows[0]]
    head = [name for name in ("step", "reward", "loss", "grad_norm", "entropy") if name in names]
    start = json.loads(
        (work / "starts" / f"{job.start}.{job.seed}" / "run.json").read_text("utf-8")
    )
    return {
        "name": job.name,
        "command": job.retold(),
        **{key: described[key] for key in ("commit", "versions", "device", "cpu", "threads")},
        "seconds": described["seconds"],
        "start_seconds": start["seconds"],
        "settings": described["settings"],
        "head": {name: [row[name] for row in rows[:HEAD]] for name in head},
        "metrics": {name: [rounded(row[name]) for row in rows] for name in names},
        "evaluations": columns(read_lines(folder / "evaluations.jsonl")),
    }


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [rounded(row[name]) for row in rows] for name in rows[0]}


def rounded(value: Any) -> Any:
    """To `DIGITS` significant digits; whole numbers as such."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    if value == int(value):
        return int(value)
    return float(f"{value:.{DIGITS}g}") if abs(value) > 1e-6 else 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_record(record: dict[str, Any], path: Path) -> None:
    """One JSON file, a line per key and per column."""
    lines = []
    for key, value in record.items():
        if key in ("head", "metrics", "evaluations"):
            inner = ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def record(experiment: str, *, jobs: int, fresh: bool = False, seeds: int | None = None) -> int:
    """Train and record one experiment; the number of runs that failed.

    seeds: only the first so many of each variant (for a trial; nothing is removed then).
    """
    source, target, work = RUNS / f"{experiment}.toml", RUNS / experiment, WORK / experiment
    if not source.is_file():
        known = ", ".join(sorted(path.stem for path in RUNS.glob("*.toml"))) or "none"
        raise ValueError(f"experiment: found {experiment!r}; there are: {known}")
    if fresh:
        shutil.rmtree(work, ignore_errors=True)
    starts, variants = read_experiment(source)
    if seeds is not None:
        starts, variants = ([j for j in part if j.seed < seeds] for part in (starts, variants))
    problems = []
    target.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        for stage in (starts, variants):
            done = pool.map(lambda job: (job, run_job(job, work)), stage)
            for number, (job, problem) in enumerate(done, 1):
                print(f"{experiment}: {number}/{len(stage)} {job.file}", flush=True)
                if problem is not None:
                    problems.append(problem)
                    print(problem, file=sys.stderr, flush=True)
                elif job.start is not None:
                    write_record(compact(job, work), target / f"{job.file}.json")
    if seeds is None and not problems:
        wanted = {f"{job.file}.json" for job in variants}
        for path in target.glob("*.json"):
            if path.name not in wanted:
                path.unlink()
    return len(problems)


def main(arguments: list[str]) -> int:
    """The command; 0 when all runs are recorded, 1 when one failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m book record", description=__doc__)
    parser.add_argument("experiment", nargs="*", help="a file name in chapters/runs, without .toml")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--fresh", action="store_true", help="train everything anew")
    parser.add_argument("--seeds", type=int, help="only the seeds below this number (a trial)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs: found {options.jobs}; wanted at least 1")
    names = options.experiment or sorted(path.stem for path in RUNS.glob("*.toml"))
    try:
        failed = [
            record(name, jobs=options.jobs, fresh=options.fresh, seeds=options.seeds)
            for name in names
        ]
    except (ValueError, KeyError) as error:
        print(f"python -m book record: error: {error}", file=sys.stderr)
        return 2
    return 1 if any(failed) else 0
