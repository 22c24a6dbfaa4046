"""Time and memory of the objectives beside TRL's, in one run: `python -m book bench objectives`.

Every comparison (see `objective_cases`) is made in a process of its own, with the same tensors and
the same number of threads for all sides.

- First the sides must agree, values and gradient; if they do not, nothing is measured.
- Time: the sides, warm by then, take turns, in an order that changes from round to round; what is
  reported is the median over rounds of the ratio to TRL within the round, with its smallest and
  largest, and the ratio of the best rounds, which a busy machine disturbs least.
- Memory: the most bytes that torch's allocator holds at one moment above what it held before, its
  own gradient included, from the events of torch's profiler. That is exact, does not depend on the
  machine, and sees small sizes.
- Resident memory, a check on it: in a fresh process each, after one run at a tiny size, how far the
  largest resident size grows above the size at the start. Only for tables that are large enough to
  be seen beside the rest of a process, and where the system tells (Linux, macOS).

The results are written after every comparison, so an interrupt keeps those that are done.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from objective_cases import CASES, Case, Side, Sides, Size, differences, needed_bytes

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "bench" / "objectives.json"
SEEN = 2**22  # elements of the tensors from which on resident memory tells anything
SHORTEST = 2e-3  # seconds that are measured at once: below, calls are repeated
NAMES = {"ours": "rlcore", "trl": "TRL", "full": "rlcore + TRL's statistics", "bare": "formula"}


@dataclass(frozen=True)
class Plan:
    """How much is measured. `seconds` and `rounds` are for one comparison."""

    threads: int
    seconds: float
    rounds: tuple[int, int]  # at least, at most
    largest: int | None = None  # elements
    resident: bool = True
    only: str = ""

    def sizes(self, case: Case) -> list[Size]:
        """The sizes of a case that are asked for: at least its first."""
        if self.largest is None:
            return list(case.sizes)
        small = [size for size in case.sizes if size.elements() <= self.largest]
        return small or [case.sizes[0]]

    def comparisons(self) -> list[tuple[Case, Size]]:
        cases = [case for case in CASES if self.only.lower() in case.name.lower()]
        return [(case, size) for case in cases for size in self.sizes(case)]


# ---- one side


def once(side: Side) -> float:
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


def time_sides(sides: Sides, seconds: float, rounds: tuple[int, int]) -> dict[str, list[float]]:
    """Seconds per call of each side, one for each round."""
    taken = {name: once(side) for name, side in sides.items()}  # warm: they agreed before
    calls = max(1, round(SHORTEST / min(taken.values())))
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        while len(times["trl"]) < rounds[0] or (
            time.perf_counter() < end and len(times["trl"]) < rounds[1]
        ):
            for name in names:
                total = sum(once(sides[name]) for _ in range(calls))
                times[name].append(total / calls)
            names = names[1:] + names[:1] if len(times["trl"]) % 2 else names[::-1]
    finally:
        gc.enable()
    return times


def allocated(side: Side) -> int:
    """The most bytes that torch's allocator holds at one moment, above what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        side()
    assert measured.profiler is not None
    events = measured.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        most = max(most, held)
    return most


# ---- a process for each measurement


def measure(case: Case, size: Size, plan: Plan) -> dict[str, Any]:
    """Agreement, time and allocated memory of all sides."""
    sides = case.make(size)
    problems = differences(sides, case.tolerance)
    if problems:
        raise ValueError(f"{case.name}, {size}: the sides disagree: {'; '.join(problems)}")
    times = time_sides(sides, plan.seconds, plan.rounds)
    return {
        "seconds": times,
        "peak_bytes": {name: allocated(side) for name, side in sides.items()},
    }


def resident(case: Case, size: Size, side: str) -> int | None:
    """Growth of the largest resident size over one call, in a process that did little before."""
    tiny = Size(2, 4, min(size.vocabulary, 8), size.dtype) if size.tokens > 1 else Size(16)
    case.make(tiny)[side]()  # what is loaded at the first call
    call = case.make(size)[side]
    gc.collect()
    start, most = resident_now()
    if start is None or most is None:
        return None
    call()
    _, after = resident_now(reset=False)
    return None if after is None else max(0, after - start)


