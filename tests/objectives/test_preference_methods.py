"""A preference method is its row: the numbers follow from the fields, the words too."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore import preferences
from rlcore.objectives import kto_loss, preference_loss, reward_model_loss
from rlcore.preferences import (
    CDPO,
    DPO,
    DPO_NORM,
    HINGE,
    IPO,
    IPO_AVERAGED,
    KTO,
    ORPO,
    REWARD_MODEL,
    ROBUST_DPO,
    ROWS,
    SIMPO,
    THREE_QUESTIONS,
    PreferenceMethod,
    UnpairedMethod,
    by_name,
    compute_preference_loss,
    compute_reward_model_loss,
    compute_unpaired_loss,
    simpo_from_ratio,
)

PAIRED = [row for row in ROWS if isinstance(row, PreferenceMethod)]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
every_paired_row = pytest.mark.parametrize("row", PAIRED, ids=lambda row: row.name)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, ref_chosen, ref_rejected = (
        -torch.rand(3, width, generator=generator, dtype=torch.float64) - 0.1
        for width in (4, 5, 4, 5)
    )
    return {
        "chosen_logprobs": chosen,
        "rejected_logprobs": rejected,
        "chosen_mask": torch.arange(4) < torch.tensor([[4], [2], [1]]),
        "rejected_mask": torch.arange(5) < torch.tensor([[3], [5], [2]]),
        "ref_chosen_logprobs": ref_chosen,
        "ref_rejected_logprobs": ref_rejected,
    }


def same(ours: tuple[Tensor, dict], wanted: tuple[Tensor, dict]) -> None:
    assert torch.equal(ours[0], wanted[0])
    assert ours[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        assert torch.equal(ours[1][name], value)


@every_paired_row
def test_a_row_over_pairs_is_the_loss_with_its_fields(row: PreferenceMethod) -> None:
    fields = set(inspect.signature(preference_loss).parameters)
    options = {name: value for name, value in dataclasses.asdict(row).items() if name in fields}
    assert len(options) == 8, "every answer of a row is an argument of the loss"
    given = batch()
    needed = {
        name: value for name, value in given.items() if row.needs_reference or "ref_" not in name
    }
    step = {"total": 7, "token_total": 30}
    wanted = preference_loss(**needed, **options, **step)
    same(compute_preference_loss(row, **given, **step), wanted)
    same(compute_preference_loss(row, **needed, **step), wanted)


@every_paired_row
def test_skipped_pairs_reach_the_loss(row: PreferenceMethod) -> None:
    given = batch()
    given["rejected_mask"] = given["rejected_mask"] & torch.tensor([[True], [False], [True]])
    loss, stats = compute_preference_loss(row, **given, allow_empty=True)
    assert stats["pairs_skipped"] == 1
    assert loss.isfinite()


def test_the_other_rows_are_their_losses() -> None:
    given = batch()
    one, other = given["chosen_logprobs"][0], given["chosen_logprobs"][1]
    centred = dataclasses.replace(REWARD_MODEL, center_coef=0.5)
    for row in (REWARD_MODEL, centred):
        ours = compute_reward_model_loss(row, one, other, margin=one, total=9)
        same(
            ours,
            reward_model_loss(one, other, margin=one, center_coef=row.center_coef, total=9),
        )
    names = {"chosen_logprobs": "logprobs", "ref_chosen_logprobs": "ref_logprobs"}
    marked: dict[str, Any] = {new: given[old] for old, new in names.items()}
    marked |= {
        "response_mask": given["chosen_mask"],
        "desirable": torch.tensor([1, 0, 1]),
        "mismatched_log_ratios": torch.tensor([0.5, 0.25], dtype=torch.float64),
        "total": 5,
        "allow_empty": True,
    }
    weighed = dataclasses.replace(KTO, beta=0.7, weight_desirable=2.0, weight_undesirable=3.0)
    for row in (KTO, weighed):
        options = {"beta": row.beta, "weight_desirable": row.weight_desirable}
        options["weight_undesirable"] = row.weight_undesirable
        same(compute_unpaired_loss(row, **marked), kto_loss(**marked, **options))


def test_the_rows_as_their_papers_give_them() -> None:
    """Field by field: what a row does not name is DPO's answer."""
    differs = {
        DPO: {},
        CDPO: {"label_smoothing": 0.1},
        ROBUST_DPO: {"label_smoothing": 0.1, "smoothing": "robust"},
        HINGE: {"link": "hinge"},
        IPO: {"link": "square"},
        IPO_AVERAGED: {"link": "square", "score": "log_ratio_mean"},
        DPO_NORM: {"score": "log_ratio_mean", "beta": 5.0},
        SIMPO: {"score": "logprob_mean", "beta": 2.0, "gamma": 1.0},
        ORPO: {"score": "log_odds", "beta": 1.0, "weight": 0.1, "nll_coef": 1.0},
    }
    assert list(differs) == PAIRED
    words = {"name", "title", "source", "notes"}
    for row, wanted in differs.items():
        fields = dataclasses.asdict(row)
        changed = {
            name: value
            for name, value in fields.items()
            if name not in words and value != getattr(DPO, name)
        }
        assert changed == wanted
    assert (DPO.beta, DPO.score, DPO.link, DPO.gamma) == (0.1, "log_ratio_sum", "sigmoid", 0.0)
    assert (KTO.beta, KTO.weight_desirable, KTO.weight_undesirable) == (0.1, 1.0, 1.0)
    assert REWARD_MODEL.center_coef == 0


