"""A function in place of the row's advantages: the experiment of chapter 11's exercise."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcore.__main__ import main
from rlcore.objectives import group_advantages
from rlcore.training import row, train_policy

SETTINGS = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "learning_rate": 1e-3, "seed": 0}
SUSPECT = Path(__file__).parents[2] / "chapters" / "runs" / "suspect.py"


def train(model, tokenizer, task, **settings):
    return train_policy(
        model, tokenizer, task, row("grpo"), progress=False, **{**SETTINGS, **settings}
    )


def test_the_same_function_gives_the_same_run(coin, make) -> None:
    plain = train(*make(), coin)
    swapped = train(*make(), coin, advantage_function=group_advantages)
    assert swapped.metrics == plain.metrics
    assert swapped.settings["advantage_function"] == "group_advantages"


def test_it_decides_the_update(coin, make) -> None:
    model, tokenizer = make()
    before = [p.clone() for p in model.parameters()]
    run = train(model, tokenizer, coin, advantage_function=lambda r, ids: torch.zeros_like(r))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [(m["advantage_min"], m["rows_used"]) for m in run.metrics] == [(0, 0)] * 3


def test_missing_rewards_get_no_push(coin, make) -> None:
    task = replace(coin, verify=lambda problem, response: None)
    run = train(*make(), task, advantage_function=lambda r, ids: torch.ones_like(r))
    assert [(m["advantage_max"], m["rows_used"]) for m in run.metrics] == [(0, 0)] * 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda r, ids: r[:3], r"advantage_function: found a result of shape \(3,\); wanted \(16,"),
        (lambda r, ids: r[:, None], r"advantage_function: found a result of shape \(16, 1\)"),
        (lambda r, ids: None, "advantage_function: found None; wanted a tensor"),
        (lambda r, ids: r * 1j, "advantage_function: found complex numbers"),
        (lambda r, ids: r / 0, "advantage_function: found (nan|inf) in row .*; wanted finite"),
    ],
)
def test_bad_results(function, message: str, coin, make) -> None:
    with pytest.raises(ValueError, match=message):
        train(*make(), coin, advantage_function=function)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere.py:f", "--advantages: found 'nowhere.py:f'; wanted FILE:FUNCTION"),
        (f"{SUSPECT}:missing", "defines no function 'missing'"),
    ],
)
def test_bad_places(place: str, message: str, capsys, tmp_path) -> None:
    arguments = ["train", "grpo", "--task", "sort", "--size", "nano", "--sft-steps", "1"]
    code = main([*arguments, "--quiet", "--out", str(tmp_path / "r"), "--advantages", place])
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("def k(r): pass", "--advantages: k(r) cannot be called (too many positional arguments)"),
        (
            "def k(r, ids, more): pass",
            "(missing a required argument: 'more'); wanted a function of",
        ),
        ("k = lambda *, r, ids: r", "--advantages: k(*, r, ids) cannot be called (too many"),
    ],
)
def test_functions_of_other_arguments(definition: str, message: str, capsys, tmp_path) -> None:
    """They are refused before anything is trained."""
    (tmp_path / "f.py").write_text(definition)
    arguments = ["train", "grpo", "--task", "sort", "--size", "nano", "--sft-steps", "1"]
    place, out = f"{tmp_path / 'f.py'}:k", tmp_path / "r"
    code = main([*arguments, "--quiet", "--out", str(out), "--advantages", place])
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_suspect_breaks_the_bound_of_a_group() -> None:
    """Its z-score runs over 32 prompts, so it reaches sqrt(31), beyond sqrt(7) for groups of 8."""
    suspect = runpy.run_path(str(SUSPECT))["advantages"]
    rewards = torch.ones(32 * 8, dtype=torch.float64)
    rewards[0] = 0
    advantages = suspect(rewards, torch.arange(32).repeat_interleave(8))
    assert advantages.min().item() == pytest.approx(-math.sqrt(31), abs=1e-12)
    assert advantages[:8].sum().item() != pytest.approx(0, abs=1)
