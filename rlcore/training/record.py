"""What a run leaves behind: the `Run` in memory and, where asked for, a folder.

The folder holds `run.json` (settings, command, seed, versions, device, commit, times),
`metrics.jsonl` (one line per step), `evaluations.jsonl`, `samples.jsonl` (a few responses with
reward and advantage), `errors.jsonl` (where the verifier failed, and on what), `timings.jsonl`,
`checkpoint.pt`, and at the end `model/`; with a tracker its folder, such as `tensorboard/`. On
`.lock` the run has a lock, see `rlcore.locks`: two at once do not write one folder.

Timings are seconds on the clock: of a step (`seconds`) and of its parts (sampling, judging,
reference, critic, update, where it has them), and of an evaluation or a checkpoint between the step
before and this one. They are in a log of their own, since they differ from run to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcore.checks import in_use
from rlcore.files import WriteError, append, sync, unwritten, write_whole
from rlcore.locks import Lock, hold
from rlcore.training.checkpoint import write_checkpoint
from rlcore.training.processes import Processes
from rlcore.training.tracking import Trackers

Rows = list[dict[str, Any]]
LOGS = ("metrics", "evaluations", "samples", "errors", "timings")
DRAWN = ("metrics", "evaluations", "timings")  # by trackers


@dataclass
class Run:
    """The course of a training run. It is usable after an interrupt as well."""

    settings: dict[str, Any]
    metrics: Rows = field(default_factory=list, repr=False)  # one per finished step
    evaluations: Rows = field(default_factory=list, repr=False)  # step 0 is the start
    samples: Rows = field(default_factory=list, repr=False)
    errors: Rows = field(default_factory=list, repr=False)  # what the verifier raised
    timings: Rows = field(default_factory=list, repr=False)  # seconds, by part of a step
    finished: bool = False
    interrupted: bool = False
    seconds: float = 0.0
    out: Path | None = None

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, or of a held-out result such as "sampled".

        Raises ValueError listing the names for one that was not recorded.
        """
        for rows in (self.metrics, self.evaluations):
            found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if found:
                return [step for step, _ in found], [value for _, value in found]
        names = sorted({key for row in (*self.metrics, *self.evaluations) for key in row})
        raise ValueError(f"name: found {name!r}; this run recorded {', '.join(names) or 'nothing'}")


