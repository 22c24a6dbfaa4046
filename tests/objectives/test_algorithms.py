"""The rows: names, answers, and that a row only chooses."""

from dataclasses import fields, replace

import pytest
import torch

from rlcore import algorithms
from rlcore.algorithms import (
    DR_GRPO,
    GRPO,
    GRPO_MEAN_ONLY,
    QUESTIONS,
    REINFORCE,
    RLOO,
    ROWS,
    by_name,
    compute_advantages,
    compute_loss,
)
from rlcore.objectives import (
    group_advantages,
    kl_penalized_rewards,
    leave_one_out_advantages,
    policy_loss,
)

NAN = float("nan")


def test_names() -> None:
    assert [row.name for row in ROWS] == ["reinforce", "rloo", "grpo", "dr-grpo"]
    for row in (*ROWS, GRPO_MEAN_ONLY):
        assert by_name(row.name) is row


def changed(one: algorithms.Algorithm, other: algorithms.Algorithm) -> set[str]:
    names = {field.name for field in fields(one)} - {"name", "title", "source"}
    return {name for name in names if getattr(one, name) != getattr(other, name)}


def test_a_chapter_changes_a_cell() -> None:
    assert changed(GRPO, GRPO_MEAN_ONLY) == {"advantage"}
    assert changed(REINFORCE, RLOO) == {"advantage", "kl", "kl_estimator", "beta"}
    assert changed(GRPO, DR_GRPO) == {"advantage", "aggregation", "kl", "beta"}


def test_the_defaults_of_the_papers() -> None:
    """DeepSeekMath's beta and the eps of its code, the population std; RLOO's beta for TL;DR."""
    assert (GRPO.beta, GRPO.epsilon_low, GRPO.epsilon_high) == (0.04, 0.2, 0.2)
    assert (GRPO.ddof, GRPO.eps, GRPO.kl_estimator, GRPO.kl) == (0, 0.0, "k3", "loss")
    assert (RLOO.beta, RLOO.kl, RLOO.kl_estimator) == (0.03, "reward", "k1")
    assert REINFORCE.kl == DR_GRPO.kl == "none"


def test_five_answers() -> None:
    for row in ROWS:
        answers = row.five_answers()
        assert tuple(answers) == QUESTIONS
        assert all(answers.values())
    assert list(GRPO.five_answers().values()) == [
        "verifier",
        "the mean of the group, in units of its population std",
        "ratio per token, clipped to [0.8, 1.2]",
        "mean over the response, then over responses",
        "k3 in the loss, beta = 0.04",
    ]
    trl = replace(
        GRPO, ddof=1, eps=1e-4, epsilon_high=0.28, beta=0.0, ratio_level="sequence"
    ).five_answers()
    assert list(trl.values())[1:3] == [
        "the mean of the group, in units of its sample std + 0.0001",
        "ratio per response, its |y|-th root, clipped to [0.8, 1.28]",
    ]
    assert trl["How far from where we started?"] == "no limit"
    corrected = replace(GRPO, kl_importance_weighted=True).five_answers()
    assert corrected["How far from where we started?"] == "ratio × k3 in the loss, beta = 0.04"


def test_no_two_rows_answer_alike() -> None:
    answers = [tuple(row.five_answers().values()) for row in (*ROWS, GRPO_MEAN_ONLY)]
    assert len(set(answers)) == len(answers)


REWARDS = torch.tensor([1.0, 0.0, NAN, 1.0], dtype=torch.float64)
IDS = torch.tensor([4, 4, 4, 4])
OLD = torch.tensor([[-1.0, -2.0], [-0.5, NAN], [-1.0, -1.0], [-0.1, -0.2]], dtype=torch.float64)
REF = torch.tensor([[-1.5, -2.0], [-0.7, NAN], [-1.0, -1.0], [-0.1, -0.4]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])


