"""Training beside TRL, sampling beside `generate`: `python -m book bench training`.

- A whole GRPO run on task sort, from one SFT start, with real ends of sequence: ours, then TRL's,
  with several seeds, each in a process of its own; time, quality before and after, and how far
  resident memory grows while it trains. Where our time goes: sampling, reward, forward, backward,
  optimizer.
- GRPO steps with a reward that leaves no group out, at several sizes and batches: ours and TRL's in
  turn, as whole short runs.
- Sampling: as many tokens for each row, beside `generate`, in turn.
- The update alone: its share of the rate at which this machine multiplies matrices, measured in the
  same rounds.

Ratios are taken within a round: their median, smallest and largest, and that of the quickest
rounds, which a busy machine disturbs least. With one thread the time is that of the processor, not
of the clock on the wall. Results are written after every comparison; an interrupt (Ctrl-C) keeps
what is done.
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
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "bench" / "training.json"
RECORD = ROOT / "chapters" / "runs" / "speed.json"
KINDS = ("run", "sampling", "update", "step")
ROUNDS_AT_LEAST = 3


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    threads: int
    sizes: tuple[str, ...] = ("tiny", "small")
    batches: tuple[int, ...] = (64, 128, 256, 512)
    new_tokens: int = 32
    seconds: float = 8.0  # for a comparison, all sides together; three rounds at least
    runs: int = 3
    run_steps: int = 120
    sft_steps: int | None = None  # None: as the recipe has it
    evaluate_n: int = 512
    kinds: tuple[str, ...] = KINDS

    def comparisons(self) -> list[tuple[str, str, int]]:
        """(kind, size, rows), the quick ones first where they are alike."""
        grid = [(size, rows) for size in self.sizes for rows in self.batches]
        found: list[tuple[str, str, int]] = []
        for kind in self.kinds:
            found += [("run", "tiny", 256)] if kind == "run" else [(kind, *one) for one in grid]
        return found


# ---- in a process of its own


def clock(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def in_turn(sides: dict[str, Callable[[], None]], plan: Plan) -> dict[str, list[float]]:
    """Seconds of each side, one for each round; the order changes from round to round."""
    now = clock(plan.threads)
    names = list(sides)
    for side in sides.values():
        side()  # warm
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + plan.seconds
    rounds = 0
    while rounds < ROUNDS_AT_LEAST or time.perf_counter() < end:
        gc.collect()
        for name in names:
            start = now()
            sides[name]()
            times[name].append(now() - start)
        names = names[1:] + names[:1]
        rounds += 1
    return times


def measure_sampling(plan: Plan, size: str, rows: int) -> dict[str, Any]:
    from training_cases import samplers

    return {"seconds": in_turn(samplers(size, rows, plan.new_tokens), plan)}


def measure_update(plan: Plan, size: str, rows: int) -> dict[str, Any]:
    from training_cases import updates

    sides, operations = updates(size, rows, plan.new_tokens)
    return {"seconds": in_turn(sides, plan), "operations": operations}


def measure_step(plan: Plan, size: str, rows: int) -> dict[str, Any]:
    """Short runs of both sides in turn, from fresh weights, after a warm one of each."""
    from training_cases import GROUP, coin_task, prepare, random_model

    now, task, steps = clock(plan.threads), coin_task(), 4
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    end = time.perf_counter() + plan.seconds
    number = 0
    while number <= ROUNDS_AT_LEAST or time.perf_counter() < end:
        for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            model, tokenizer = random_model(size)
            sizes = {"steps": steps, "prompts": rows // GROUP, "seed": number}
            with prepare(side, model, tokenizer, task, **sizes) as train:
                start = now()
                train()
                if number:  # the first one is warm-up
                    times[side].append((now() - start) / steps)
        number += 1
    return {"seconds": times}


def measure_run(plan: Plan, side: str, seed: int, folder: str) -> dict[str, Any]:
    """A whole run of one side."""
    from objective_costs import resident_now
    from training_cases import GROUP, get_task, load_start, prepare, profiled, quality

    model, tokenizer = load_start(Path(folder))
    task, now = get_task("sort"), clock(plan.threads)
    before = quality(model, tokenizer, plan.evaluate_n)
    model.train()
    sizes = {"steps": plan.run_steps, "prompts": 32, "seed": seed}
    found: dict[str, Any] = {}
    with prepare(side, model, tokenizer, task, **sizes) as train, profiled() as spent:
        gc.collect()
        resident, _ = resident_now()
        wall, start = time.perf_counter(), now()
        train()
        found["seconds"] = now() - start
        total = time.perf_counter() - wall
    _, most = resident_now(reset=False)
    if resident is not None and most is not None:
        found["resident_growth_bytes"] = most - resident
    if side == "ours":
        found["profile"] = {name: seconds / total for name, seconds in spent.items()}
    found["responses"] = plan.run_steps * sizes["prompts"] * GROUP
    return {**found, "before": before, "after": quality(model, tokenizer, plan.evaluate_n)}


def make_start(plan: Plan, folder: str) -> dict[str, Any]:
    from training_cases import make_start

    make_start(Path(folder), plan.sft_steps)
    return {}


MEASURES = {
    "sampling": measure_sampling,
    "update": measure_update,
    "step": measure_step,
    "run": measure_run,
    "start": make_start,
}


class Failed(Exception):
    """A measurement that could not be made."""


def child(connection: Any, plan: Plan, what: str, arguments: tuple[Any, ...]) -> None:
    """Runs in the new process: sends ("done", result) or ("failed", message)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the planning process ends this one
    torch.set_num_threads(plan.threads)
    try:
        connection.send(("done", MEASURES[what](plan, *arguments)))
    except (ValueError, RuntimeError, MemoryError, ImportError, TypeError, OSError) as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))


