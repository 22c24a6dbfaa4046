"""`python -m book record [EXPERIMENT]`: train and record the runs that a chapter plots.

An experiment is a file `chapters/runs/NAME.toml`: seeds, starts and variants, each a command of
`python -m rlcore`. A variant begins at a start, of its own seed or of `start_seed`, and its reward
may come from a `reward_model`: a start that has a start of its own. Each run trains in a process of
its own, as many at a time as there are cores, in `build/record/NAME/`; a record of it, small enough
for the repository, goes to `chapters/runs/NAME/`, of the variants and of the reward models. Runs
that are finished in `build/record` are not trained again, one that was interrupted goes on;
`--fresh` trains everything anew. Ctrl-C (or SIGTERM) lets the runs under way finish their step;
those that were done before are recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
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
    "sampling_rounds",
    "accuracy",
    "true_reward",
    "rewards/correct/mean",
    "rewards/box/mean",
    "rewards/short/mean",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "val/explained_variance",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "loss",
    "grad_norm",
)
DIGITS = 4  # significant ones, in a record
INTERRUPTED = 130  # exit status
HEAD = 5  # steps kept with all digits, for the test that replays them


@dataclass(frozen=True)
class Job:
    """One command with one seed: a start, or a variant from its start.

    before: the jobs that it builds on, its start first, then its reward model, if it has them.
    """

    name: str
    command: str
    seed: int
    before: tuple[Job, ...] = ()
    variant: bool = False

    @property
    def file(self) -> str:
        return f"{self.name.replace('/', '.')}.{self.seed}"

    def arguments(self, work: Path) -> list[str]:
        """Arguments of `python -m rlcore`, with the folders of this machine."""
        words = [*shlex.split(self.command), "--seed", str(self.seed)]
        words += ["--out", str(self.folder(work)), *self.options(work)]
        return [*words, "--resume", "--quiet"]

    def options(self, work: Path | None) -> list[str]:
        """Where the models lie that the job builds on; None: in a folder of the reader's."""
        names = zip(("--start", "--reward-model"), self.before, strict=False)
        places = (
            (n, Path("runs", job.file) if work is None else job.folder(work)) for n, job in names
        )
        return [word for name, place in places for word in (name, (place / "model").as_posix())]

    def folder(self, work: Path) -> Path:
        return work / ("runs" if self.variant else "starts") / self.file

    def makes_its_start(self) -> bool:
        """Whether the command would make the same start by itself: SFT by the task's recipe."""
        if not self.before:
            return True
        own, start = (shlex.split(job.command) for job in (self, self.before[0]))
        task = own[own.index("--task") + 1]
        rest = [word for word in start if word not in own]
        return (
            [job.seed for job in self.before] == [self.seed]
            and start[:4] == ["train", "sft", "--task", task]
            and rest == ["sft"]
        )

    def retold(self) -> list[str]:
        """The commands for a reader, the job's own last: those before make what it builds on."""
        command = f"python -m rlcore {self.command} --seed {self.seed}"
        if self.makes_its_start():
            return [f"{command} --out runs/{self.file}"]
        told = [line for job in self.before for line in job.retold()]
        command = " ".join((command, *self.options(None)))
        return [*dict.fromkeys(told), f"{command} --out runs/{self.file}"]


def read_experiment(path: Path) -> list[list[Job]]:
    """The jobs in stages, one for each seed: starts, starts that build on those, variants.

    ValueError for a start or a reward model that is not listed before.
    """
    text = tomllib.loads(path.read_text(encoding="utf-8"))
    shared, seeds = text.get("shared", ""), text["seeds"]
    known: dict[tuple[str, int], Job] = {}
    stages: list[list[Job]] = [[], [], []]
    for kind in ("start", "variant"):
        for one in text[kind]:
            for seed in one.get("seeds", seeds):
                before = []
                for needed in [one[key] for key in ("start", "reward_model") if key in one]:
                    own = one.get("start_seed", seed)
                    if (needed, own) not in known:
                        listed = ", ".join(sorted({name for name, _ in known}))
                        raise ValueError(
                            f"start: found {needed!r} for seed {own} in {path}; wanted one of "
                            f"{listed}, listed before with that seed"
                        )
                    before.append(known[needed, own])
                command = f"{one['command']} {shared}".strip()
                job = Job(one["name"], command, seed, tuple(before), kind == "variant")
                if kind == "start":
                    known[job.name, seed] = job
                stages[2 if job.variant else min(len(before), 1)].append(job)
    return stages