def test_kl_in_the_reward_with_a_missing_reward() -> None:
    """Shaped by hand: 1 - 0.03 * 0.5, 0 - 0.03 * 0.2, missing, 1 - 0.03 * 0.2."""
    shaped = kl_penalized_rewards(REWARDS, OLD, REF, MASK, beta=0.03)
    assert shaped.isnan().tolist() == [False, False, True, False]
    assert shaped[[0, 1, 3]].tolist() == pytest.approx([0.985, -0.006, 0.994], abs=1e-15)
    tensors = {"old_logprobs": OLD, "ref_logprobs": REF, "response_mask": MASK}
    ours = compute_advantages(RLOO, REWARDS, IDS, **tensors)
    assert torch.equal(ours, leave_one_out_advantages(shaped, IDS))
    as_list = compute_advantages(RLOO, [1.0, 0.0, None, 1.0], IDS, **tensors)
    assert torch.equal(as_list, ours)
    without = compute_advantages(replace(RLOO, beta=0.0), REWARDS, IDS)
    assert torch.equal(without, leave_one_out_advantages(REWARDS, IDS))


@pytest.mark.parametrize("row", [REINFORCE, GRPO, DR_GRPO, GRPO_MEAN_ONLY], ids=lambda r: r.name)
def test_other_rows_do_not_look_at_the_reference(row: algorithms.Algorithm) -> None:
    ours = compute_advantages(
        row, REWARDS, IDS, old_logprobs=OLD, ref_logprobs=REF, response_mask=MASK
    )
    assert torch.equal(ours, compute_advantages(row, REWARDS, IDS))


def test_a_row_passes_on_all_that_it_says() -> None:
    """Every field away from its default arrives in the objectives, and so does every argument."""
    row = replace(
        GRPO,
        ddof=1,
        eps=0.5,
        ratio_level="sequence",
        epsilon_low=0.01,
        epsilon_high=0.02,
        aggregation="token_mean",
        kl_estimator="k2",
        kl_importance_weighted=True,
        beta=0.7,
    )
    wanted = group_advantages(REWARDS, IDS, ddof=1, eps=0.5)
    assert torch.equal(compute_advantages(row, REWARDS, IDS), wanted)

    mask = MASK * torch.tensor([[1], [1], [0], [1]])  # the missing row is left out
    new = OLD + torch.tensor([[0.1, 0.3], [-0.2, 0.0], [0.0, 0.0], [0.4, -0.1]])
    ours, stats = compute_loss(
        row, new, OLD, wanted, mask, ref_logprobs=REF, total=11, allow_empty=True, constant=9
    )
    loss, expected = policy_loss(
        new,
        OLD,
        wanted,
        mask,
        ratio_level="sequence",
        epsilon_low=0.01,
        epsilon_high=0.02,
        aggregation="token_mean",
        ref_logprobs=REF,
        beta=0.7,
        kl_estimator="k2",
        kl_importance_weighted=True,
        total=11,
        allow_empty=True,
    )
    assert torch.equal(ours, loss)
    assert stats == expected
    plain, _ = compute_loss(
        replace(row, kl="none", beta=0.0), new, OLD, wanted, mask, total=11, allow_empty=True
    )
    assert plain != loss


def test_a_kl_term_in_the_reward_is_not_in_the_loss_too() -> None:
    new = torch.where(MASK == 1, OLD, 0.0)
    with_reference, _ = compute_loss(RLOO, new, OLD, torch.ones(4), MASK, ref_logprobs=REF)
    without, _ = compute_loss(RLOO, new, OLD, torch.ones(4), MASK)
    assert with_reference == without


def test_the_kl_is_measured_where_it_is_not_in_the_loss() -> None:
    new = torch.where(MASK == 1, OLD, 0.0).requires_grad_()
    advantages = torch.ones(4)
    plain, stats = compute_loss(DR_GRPO, new, OLD, advantages, MASK, constant=2)
    assert "kl" not in stats
    measured, stats = compute_loss(
        DR_GRPO, new, OLD, advantages, MASK, constant=2, ref_logprobs=REF
    )
    assert stats["kl"] > 0
    assert plain == measured
    one, two = (torch.autograd.grad(loss, new)[0] for loss in (plain, measured))
    assert torch.equal(one, two)
