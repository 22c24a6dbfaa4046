"""`python -m book bench objectives` on tiny sizes: what it writes, says and returns.

No test asks for a speed: that is what the command measures, on a machine with nothing else to do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "benchmarks"
sys.path.insert(0, str(FOLDER))

import objective_cases as cases  # noqa: E402
import objective_costs as costs  # noqa: E402

TINY = ("--largest", "1", "--seconds", "0.01", "--threads", "1")


def bench(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "book", "bench", "objectives", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "FRTP_NO_VENV": "1"}


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        bench(*arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )


def smallest(case: cases.Case) -> cases.Size:
    """Of the kind that a case takes."""
    size = min(case.sizes, key=cases.Size.elements)
    if size.tokens == 1:
        return cases.Size(16)
    return cases.Size(4, 8, min(size.vocabulary, 11), size.dtype)


# ---- what is compared


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_all_sides_compute_the_same(case: cases.Case) -> None:
    sides = case.make(smallest(case))
    assert {"ours", "trl"} <= set(sides) == set(case.says)
    assert cases.differences(sides, case.tolerance) == []
    assert cases.differences(sides, case.tolerance) == []  # a call leaves nothing behind


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_a_side_that_computes_something_else_is_found(case: cases.Case) -> None:
    """Value or gradient, 20 % off in one place."""
    sides = case.make(smallest(case))
    wanted = sides["ours"]()
    for number, values in enumerate(wanted):
        changed = [value.clone() for value in wanted]
        place = values.double().abs().argmax()
        changed[number].view(-1)[place] *= 1.2
        sides["ours"] = lambda changed=tuple(changed): changed
        assert [text[:4] for text in cases.differences(sides, case.tolerance)] == ["ours"]
        changed[number].view(-1)[place] = torch.nan
        assert cases.differences(sides, case.tolerance)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_extremes_beside_the_loss_are_those_of_trl(
    level: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of responses of which some tokens, but not all, leave the range."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    seen: dict[str, list[float]] = {}
    compute = GRPOTrainer._compute_loss

    def loss(trainer: Any, *rest: Any) -> torch.Tensor:
        result = compute(trainer, *rest)
        seen.update(trainer._metrics["train"])
        return result

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", loss)
    batch = cases.rollout(cases.Size(4, 64))
    batch.advantages.abs_().mul_(sign)
    batch.old.sub_(0.25 * sign * batch.mask * (batch.old < -0.3))
    ends = {"epsilon_low": 0.2, "epsilon_high": 0.28}
    cases.trl_policy(batch, importance_sampling_level=level, **ends)()
    found = cases.clipped_extremes(batch, ratio_level=level, **ends)
    assert found == pytest.approx((*seen["clip_ratio/low_min"], *seen["clip_ratio/high_max"]))
    if level == "token":
        assert 0 < found[0 if sign < 0 else 1] < 1
    assert cases.clipped_extremes(batch, surrogate="capped") is None


def test_the_cases_reach_from_small_to_large() -> None:
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)
    for case in cases.POLICY:
        assert cases.Size(8, 32) in case.sizes
        assert cases.Size(512, 2048) in case.sizes
    vocabularies = {size.vocabulary for case in cases.LOGITS for size in case.sizes}
    dtypes = {size.dtype for case in cases.LOGITS for size in case.sizes}
    assert (vocabularies, dtypes) == ({512, 32_000}, {"float32", "bfloat16"})


# ---- how it is measured


def test_allocated_memory_is_exact() -> None:
    """The most that is held at one moment: two tables at once, then one, then two small ones."""
    table = torch.ones(1024, 256)

    def side() -> cases.Values:
        _ = (table + 1) * 2
        small = torch.zeros(16)
        return (small + 1,)

    scalars = 64  # bytes, for the numbers 1 and 2
    assert 0 <= costs.allocated(side) - 2 * 1024 * 256 * 4 <= scalars
    assert costs.allocated(lambda: (table.view(-1),)) == 0


def test_gradients_count_and_are_not_left_behind() -> None:
    leaf = torch.ones(1000, requires_grad=True)

    def side() -> cases.Values:
        return cases.gradient((leaf * 2).sum(), leaf)

    first = costs.allocated(side)
    assert first >= 4000
    assert costs.allocated(side) == first
    assert leaf.grad is None


RESIDENT = """
import torch
from objective_cases import Case, Sides, Size
from objective_costs import resident

def make(size):
    return Sides(ours=lambda: (torch.ones(size.elements()),))