@every_row
def test_every_row_says_where_it_is_from_and_what_differs(row: Any) -> None:
    assert by_name(row.name) is row
    assert row.title
    assert "arXiv" in row.source or "Mitchell" in row.source
    assert row.notes
    for note in row.notes:
        assert note.endswith(".")
        assert note[0].isupper() or note[:2] in ("be", "ga", "z₀", "tr")
    assert [*row.three_answers()] == [*THREE_QUESTIONS]
    assert all(row.three_answers().values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.name = "mine"


def test_no_two_rows_give_the_same_answers() -> None:
    answers = [tuple(row.three_answers().values()) for row in ROWS]
    assert len(set(answers)) == len(ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("row", "changes", "answers"),
    [
        (DPO, {}, ("0.1 × log π/π_ref, summed over the tokens", "0", "−log σ")),
        (
            IPO_AVERAGED,
            {"beta": 0.25},
            ("log π/π_ref, averaged over the tokens", "exactly 1/(2β) = 2", "square"),
        ),
        (
            SIMPO,
            {"gamma": 1.375, "beta": 2.5},
            ("2.5 × log π, averaged over the tokens; no reference", "γ = 1.375", "−log σ"),
        ),
        (
            HINGE,
            {"gamma": 0.5},
            (
                "0.1 × log π/π_ref, summed over the tokens",
                "at least 1.5",
                "max(0, margin − difference)",
            ),
        ),
        (
            ORPO,
            {"nll_coef": 2.0},
            (
                "log P/(1 − P) of P, the geometric mean of the tokens' π; no reference",
                "0",
                "0.1 × −log σ, plus 2 × the chosen response's NLL",
            ),
        ),
        (
            CDPO,
            {"label_smoothing": 0.2},
            (
                "0.1 × log π/π_ref, summed over the tokens",
                "0",
                "−log σ, averaged over labels that are wrong with probability 0.2",
            ),
        ),
        (
            ROBUST_DPO,
            {},
            (
                "0.1 × log π/π_ref, summed over the tokens",
                "0",
                "−log σ, corrected for labels that are wrong with probability 0.1",
            ),
        ),
        (
            REWARD_MODEL,
            {"center_coef": 0.01},
            (
                "r(x, y), a scalar head read at the last real token",
                "the rater's, where the data have one; else 0",
                "−log σ, plus 0.01 × (r_w + r_l)²",
            ),
        ),
        (
            KTO,
            {"weight_desirable": 1.5},
            (
                "0.1 × log π/π_ref, summed over the tokens",
                "none between answers: each is compared with z₀, the mean log π/π_ref of "
                "mismatched pairs (at least 0)",
                "1 − σ, desirable × 1.5, undesirable × 1",
            ),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_words_follow_the_fields(row: Any, changes: dict, answers: tuple) -> None:
    changed = dataclasses.replace(row, **changes)
    assert tuple(changed.three_answers().values()) == answers


def test_which_rows_need_a_reference() -> None:
    without = [row.name for row in PAIRED if not row.needs_reference]
    assert without == ["simpo", "orpo"]
    assert isinstance(KTO, UnpairedMethod)
    assert KTO.needs_reference


def test_simpo_in_the_other_spelling() -> None:
    """gamma / beta, as the authors' code has it: one number is not the other."""
    assert simpo_from_ratio() == SIMPO
    llama = simpo_from_ratio(beta=2.5, gamma_beta_ratio=0.55)
    assert llama.gamma == pytest.approx(1.375)
    assert llama.gamma_beta_ratio == pytest.approx(0.55)
    assert SIMPO.gamma_beta_ratio == 0.5
    given = batch()
    ours, _ = compute_preference_loss(llama, **given)
    mistaken, _ = compute_preference_loss(dataclasses.replace(SIMPO, beta=2.5, gamma=0.55), **given)
    assert (ours - mistaken).abs() > 0.1


def test_the_module_imports_the_objectives_alone() -> None:
    path = Path(preferences.__file__)
    tree = ast.parse(path.read_text("utf-8"))
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in found if name.startswith("rlcore")} == {
        "rlcore.naming",
        "rlcore.objectives",
        "rlcore.objectives._checks",
        "rlcore.objectives._pairs",
        "rlcore.objectives.preference",
    }
    code = "import sys, rlcore.preferences; sys.exit('transformers' in sys.modules)"
    root = path.parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