def start_method() -> Any:
    """Where the system can, processes are split off from one that has loaded all that is compared
    and computed nothing; elsewhere each loads it anew, which takes seconds."""
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    llama = "transformers.models.llama.modeling_llama"
    context.set_forkserver_preload(["training_cases", "trl.trainer.grpo_trainer", llama])
    return context


def in_a_process(plan: Plan, what: str, *arguments: Any) -> dict[str, Any]:
    context = start_method()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender, plan, what, arguments))
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
    return dict(result)


# ---- results


def spread(one: Sequence[float], two: Sequence[float]) -> dict[str, float]:
    """Of two/one within each round, how often one fits into two; and that of the quickest."""
    ratios = [b / a for a, b in zip(one, two, strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
        "of_best": round(min(two) / min(one), 3),
    }


def digits(value: float) -> float:
    return float(f"{value:.4g}")


def compared(found: dict[str, Any], rows: int, plan: Plan, kind: str) -> dict[str, Any]:
    """An entry of a comparison of two sides, from the seconds of each round."""
    times = found["seconds"]
    entry: dict[str, Any] = {
        "rounds": len(times["ours"]),
        "seconds": {name: digits(statistics.median(values)) for name, values in times.items()},
    }
    if kind == "update":
        operations = found["operations"]
        rates = [operations["matmul"] / seconds for seconds in times["matmul"]]
        entry["matmul_gflops"] = round(statistics.median(rates) / 1e9, 1)

        def share(count: str, side: str) -> float:
            pairs = zip(rates, times[side], strict=True)
            return digits(statistics.median(operations[count] / s / rate for rate, s in pairs))

        entry["share"] = {
            "whole_rows": share("whole_rows", "ours"),
            "computed": share("computed", "ours"),
            "model_alone": share("whole_rows", "own"),
        }
        entry["ratio"] = spread(times["ours"], times["own"])
        return entry
    entry["ratio"] = spread(times["ours"], times["theirs"])
    if kind == "sampling":
        tokens = rows * plan.new_tokens
        entry["tokens_per_second"] = {
            name: round(tokens / min(values)) for name, values in times.items()
        }
    return entry


def measure_runs(plan: Plan, folder: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Whole runs of both sides, in turn."""
    start = str(Path(folder) / "start")
    tell("SFT, where both sides start from")
    in_a_process(plan, "start", start)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for seed in range(plan.runs):
        for side in ("ours", "theirs") if seed % 2 else ("theirs", "ours"):
            tell(f"whole run {seed + 1}/{plan.runs}, {NAMES[side]}")
            runs[side].append(in_a_process(plan, "run", side, seed, start))
    times = {side: [run["seconds"] for run in found] for side, found in runs.items()}
    entry: dict[str, Any] = {
        "rounds": plan.runs,
        "steps": plan.run_steps,
        "responses": runs["ours"][0]["responses"],
        "seconds": {side: digits(statistics.median(values)) for side, values in times.items()},
        "ratio": spread(times["ours"], times["theirs"]),
        "before": runs["ours"][0]["before"],
        "after": {side: [run["after"] for run in found] for side, found in runs.items()},
        "profile": {
            name: digits(statistics.fmean(run["profile"].get(name, 0.0) for run in runs["ours"]))
            for name in sorted({name for run in runs["ours"] for name in run["profile"]})
        },
    }
    grown = {side: [run.get("resident_growth_bytes") for run in runs[side]] for side in runs}
    if all(value is not None for values in grown.values() for value in values):
        entry["resident_growth_bytes"] = {side: max(values) for side, values in grown.items()}
    return entry


def surroundings(plan: Plan) -> dict[str, Any]:
    import transformers
    import trl  # type: ignore[import-untyped, unused-ignore]
    from training_cases import get_task, trl_settings

    from rlcore.training.record import commit, processor

    settings = trl_settings(get_task("sort"), plan.run_steps, 32, 0)
    return {
        "what": "training and sampling of rlcore beside TRL's GRPOTrainer and generate",
        "command": command(plan),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "trl": trl.__version__,
            "transformers": transformers.__version__,
        },
        "device": "cpu",
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": plan.threads,
        "clock": "of the processor" if plan.threads == 1 else "on the wall",
        "plan": asdict(plan),
        "trl_settings": settings,
    }


def command(plan: Plan) -> str:
    """What makes the same measurements again."""
    words = ["python -m book bench training", f"--threads {plan.threads}"]
    default = Plan(plan.threads)
    for name in ("sizes", "batches", "kinds"):
        if getattr(plan, name) != getattr(default, name):
            words.append(f"--{name} {' '.join(map(str, getattr(plan, name)))}")
    for name in ("new_tokens", "seconds", "runs", "run_steps", "sft_steps", "evaluate_n"):
        if getattr(plan, name) != getattr(default, name):
            words.append(f"--{name.replace('_', '-')} {getattr(plan, name)}")
    return " ".join(words)


NAMES = {"ours": "rlcore", "theirs": "TRL"}
TITLES = {
    "run": "whole GRPO run, task sort (TRL's time over rlcore's)",
    "sampling": "sampling (time of generate over that of sample)",
    "update": "update (time of the model's own passes over whole rows, over that of the update)",
    "step": "GRPO step, no group left out (TRL's time over rlcore's)",
}


def line(entry: dict[str, Any]) -> str:
    """A line of the table on the screen."""
    ratio, seconds = entry["ratio"], entry["seconds"]
    other = next(name for name in seconds if name not in ("ours", "matmul"))
    text = (
        f"  {entry['size']:6} {entry['rows']:4} rows  "
        f"{seconds['ours']:9.4g} s {seconds[other]:9.4g} s"
        f"   {ratio['median']:5.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}], of best "
        f"{ratio['of_best']:.2f}"
    )
    if "share" in entry:
        share = entry["share"]
        text += (
            f"; of {entry['matmul_gflops']:.0f} GFLOP/s: {share['whole_rows']:.0%} by whole rows, "
            f"{share['computed']:.0%} computed; the model's own passes {share['model_alone']:.0%}"
        )
    if "after" in entry:
        for side, found in entry["after"].items():
            mean = statistics.fmean(one["sampled"] for one in found)
            text += f"; {NAMES[side]} {entry['before']['sampled']:.0%} -> {mean:.0%}"
        if grown := entry.get("resident_growth_bytes"):
            text += f"; memory {grown['ours'] / 2**20:.0f} and {grown['theirs'] / 2**20:.0f} MiB"
    return text


def save(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def run(plan: Plan, path: Path, say: Callable[[str], None]) -> int:
    """All comparisons; the exit status."""
    wanted = plan.comparisons()
    results: dict[str, Any] = {**surroundings(plan), "complete": False, "failed": []}
    results["comparisons"] = []
    say(f"{results['cpu']}, {plan.threads} threads, the clock {results['clock']}")
    last = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, (kind, size, rows) in enumerate(wanted, 1):
                if kind != last:
                    say(TITLES[kind])
                    last = kind
                here = f"{number}/{len(wanted)} {kind} {size} {rows}"
                progress(here)
                try:
                    if kind == "run":
                        entry = measure_runs(
                            plan, folder, lambda text, here=here: progress(f"{here}: {text}")
                        )
                    else:
                        entry = compared(in_a_process(plan, kind, size, rows), rows, plan, kind)
                except Failed as error:
                    failure = {"kind": kind, "size": size, "rows": rows, "why": str(error)}
                    results["failed"].append(failure)
                    say(f"  {size:6} {rows:4} rows  failed: {error}")
                    continue
                results["comparisons"].append({"kind": kind, "size": size, "rows": rows, **entry})
                save(path, results)
                say(line(results["comparisons"][-1]))
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
        prog="python -m book bench training", description=__doc__.split("\n")[0]
    )
    default = Plan(1)
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds, two minutes")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sizes", nargs="+", help="of rlcore.models.SIZES")
    parser.add_argument("--batches", nargs="+", type=int, help="rows; a multiple of 8")
    parser.add_argument("--new-tokens", type=int, default=default.new_tokens)
    parser.add_argument("--seconds", type=float, help="for a comparison, all sides together")
    parser.add_argument("--runs", type=int, help="whole runs of each side")
    parser.add_argument("--run-steps", type=int, default=default.run_steps)
    parser.add_argument("--sft-steps", type=int, default=None)
    parser.add_argument("--evaluate-n", type=int, default=default.evaluate_n)
    parser.add_argument("--output", type=Path, help="where the JSON file goes")
    parser.add_argument(
        "--record", action="store_true", help="write the file that the book's page shows"
    )
    options = parser.parse_args(arguments)
    from rlcore.models import SIZES

    sizes = tuple(options.sizes or (("tiny",) if options.quick else default.sizes))
    batches = tuple(options.batches or ((256,) if options.quick else default.batches))
    for name, found, good in (
        ("--threads", options.threads, options.threads >= 1),
        ("--sizes", sizes, set(sizes) <= set(SIZES)),
        ("--batches", batches, all(rows >= 8 and rows % 8 == 0 for rows in batches)),
        ("--new-tokens", options.new_tokens, 2 <= options.new_tokens <= 48),
        ("--runs", options.runs, options.runs is None or options.runs >= 1),
        ("--run-steps", options.run_steps, options.run_steps >= 1),
        ("--evaluate-n", options.evaluate_n, options.evaluate_n >= 1),
    ):
        if not good:
            parser.error(f"{name}: found {found}; see --help for what is wanted")
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
        sizes=sizes,
        batches=batches,
        new_tokens=options.new_tokens,
        seconds=options.seconds or (1.0 if options.quick else default.seconds),
        runs=options.runs or (1 if options.quick else default.runs),
        run_steps=options.run_steps,
        sft_steps=options.sft_steps,
        evaluate_n=options.evaluate_n,
        kinds=tuple(options.kinds),
    )
    path = options.output or (RECORD if options.record else OUTPUT)
    return run(plan, path, lambda text: print(text, flush=True))