case = Case("one table", {"ours": "ones"}, make, ())
print(resident(case, Size(2, 2**23), "ours"))
"""


def test_resident_memory_sees_what_a_call_takes() -> None:
    """In a process of its own: one that has done much reuses what it once gave back."""
    if costs.resident_now()[0] is None:
        pytest.skip("this system does not tell")
    paths = os.pathsep.join([str(FOLDER), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    table = 4 * 2 * 2**23
    assert 0.9 * table < int(done.stdout) < 2 * table


def test_sides_take_turns_as_often_as_each_other() -> None:
    seen: list[str] = []

    def side(name: str) -> cases.Side:
        def run() -> cases.Values:
            seen.append(name)
            time.sleep(costs.SHORTEST)
            return ()

        return run

    sides = cases.Sides({name: side(name) for name in ("ours", "trl", "bare")})
    times = costs.time_sides(sides, seconds=0.0, rounds=(5, 60))
    assert {len(values) for values in times.values()} == {5}
    rounds = [tuple(seen[start : start + 3]) for start in range(3, len(seen), 3)]
    assert len(rounds) == 5
    assert all(sorted(each) == ["bare", "ours", "trl"] for each in rounds)
    assert len({each[0] for each in rounds}) > 1  # no side is always the first
    assert min(min(values) for values in times.values()) >= costs.SHORTEST


def test_ratios_are_taken_within_a_round() -> None:
    """The machine slows down tenfold: the ratios do not see it."""
    times = {"ours": [1.0, 2.0, 30.0], "trl": [2.0, 4.0, 50.0]}
    assert costs.spread(times, "ours") == {
        "median": 0.5,
        "low": 0.5,
        "high": 0.6,
        "of_best": 0.5,
    }


def test_sizes_up_to_a_limit() -> None:
    case = cases.POLICY[0]

    def sizes(largest: int | None) -> list[cases.Size]:
        return costs.Plan(threads=1, seconds=0.0, rounds=(3, 3), largest=largest).sizes(case)

    assert sizes(None) == list(case.sizes)
    assert sizes(case.sizes[1].elements()) == list(case.sizes[:2])
    assert sizes(1) == [case.sizes[0]]  # something is always measured


# ---- the command


def test_what_the_command_writes_and_shows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    done = call("--only", "kl, K3", *TINY, "--output", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text("utf-8"))
    assert found["complete"] is True
    assert found["failed"] == []
    assert found["threads"] == 1
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {"python", "torch", "trl", "transformers"}
    assert found["cpu"]
    assert found["date"][:2] == "20"
    (entry,) = found["comparisons"]
    assert entry["case"] == "KL, k3"
    assert entry["size"] == {"rows": 8, "tokens": 32, "dtype": "float32"}
    assert entry["rounds"] >= 3
    for side in ("ours", "trl", "bare"):
        numbers = entry["sides"][side]
        assert numbers["computes"]
        assert numbers["seconds"] > 0
        assert numbers["peak_bytes"] > 8 * 32 * 4
        ratio = numbers["time_ratio"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert entry["sides"]["trl"]["memory_ratio"] == 1
    assert "KL, k3\n  8 x 32 " in done.stdout
    assert str(path) in done.stdout
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--threads", "0"), "--threads: found 0"),
        (("--only", "nothing such"), "--only: found 'nothing such'; there are: GRPO loss, "),
        (("--fast",), "unrecognized arguments"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        costs.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_status_of_the_script_is_that_of_the_command() -> None:
    done = call("--threads", "0")
    assert done.returncode == 2
    assert "--threads: found 0" in done.stderr


def test_without_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    path = tmp_path / "costs.json"
    assert costs.main([*TINY, "--output", str(path)]) == 2
    message = capsys.readouterr().err
    assert "TRL is not installed" in message
    assert "pip install" in message
    assert not path.exists()


def test_an_interrupt_keeps_what_is_measured(tmp_path: Path) -> None:
    """One signal to the command, as a terminal or a scheduler sends it."""
    path = tmp_path / "costs.json"
    line = bench("--only", "loss", "--largest", "1", "--seconds", "2", "--threads", "1")
    process = subprocess.Popen(
        [*line, "--output", str(path)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not path.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate()
    assert process.returncode == 130, shown
    assert "Traceback" not in shown
    found = json.loads(path.read_text("utf-8"))
    assert found["complete"] is False
    wanted = [case for case in cases.CASES if "loss" in case.name]
    assert 1 <= len(found["comparisons"]) < len(wanted)
    assert f"{len(found['comparisons'])} of {len(wanted)} comparisons" in shown


def plan() -> costs.Plan:
    return costs.Plan(threads=1, seconds=0.0, rounds=(5, 5), largest=1, only="loss")


def test_a_comparison_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(context: Any, plan: costs.Plan, what: str, name: str, *rest: Any) -> Any:
        if name == "GRPO loss":
            raise costs.Failed("the sides disagree")
        sides = ("ours", "trl")
        return {"seconds": {s: [1.0] for s in sides}, "peak_bytes": {s: 8 for s in sides}}

    monkeypatch.setattr(costs, "in_a_process", measured)
    shown: list[str] = []
    path = tmp_path / "costs.json"
    assert costs.run(plan(), path, shown.append) == 1
    found = json.loads(path.read_text("utf-8"))
    assert [entry["case"] for entry in found["failed"]] == ["GRPO loss"]
    assert len(found["comparisons"]) == len(plan().comparisons()) - 1
    assert any("failed: the sides disagree" in text for text in shown)


def test_what_does_not_fit_into_memory_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "memory_free", lambda: 0)
    monkeypatch.setattr(costs, "in_a_process", lambda *_: pytest.fail("measured"))
    shown: list[str] = []
    path = tmp_path / "costs.json"
    assert costs.run(plan(), path, shown.append) == 0
    found = json.loads(path.read_text("utf-8"))
    assert len(found["left_out"]) == len(plan().comparisons())
    assert found["left_out"][0] == {"case": "GRPO loss", "size": "8 x 32"}
    assert sum("left out" in text for text in shown) == len(found["left_out"])


def test_a_process_that_dies_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the system takes its memory away."""

    class Process:
        exitcode = -9

        def __init__(self, args: tuple[Any, ...], **_: Any) -> None:
            self.sender = args[0]

        def start(self) -> None:
            pass

        def join(self) -> None:
            pass

    class Context:
        def __init__(self) -> None:
            import multiprocessing

            self.Pipe, self.Process = multiprocessing.Pipe, Process

    with pytest.raises(costs.Failed, match="status -9"):
        costs.in_a_process(Context(), plan(), "measure")