class Recorder:
    """Appends to a run and to its folder (None: to memory only), line by line as it goes.

    Several processes each have the run, and the main one alone the folder: what all call together
    raises in all where the main one cannot write.
    """

    def __init__(
        self,
        run: Run,
        out: str | os.PathLike[str] | None,
        world: Processes,
        trackers: Sequence[str] = (),
    ) -> None:
        self.run, self.world = run, world
        run.out = None if out is None else Path(out)
        self.folder = run.out if world.is_main else None
        self.trackers = Trackers(trackers, self.folder)
        self.clock = time.monotonic()
        world.gather(self._make)

    def _make(self) -> None:
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritten("run folder ", self.folder, error) from error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """In the block the folder is this run's; ValueError where another one is writing it."""
        lock = self.world.agree(self._hold)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _hold(self) -> Lock | None:
        if self.folder is None:
            return None
        lock = hold(self.folder)
        if lock is None:
            raise in_use(self.folder)
        return lock

    @property
    def checkpoint(self) -> Path | None:
        return None if self.run.out is None else self.run.out / "checkpoint.pt"

    def begin(self, step: int, seconds: float = 0.0) -> None:
        """Start at `step`: what an earlier attempt wrote after it is dropped (0: everything).

        Raises ValueError where the log lacks a step before it, or has a damaged line.
        """
        self.clock = time.monotonic() - seconds
        self.world.gather(lambda: self._begin(step))
        for name in LOGS:  # all have what an earlier attempt recorded
            setattr(self.run, name, self.world.from_main(partial(getattr, self.run, name)))

    def _begin(self, step: int) -> None:
        if self.folder is None:
            return
        for leftover in self.folder.glob("*.tmp"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        for name in LOGS:
            path = self.folder / f"{name}.jsonl"
            rows = [row for row in read_lines(path) if row["step"] <= step and step > 0]
            if name == "metrics" and [row["step"] for row in rows] != list(range(1, step + 1)):
                raise ValueError(f"resume: {path} has not each step from 1 to {step} once")
            text = "".join(json.dumps(row) + "\n" for row in rows)
            if not path.is_file():
                append(path, "")
            elif path.read_bytes() != text.encode():
                replace_text(path, text)
            getattr(self.run, name).extend(rows)
        self.trackers.begin({name: getattr(self.run, name) for name in DRAWN})
        self.describe("running")

    def add(self, log: str, *rows: dict[str, Any]) -> None:
        """Append rows to one of `LOGS`. Raises WriteError; the rows are then in the run alone."""
        getattr(self.run, log).extend(rows)
        self.run.seconds = time.monotonic() - self.clock
        if self.run.out is not None and rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)

            def write() -> None:
                append(self._log(log), text)
                if log in DRAWN:
                    self.trackers.log(log, rows)

            self.world.from_main(write)

    def _log(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.jsonl"

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """A checkpoint, where there is a folder; the logs are on the disk before it."""

        def write() -> None:
            if self.folder is not None and self.checkpoint is not None:
                for name in LOGS:
                    sync(self._log(name))
                write_checkpoint(self.checkpoint, state)

        self.world.from_main(write)

    def describe(self, status: str) -> None:
        """Write run.json."""
        self.run.seconds = time.monotonic() - self.clock
        if self.folder is not None:
            text = {
                "status": status,
                "seconds": round(self.run.seconds, 2),
                "settings": self.run.settings,
                **surroundings(self.world),
            }
            replace_text(self.folder / "run.json", json.dumps(text, indent=1) + "\n")

    def give_up(self) -> None:
        """Write down that the run failed, where there is room for it."""
        with contextlib.suppress(WriteError):
            self.describe("failed")

    def close(self) -> None:
        """Close what the trackers have open; a full disk has been told of before."""
        with contextlib.suppress(WriteError):
            self.trackers.finish()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; a last line that was cut by a crash is left out.

    Raises ValueError naming file and line for anything that is not a row with its step.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    rows: Rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["step"] + 0
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: line {number} is damaged, not a row with a step") from error
    return rows


def read_run(folder: str | os.PathLike[str]) -> Run:
    """A `Run` from its folder. Raises ValueError for no run.json, or a damaged file."""
    path = Path(folder)
    if not (path / "run.json").is_file():
        raise ValueError(f"folder: {str(path)!r} is not a run folder (it has no run.json)")
    logs = {name: read_lines(path / f"{name}.jsonl") for name in LOGS}
    try:
        described = json.loads((path / "run.json").read_bytes())
        return Run(
            settings=described["settings"],
            finished=described["status"] == "finished",
            interrupted=described["status"] == "interrupted",
            seconds=described["seconds"],
            out=path,
            **logs,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path / 'run.json'} is damaged or not of a run") from error


def read_records(folder: str | os.PathLike[str]) -> dict[str, list[Run]]:
    """The recorded runs of a chapter, name of the variant -> its seeds in order.

    A record is what `python -m book record` keeps of a run: one JSON file per variant and seed,
    with the metrics by column. Raises ValueError when the folder holds none.
    """
    runs: dict[str, list[Run]] = {}
    for path in sorted(Path(folder).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        run = Run(
            settings=record["settings"],
            metrics=_rows(record["metrics"]),
            evaluations=_rows(record["evaluations"]),
            finished=True,
            seconds=record["seconds"],
            out=path,
        )
        runs.setdefault(record["name"], []).append(run)
    if not runs:
        raise ValueError(f"folder: {str(folder)!r} holds no recorded run")
    return {name: sorted(seeds, key=lambda r: r.settings["seed"]) for name, seeds in runs.items()}


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def surroundings(world: Processes) -> dict[str, Any]:
    """Command, versions, processes, device, threads and commit: what a rerun needs to know."""
    import transformers

    device = world.device
    start = f"torchrun --nproc-per-node {world.size} -m --" if world.size > 1 else "python -m"
    command = " ".join([start, "rlcore", *sys.argv[1:]])
    return {
        "command": command if Path(sys.argv[0]).parent.name == "rlcore" else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "processes": world.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def processor() -> str:
    """The processor and the instructions that torch uses: other ones may give other last bits."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str | None:
    """The commit of this source, "+" added when a tracked file of rlcore differs from it."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_whole(path, lambda file: file.write(text.encode()))