class Processes:
    """The runs under way. Each is out of reach of the terminal's Ctrl-C, which `stop` passes on."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[str]] = set()
        self.lock, self.stopped = threading.Lock(), False

    def run(self, command: list[str], **settings: Any) -> tuple[int, str]:
        """Exit status and stderr of a command; without a start, where `stop` was called."""
        with self.lock:
            if self.stopped:
                return INTERRUPTED, ""
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **settings
            )
            self.running.add(process)
        error = process.communicate()[1]
        with self.lock:
            self.running.remove(process)
        return process.returncode, error

    def stop(self) -> None:
        """Ask all to finish their step and write it down; start no more."""
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.terminate()


def run_job(job: Job, work: Path, processes: Processes) -> str | None:
    """Train one job unless it is finished; what went wrong, or None."""
    folder = job.folder(work)
    if is_finished(folder):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "rlcore", *job.arguments(work)]
    status, error = processes.run(command, cwd=ROOT, env=environment)
    if status == 0 and is_finished(folder):
        return None
    return f"{job.file}: exit {status}: {error.strip()[-500:]}"


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
    names = [name for name in METRICS if any(name in row for row in rows)]
    head = [name for name in ("step", "reward", "loss", "grad_norm", "entropy") if name in names]
    seconds = [
        json.loads((one.folder(work) / "run.json").read_text("utf-8"))["seconds"]
        for one in job.before
    ]
    *before, command = job.retold()
    return {
        "name": job.name,
        **({"before": before} if before else {}),
        "command": command,
        **{key: described[key] for key in ("commit", "versions", "device", "cpu", "threads")},
        "seconds": described["seconds"],
        "start_seconds": round(sum(seconds), 2),
        "settings": described["settings"],
        "head": {name: [row[name] for row in rows[:HEAD]] for name in head},
        "metrics": {name: [rounded(row.get(name)) for row in rows] for name in names},
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
    new = path.with_name(path.name + ".tmp")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(new, path)


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
    stages = read_experiment(source)
    if seeds is not None:
        stages = [[job for job in stage if job.seed < seeds] for stage in stages]
    problems, processes = [], Processes()
    target.mkdir(parents=True, exist_ok=True)

    def make(job: Job) -> tuple[Job, str | None]:
        problem = run_job(job, work, processes)
        if problem is None and (job.variant or job.before):
            write_record(compact(job, work), target / f"{job.file}.json")
        return job, problem

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for stage in stages:
                for number, (job, problem) in enumerate(pool.map(make, stage), 1):
                    print(f"{experiment}: {number}/{len(stage)} {job.file}", flush=True)
                    if problem is not None:
                        problems.append(problem)
                        print(problem, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            processes.stop()
            told = "the same command goes on where they stop"
            print(f"{experiment}: interrupted; runs finish their step, {told}", file=sys.stderr)
            raise
    if seeds is None and not problems:
        wanted = {
            f"{job.file}.json" for stage in stages for job in stage if job.variant or job.before
        }
        for path in target.glob("*.json"):
            if path.name not in wanted:
                path.unlink()
    return len(problems)


def main(arguments: list[str]) -> int:
    """The command; 0 when all runs are recorded, 1 when one failed, 2 for bad arguments, 130 when
    it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m book record", description=__doc__)
    parser.add_argument("experiment", nargs="*", help="a file name in chapters/runs, without .toml")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--fresh", action="store_true", help="train everything anew")
    parser.add_argument("--seeds", type=int, help="only the seeds below this number (a trial)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs: found {options.jobs}; wanted at least 1")
    names = options.experiment or sorted(path.stem for path in RUNS.glob("*.toml"))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = [
            record(name, jobs=options.jobs, fresh=options.fresh, seeds=options.seeds)
            for name in names
        ]
    except (ValueError, KeyError) as error:
        print(f"python -m book record: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return 1 if any(failed) else 0
