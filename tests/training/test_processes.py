"""Two processes are one: the same gradients, losses, metrics and runs, to the last bits.

torchrun starts two processes of `two_processes.py` on the CPU, once for all comparisons.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.__main__ import main
from rlcore.algorithms import GRPO_MEAN_ONLY, ROWS
from rlcore.objectives.aggregation import AGGREGATIONS
from rlcore.preferences import ROWS as OVER_PAIRS
from rlcore.training import read_run
from rlcore.training.processes import ALONE, Processes, processes
from rlcore.training.sharding import check_shard

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = [
    *(row.name for row in (*ROWS, GRPO_MEAN_ONLY)),
    *(f"aggregation {how}" for how in AGGREGATIONS),
    *("in parts", "critic in parts", "a share of equal groups", "a share of zeros"),
    *("one row for two processes", "a reward model", "sft"),
    *("shared out", "shared out in parts", "shared out, one row", "shared out, with a critic"),
    *(row.name for row in OVER_PAIRS),
    *("sft, shared out", "dpo, shared out in parts", "kto, shared out in parts"),
    *("float32, shared out", "bf16, shared out"),
]
# Of float32's rounding: where the arithmetic is that of float32, what can be asked of it.
COARSE = {"float32, shared out": 1e-5, "bf16, shared out": 1e-2}


def start(*command: str, launcher: str = "torchrun") -> subprocess.CompletedProcess[str]:
    """Run a command of this environment's launcher from the root of the repository."""
    modules = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.launch"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "WORLD_"))}
    return subprocess.run(
        [sys.executable, "-m", modules[launcher], *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


TWO = ("--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checks; the second process ended by a SIGKILL in a run, after them."""
    out = tmp_path_factory.mktemp("two-processes")
    ended = start(*TWO, str(HERE / "two_processes.py"), "checks", str(out))
    assert (out / "results.pt").is_file(), ended.stderr
    assert ended.returncode != 0
    return out


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    assert found["size"] == 2
    assert sorted(found["cases"]) == sorted(CASES)
    return found


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance as a share of the second one's length."""
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_of_two_processes_are_those_of_one(results, name) -> None:
    """The policy's and the critic's gradient at each of two steps, in float64; what comes after an
    update is less close, since Adam divides by a gradient's size, however small it is.

    Every row of both tables, every aggregation, five prompts for two processes (so shares are
    uneven, of unlike length, and split a group), missing rewards, parts, a share without anything.
    """
    one, two = (results["cases"][name][who] for who in ("one", "two"))
    assert two["sharded"] == ("shared out" in name)
    assert len(one["gradients"]) == len(two["gradients"]) >= 2
    assert float(one["gradients"][0].norm()) > 0.1
    for step, (ours, theirs) in enumerate(zip(two["gradients"], one["gradients"], strict=True)):
        assert apart(ours, theirs) <= COARSE.get(name, 1e-12 if step == 0 else 1e-8)
    for log in ("metrics", "evaluations"):
        for ours, theirs in zip(two[log], one[log], strict=True):
            exact = ours["step"] <= 1 and log == "metrics"
            assert_close(ours, theirs, COARSE.get(name, 1e-12 if exact else 1e-8))


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    """Two rows of metrics. A sum of numbers that cancel is compared as it is: hence abs.

    While the policy is its reference, margins are 0 but for rounding, which the accuracy counts
    by its sign: there it says nothing.
    """
    assert ours.keys() == theirs.keys()
    of_rounding = set()
    for prefix in ("", "eval_"):
        margins = [row.get(f"{prefix}rewards/margins") for row in (ours, theirs)]
        if all(margin is not None and abs(margin) < tolerance for margin in margins):
            of_rounding.add(f"{prefix}rewards/accuracies")
    for name, value in theirs.items():
        if name in of_rounding:
            continue
        if name == "updates":
            for pair in zip(ours[name], value, strict=True):
                assert_close(*pair, tolerance)
        elif value is None:
            assert ours[name] is None
        else:
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def test_the_shares_are_the_awkward_ones(results) -> None:
    """What the names of the cases promise."""
    rows = {n: c["one"]["metrics"][0].get("rows_used") for n, c in results["cases"].items()}
    assert rows["one row for two processes"] == 1
    assert rows["a share of zeros"] == 20
    assert results["cases"]["a share of zeros"]["one"]["metrics"][0]["frac_reward_zero_std"] > 0
    assert 0 < rows["dr-grpo"] < 20
    assert results["cases"]["grpo"]["one"]["metrics"][0]["missing_rewards"] > 0


def test_the_mean_of_the_processes_own_means_is_another_gradient(results) -> None:
    exact = results["cases"]["aggregation token_mean"]["one"]["gradients"][0]
    assert apart(results["naive"]["gradients"][0], exact) > 1e-2


def test_case_a19_two_and_six_tokens_in_two_processes(results) -> None:
    """Their mean of means is 2."""
    loss, gradient = results["a19"]
    assert loss == pytest.approx(1.5, abs=1e-12)
    assert gradient == pytest.approx([-1 / 8] * 8, abs=1e-12)


def test_an_error_in_one_process_is_the_error_of_all(results) -> None:
    main, second = results["errors"]
    assert main["second"] == "ValueError; no such thing; in process 1 of 2"
    assert second["second"] == "ValueError; no such thing"
    assert main["main"] == "OSError; disk full"
    assert second["main"] == "OSError; disk full; in process 0 of 2"
    assert main["stubborn"] == "RuntimeError; Stubborn: so; in process 1 of 2"
    assert second["stubborn"] == "Stubborn; so"
    for said in (main, second):
        assert said["few"] == (
            "ValueError; prompts_per_step: found 1 for 2 processes; wanted at least one each"
        )
        assert said["few pairs"].startswith("ValueError; batch_size: found 1 for 2 processes")
        assert said["unlike"].startswith("ValueError; seed: found ")
        assert "held' is being written by another run" in said["held"]


def test_a_number_that_is_not_finite_in_one_process_stops_both(results, folder) -> None:
    main, second = (said["not finite"] for said in results["stops"])
    assert len(main) == len(second) == 2  # replicated, and shared out
    for said in main:
        assert said.startswith("step 2: the policy's log-probs are not finite; the batch is in ")
    for said in second:
        assert said.startswith("step 2: the policy's log-probs are not finite; nothing was trained")
    for name in ("not-finite", "shared-not-finite"):
        batch = torch.load(folder / name / "nonfinite-step-2.pt", weights_only=True)
        assert len(batch["input_ids"]) == 20
        assert len(read_run(folder / name).metrics) == 1


def test_an_interrupt_of_one_process_stops_both_after_the_same_step(results, folder) -> None:
    for said in results["stops"]:
        interrupted, metrics = said["stopped"]
        assert interrupted
        assert metrics == said["whole"][:2]
        assert said["resumed"] == (True, said["whole"])
    assert final(folder / "stopped") == final(folder / "whole")
    assert [said["out"] for said in results["stops"]] == [folder / "whole"] * 2


def test_a_run_that_is_shared_out_is_the_run_that_is_not(results, folder) -> None:
    """Its checkpoints too: a run may go on either way, and stops change no bit of it."""
    for said in results["stops"]:
        for ours, theirs in zip(said["shared"], said["whole"], strict=True):
            assert_close(ours, theirs, 1e-9)
    assert final(folder / "shared-stopped") == final(folder / "shared")
    assert_near(folder / "shared-mixed", folder / "whole")


def test_a_run_may_go_on_with_another_number_of_processes(results, folder) -> None:
    assert read_run(folder / "then-alone").finished
    assert_near(folder / "then-alone", folder / "whole")


def assert_near(ours: Path, theirs: Path) -> None:
    """The weights and the optimizer's moments at the ends of two runs."""
    states = [final(out)["state"] for out in (ours, theirs)]
    for pick in (lambda state: state["model"], lambda state: state["optimizer"]["state"]):
        found, wanted = (torch.tensor(list(leaves(pick(state)))).double() for state in states)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def leaves(value: Any) -> Iterator[Any]:
    """The numbers in nested lists and dicts."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def test_case_c01_a_killed_process_and_a_resume_in_two(results, folder) -> None:
    before = read_run(folder / "killed")
    assert before.metrics == results["stops"][0]["whole"][: len(before.metrics)]
    assert len(before.metrics) < 4
    ended = start(*TWO, str(HERE / "two_processes.py"), "resume", str(folder))
    assert ended.returncode == 0, ended.stderr
    assert final(folder / "killed") == final(folder / "whole")


def final(out: Path) -> dict[str, Any]:
    """Weights, optimizer, history and logs at the end of a run, as comparable values."""
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    kept = {name: state[name] for name in ("model", "optimizer", "history", "data", "step")}
    logs = {n: (out / f"{n}.jsonl").read_bytes() for n in ("metrics", "samples", "errors")}
    return {"state": plain(kept), **logs}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


SHELL = (
    *("train", "grpo", "--task", "sort", "--size", "nano", "--sft-steps", "20", "--steps", "3"),
    *("--prompts-per-step", "5", "--group-size", "4", "--n", "16", "--device", "cpu"),
    *("--threads", "1"),
)


def test_the_command_under_torchrun_makes_the_run_of_one_process(tmp_path) -> None:
    """SFT and three steps from it. `--`: else torchrun takes --n for one of its own options."""
    two = start(*TWO, "-m", "--", "rlcore", *SHELL, "--out", str(tmp_path / "two"))
    assert two.returncode == 0, two.stderr
    assert "2 processes, 32 demonstrations each" in two.stderr
    assert "2 processes, 2 or 3 prompts each" in two.stderr
    assert two.stdout.count("finished after 3 steps") == 1
    assert main([*SHELL, "--quiet", "--out", str(tmp_path / "one")]) == 0
    for part in ("start", "."):
        runs = [read_run(tmp_path / name / part) for name in ("one", "two")]
        for log in ("metrics", "evaluations"):
            for ours, theirs in zip(getattr(runs[1], log), getattr(runs[0], log), strict=True):
                assert_close(ours, theirs, 1e-5)
    for name, count in (("one", 1), ("two", 2)):
        said = json.loads((tmp_path / name / "run.json").read_text())
        assert said["processes"] == count
    assert said["command"].startswith("torchrun --nproc-per-node 2 -m -- rlcore train grpo")


def test_accelerate_launch_that_starts_one_process_for_two_is_an_error(tmp_path) -> None:
    """On the CPU it does, without a word (accelerate 1.15)."""
    command = (
        "--cpu",
        "--num_processes",
        "2",
        "-m",
        "rlcore",
        *SHELL,
        "--out",
        str(tmp_path / "x"),
    )
    ended = start(*command, launcher="accelerate")
    assert ended.returncode != 0
    assert "accelerate launch was asked for several and started 1" in ended.stderr
    assert "torchrun --nproc-per-node" in ended.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("n", range(2, 12))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_neighbours_and_differ_by_one_at_most(n, size) -> None:
    shares = [Processes(rank, size).share(n) for rank in range(size)]
    assert [i for share in shares for i in range(n)[share]] == list(range(n))
    counts = [share.stop - share.start for share in shares]
    assert max(counts) - min(counts) <= 1
    least, most = min(counts), max(counts)
    each = str(least) if least == most else f"{least} or {most}"
    assert Processes(0, size).words(n, "prompts") == f"{size} processes, {each} prompts each"


def test_one_process_is_asked_nothing_and_told_nothing(monkeypatch) -> None:
    """Results are the objects themselves; gradients stay; accelerate is not even imported."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    thing, weight = object(), torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), math.pi)
    assert ALONE.gather(lambda: thing)[0] is thing
    assert ALONE.from_main(lambda: thing) is thing
    assert ALONE.rows(3, lambda own: own) == [slice(0, 3)]
    assert ALONE.rows(0, lambda own: own) == [slice(0, 0)]
    ALONE.sum_gradients([weight])
    assert weight.grad.tolist() == [pytest.approx(math.pi)] * 2
    assert processes("cpu") == ALONE


@pytest.mark.parametrize("size", ["0", "two", "-1", ""])
def test_a_world_size_that_is_none_is_an_error(size, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=r"WORLD_SIZE: found .*; wanted the number of processes"):
        processes("cpu")


@pytest.mark.parametrize(
    ("world", "wrong", "message"),
    [
        (ALONE, {"shard": True}, "shard: found True with 1 process; wanted several"),
        (ALONE, {"shard": "yes"}, "shard: found 'yes'; wanted True or False"),
        (Processes(0, 2), {"shard": True, "frozen": True}, "shard: found weight frozen; wanted"),
    ],
)
def test_what_cannot_be_shared_out_is_an_error(world, wrong, message) -> None:
    layer = torch.nn.Linear(2, 2).requires_grad_(not wrong.get("frozen", False))
    with pytest.raises(ValueError, match=message):
        check_shard(wrong["shard"], layer, world)


def test_devices_that_processes_would_share_are_an_error(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="found 2 processes on a machine with 1 CUDA devices"):
        processes()
    with pytest.raises(ValueError, match="device: found cuda:0 for 2 processes; wanted 'cuda'"):
        processes("cuda:0")