def resident_now(reset: bool = True) -> tuple[int | None, int | None]:
    """Resident bytes now, and the most so far (since a reset, where the system has one)."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return (
            int(status["VmRSS"].split()[0]) * 1024,
            int(status["VmHWM"].split()[0]) * 1024,
        )
    except (OSError, KeyError, ValueError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return most, most


def child(connection: Any, threads: int, what: str, arguments: tuple[Any, ...]) -> None:
    """Runs in the new process: sends ("done", result) or ("failed", message)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the planning process ends this one
    torch.set_num_threads(threads)
    name, *rest = arguments
    case = next(case for case in CASES if case.name == name)
    try:
        result = {"measure": measure, "resident": resident}[what](case, *rest)
        connection.send(("done", result))
    except (ValueError, RuntimeError, MemoryError, ImportError, TypeError) as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))


class Failed(Exception):
    """A measurement that could not be made."""


def start_method() -> Any:
    """Where the system can, processes are split off from one that has loaded all that is compared
    and computed nothing; elsewhere each loads it anew, which takes seconds."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says nothing of its own
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    trainers = [f"trl.trainer.{name}_trainer" for name in ("grpo", "dpo")]
    context.set_forkserver_preload([Path(__file__).stem, *trainers])
    return context


def in_a_process(context: Any, plan: Plan, what: str, *arguments: Any) -> Any:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender, plan.threads, what, arguments))
    process.start()
    sender.close()
    try:
        kind, result = receiver.recv()
    except EOFError:
        process.join()
        raise Failed(f"its process ended with status {process.exitcode} (no memory?)") from None
    except BaseException:  # an interrupt
        process.terminate()
        process.join()
        raise
    process.join()
    if kind == "failed":
        raise Failed(result)
    return result


# ---- results


def spread(times: dict[str, list[float]], side: str) -> dict[str, float]:
    """Of the ratio to TRL within each round; and that of the quickest rounds."""
    ratios = [one / two for one, two in zip(times[side], times["trl"], strict=True)]
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(min(ratios), 4),
        "high": round(max(ratios), 4),
        "of_best": round(min(times[side]) / min(times["trl"]), 4),
    }


def summary(case: Case, size: Size, found: dict[str, Any], grown: dict[str, Any]) -> dict[str, Any]:
    times, peaks = found["seconds"], found["peak_bytes"]
    entry: dict[str, Any] = {
        "case": case.name,
        "size": {key: value for key, value in asdict(size).items() if value},
        "rounds": len(times["trl"]),
        "sides": {},
    }
    for side in times:
        entry["sides"][side] = {
            "computes": case.says[side],
            "seconds": float(f"{statistics.median(times[side]):.4g}"),
            "time_ratio": spread(times, side),
            "peak_bytes": peaks[side],
            "memory_ratio": round(peaks[side] / max(peaks["trl"], 1), 4),
        }
        if grown.get(side) is not None:
            entry["sides"][side]["resident_growth_bytes"] = grown[side]
    return entry


def surroundings(plan: Plan) -> dict[str, Any]:
    import transformers
    import trl  # type: ignore[import-untyped, unused-ignore]

    from rlcore.training.record import commit, processor

    return {
        "what": "rlcore's objectives against TRL's on the same tensors",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "trl": trl.__version__,
            "transformers": transformers.__version__,
        },
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": plan.threads,
        "plan": asdict(plan),
    }


HEADER = (
    f"{'':34}{'rlcore':>10}{'TRL':>10}  {'time / TRL [low, high]':24}{'of best':>8}"
    f"{'memory / TRL':>14}  other sides, of best"
)

LEGEND = """\
  time / TRL: in each round all sides take a turn; the median over rounds of rlcore's time over
    TRL's, with its smallest and largest. Below 1, rlcore is quicker. The two columns before it are
    medians of their own. A wide range tells of a busy machine: then look at "of best", the ratio of
    the quickest rounds.
  memory / TRL: of the most bytes that torch holds at one moment, the gradient included.
  rlcore + TRL's statistics: as many numbers for the log as TRL computes; formula: plain torch,
    without checks, on the same tensors."""


def line(entry: dict[str, Any]) -> str:
    """A line of the table on the screen."""
    sides, size = entry["sides"], Size(**entry["size"])
    ours, theirs = sides["ours"], sides["trl"]
    ratio = ours["time_ratio"]
    around = f"{ratio['median']:5.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    others = ", ".join(
        f"{NAMES[name]} {side['time_ratio']['of_best']:.2f}"
        for name, side in sides.items()
        if name not in ("ours", "trl")
    )
    return (
        f"  {size!s:32}{clock(ours['seconds']):>10}{clock(theirs['seconds']):>10}  {around:24}"
        f"{ratio['of_best']:8.2f}{ours['memory_ratio']:14.2f}  {others}"
    )


def clock(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def save(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def memory_free() -> int:
    """Bytes that a process may take without others being written to disk."""
    import psutil

    return int(psutil.virtual_memory().available)


def run(plan: Plan, path: Path, say: Callable[[str], None]) -> int:
    """All comparisons; the exit status."""
    wanted = plan.comparisons()
    results = {**surroundings(plan), "complete": False, "left_out": [], "failed": []}
    results["comparisons"] = []
    context = start_method()
    last = None
    say(f"{results['cpu']}, {plan.threads} threads; sizes: rows x tokens (x vocabulary)")
    say(LEGEND)
    say(HEADER)
    try:
        for number, (case, size) in enumerate(wanted, 1):
            if case.name != last:
                say(case.name)
                last = case.name
            if needed_bytes(size) > memory_free() / 2:
                results["left_out"].append({"case": case.name, "size": str(size)})
                say(f"  {size!s:32}left out: this machine has too little free memory now")
                continue
            progress(f"{number}/{len(wanted)} {size}")
            try:
                found = in_a_process(context, plan, "measure", case.name, size, plan)
                grown = {}
                if plan.resident and size.elements() >= SEEN:
                    for side in ("ours", "trl"):
                        grown[side] = in_a_process(context, plan, "resident", case.name, size, side)
            except Failed as error:
                results["failed"].append({"case": case.name, "size": str(size), "why": str(error)})
                say(f"  {size!s:32}failed: {error}")
                continue
            entry = summary(case, size, found, grown)
            results["comparisons"].append(entry)
            save(path, results)
            say(line(entry))
    except KeyboardInterrupt:
        save(path, results)
        say(f"interrupted; {len(results['comparisons'])} of {len(wanted)} comparisons in {path}")
        return 130
    results["complete"] = True
    save(path, results)
    say(f"written to {path}")
    return 1 if results["failed"] else 0


def progress(text: str) -> None:
    """What is being measured, where a person looks on; the next line overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\033[K  ... {text}\r", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all measured. 1: a comparison failed. 2: bad arguments. 130: interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m book bench objectives", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="small tables and few rounds, about a minute"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    parser.add_argument("--seconds", type=float, help="for a comparison, repetitions of all sides")
    parser.add_argument("--largest", type=int, help="leave out tables of more elements")
    parser.add_argument("--only", default="", help="comparisons whose name has this in it")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the JSON file goes")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"--threads: found {options.threads}; wanted at least 1")
    try:
        import trl  # noqa: F401
    except ImportError:
        print(
            "python -m book bench: TRL is not installed, so there is nothing to compare with. "
            "`pip install 'trl>=1.10,<2'` adds it (requirements.txt has the tested version).",
            file=sys.stderr,
        )
        return 2
    plan = Plan(
        threads=options.threads,
        seconds=options.seconds or (0.3 if options.quick else 1.5),
        rounds=(3, 60),
        largest=options.largest or (2**20 if options.quick else None),
        resident=not options.quick,
        only=options.only,
    )
    if not plan.comparisons():
        names = ", ".join(case.name for case in CASES)
        parser.error(f"--only: found {options.only!r}; there are: {names}")
    return run(plan, options.output, lambda text: print(text, flush=True))
