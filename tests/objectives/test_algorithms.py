"""The rows: names, answers, and that a row only chooses."""

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore import algorithms
from rlcore.algorithms import (
    BNPO,
    CISPO,
    DAPO,
    DCPO,
    DR_GRPO,
    GDPO,
    GRPO,
    GRPO_MEAN_ONLY,
    GSPO,
    GSPO_TOKEN,
    PPO,
    QUESTIONS,
    REINFORCE,
    RLOO,
    ROWS,
    SAPO,
    SCST,
    VAPO,
    VESPO,
    Algorithm,
    by_name,
    compute_advantages,
    compute_loss,
    step_totals,
)
from rlcore.objectives import (
    RewardHistory,
    aggregate,
    beta_normalized_advantages,
    decoupled_advantages,
    generalized_advantages,
    group_advantages,
    kl_penalized_rewards,
    kl_shaped_rewards,
    leave_one_out_advantages,
    length_adaptive_lam,
    policy_loss,
    self_critical_advantages,
    sft_loss,
    smoothed_advantages,
    value_loss,
    whiten,
)

NAN = float("nan")
ALL = (*ROWS, GRPO_MEAN_ONLY)


def test_names() -> None:
    assert [row.name for row in ROWS] == [
        "reinforce", "scst", "rloo", "ppo", "grpo", "dr-grpo", "dapo", "dcpo", "gdpo", "gspo",
        "gspo-token", "cispo", "vapo", "bnpo", "bnpo-trl", "sapo", "luspo", "vespo",
    ]  # fmt: skip
    for row in ALL:
        assert by_name(row.name) is row
    assert len({row.title for row in ALL}) == len(ALL)


def test_what_the_module_exports_is_there() -> None:
    assert all(hasattr(algorithms, name) for name in algorithms.__all__)
    rows = {name for name in vars(algorithms) if isinstance(getattr(algorithms, name), Algorithm)}
    assert rows <= set(algorithms.__all__)
    assert {getattr(algorithms, name).name for name in rows} == {row.name for row in ALL}


def changed(one: Algorithm, other: Algorithm) -> set[str]:
    names = {field.name for field in fields(one)} - {"name", "title", "source", "notes"}
    return {name for name in names if getattr(one, name) != getattr(other, name)}


def test_a_chapter_changes_a_cell() -> None:
    assert changed(GRPO, GRPO_MEAN_ONLY) == {"advantage"}
    assert changed(REINFORCE, SCST) == {"advantage"}
    assert changed(REINFORCE, RLOO) == {"advantage", "kl", "kl_estimator", "beta"}
    assert changed(GRPO, DR_GRPO) == {"advantage", "aggregation", "kl", "beta"}
    free = replace(GRPO, kl="none", beta=0.0)
    assert changed(free, DAPO) == {"overlong", "dynamic_sampling", "epsilon_high", "aggregation"}
    assert changed(free, DCPO) == {
        "advantage", "clip_range", "epsilon_low", "ratio_max", "aggregation"
    }  # fmt: skip
    assert changed(free, GDPO) == {"reward", "advantage", "ddof"}
    assert changed(free, GSPO) == {"ratio_level", "epsilon_low", "epsilon_high"}
    assert changed(GSPO, GSPO_TOKEN) == {"ratio_level"}
    assert changed(free, SAPO) == {"surrogate"}


def test_the_defaults_of_the_papers() -> None:
    """DeepSeekMath's beta and the eps of its code, the population std; RLOO's beta for TL;DR."""
    assert (GRPO.beta, GRPO.epsilon_low, GRPO.epsilon_high) == (0.04, 0.2, 0.2)
    assert (GRPO.ddof, GRPO.eps, GRPO.kl_estimator, GRPO.kl) == (0, 0.0, "k3", "loss")
    assert (RLOO.beta, RLOO.kl, RLOO.kl_estimator) == (0.03, "reward", "k1")
    assert REINFORCE.kl == DR_GRPO.kl == "none"
    assert (PPO.gamma, PPO.lam, PPO.epsilon_low, PPO.beta) == (1.0, 0.95, 0.2, 0.02)
    assert (DAPO.epsilon_low, DAPO.epsilon_high, DAPO.beta) == (0.2, 0.28, 0.0)
    assert DAPO.overlong_cache == 4096 / 20480
    assert (DCPO.epsilon_low, DCPO.epsilon_high, DCPO.ratio_max, DCPO.ddof) == (0.16, 0.2, 10, 0)
    assert (GDPO.ddof, GDPO.eps, GDPO.batch_eps) == (1, 0.0, 1e-4)
    assert (GSPO.epsilon_low, GSPO.epsilon_high) == (3e-4, 4e-4)
    assert (CISPO.epsilon_low, 1 + CISPO.epsilon_high) == (1.0, 5.0)
    assert (SAPO.tau_positive, SAPO.tau_negative) == (1.0, 1.05)
    assert (VAPO.lam_critic, VAPO.length_alpha, VAPO.nll_coef) == (1.0, 0.05, 0.1)
    assert (VAPO.epsilon_low, VAPO.epsilon_high, VAPO.aggregation) == (0.2, 0.28, "token_mean")


def test_five_answers() -> None:
    for row in ALL:
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


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        (DAPO, 0, "verifier, minus up to 1 over the last 20% of the longest length allowed"),
        (PPO, 0, "reward model, minus 0.02 × k1 at each token"),
        (RLOO, 0, "verifier, minus 0.03 × k1 summed over the response"),
        (GDPO, 0, "several rewards, kept apart"),
        (replace(GRPO, reward="several"), 0, "several rewards, added up"),
        (SCST, 1, "the greedy answer to the same prompt"),
        (
            DAPO,
            1,
            "the mean of the group, in units of its population std; groups that are all equal are "
            "drawn anew",
        ),
        (
            PPO,
            1,
            "a critic, by GAE with γ = 1, λ = 0.95, whitened over the batch; 0.1 × value loss, "
            "clipped to ±0.2",
        ),
        (
            VAPO,
            1,
            "a critic, by GAE with γ = 1, λ = 1 - 1/(0.05 |y|) (λ = 1 for the critic's targets); "
            "first fitted to Monte-Carlo returns of the start; 1 × value loss",
        ),
        (
            GDPO,
            1,
            "for each reward, the mean of the group in units of its sample std; their weighted sum "
            "in units of the batch's sample std + 0.0001",
        ),
        (
            replace(GRPO, advantage="batch_zscore"),
            1,
            "the mean of the group, in units of the batch's population std",
        ),
        (
            DCPO,
            2,
            "ratio per token, clipped where its probability would move by more than 0.16 down or "
            "0.2 up, never beyond 10",
        ),
        (CISPO, 2, "ratio per token, capped at 5, as a weight of log π without gradient"),
        (
            replace(CISPO, epsilon_low=0.5),
            2,
            "ratio per token, held in [0.5, 5], as a weight of log π without gradient",
        ),
        (
            replace(GRPO, entropy_coef=0.01),
            2,
            "ratio per token, clipped to [0.8, 1.2]; plus 0.01 × entropy",
        ),
        (BNPO, 2, "ratio per token, clipped to [0.8, 1.28], never beyond 10"),
        (DCPO, 3, "mean over the response, then sum over responses"),
        (
            VAPO,
            3,
            "mean over all tokens; plus 0.1 × likelihood of the correct responses",
        ),
        (
            replace(DAPO, overlong="filter"),
            3,
            "mean over all tokens; truncated responses not at all",
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_an_answer_names_what_the_row_has(row: Algorithm, question: int, answer: str) -> None:
    assert row.five_answers()[QUESTIONS[question]] == answer


def test_no_two_rows_answer_alike() -> None:
    answers = [tuple(row.five_answers().values()) for row in ALL]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_a_row_says_where_it_comes_from(row: Algorithm) -> None:
    assert row.source
    assert row.notes
    for note in row.notes:
        assert (
            note[0].isupper()
            or note.split()[0] in ("epsilon_high", "verl", "beta")
            or (note[0].isdigit())
        ), note
        assert note.endswith("."), note


def test_a_row_survives_a_record() -> None:
    """What a run writes down gives the row back, also where a file had no word of newer fields."""
    for row in ALL:
        assert Algorithm(**json.loads(json.dumps(asdict(row)))) == row
    old = {
        "name": "grpo", "title": "GRPO", "source": "", "reward": "verifier",
        "advantage": "group_zscore", "ddof": 0, "eps": 0.0, "surrogate": "clip",
        "ratio_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2,
        "aggregation": "sequence_mean", "kl": "loss", "kl_estimator": "k3",
        "kl_importance_weighted": False, "beta": 0.04,
    }  # fmt: skip
    assert changed(Algorithm(**old), GRPO) == set()


REWARDS = torch.tensor([1.0, 0.0, NAN, 1.0], dtype=torch.float64)
IDS = torch.tensor([4, 4, 4, 4])
OLD = torch.tensor([[-1.0, -2.0], [-0.5, NAN], [-1.0, -1.0], [-0.1, -0.2]], dtype=torch.float64)
REF = torch.tensor([[-1.5, -2.0], [-0.7, NAN], [-1.0, -1.0], [-0.1, -0.4]], dtype=torch.float64)
VALUES = torch.tensor([[0.2, 0.5], [0.1, NAN], [0.3, 0.3], [0.9, 0.8]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
TENSORS: dict[str, Any] = {"old_logprobs": OLD, "ref_logprobs": REF, "response_mask": MASK}
EVERYTHING: dict[str, Any] = {
    **TENSORS,
    "max_length": 2,
    "greedy_rewards": torch.tensor([0.0, 1.0, 0.0, NAN], dtype=torch.float64),
    "values": VALUES,
    "bootstrap_values": torch.tensor([0.0, 0.4, 0.0, 0.0], dtype=torch.float64),
}


def test_kl_in_the_reward_with_a_missing_reward() -> None:
    """Shaped by hand: 1 - 0.03 * 0.5, 0 - 0.03 * 0.2, missing, 1 - 0.03 * 0.2."""
    shaped = kl_penalized_rewards(REWARDS, OLD, REF, MASK, beta=0.03)
    assert shaped.isnan().tolist() == [False, False, True, False]
    assert shaped[[0, 1, 3]].tolist() == pytest.approx([0.985, -0.006, 0.994], abs=1e-15)
    ours = compute_advantages(RLOO, REWARDS, IDS, **TENSORS).advantages
    assert torch.equal(ours, leave_one_out_advantages(shaped, IDS))
    as_list = compute_advantages(RLOO, [1.0, 0.0, None, 1.0], IDS, **TENSORS).advantages
    assert torch.equal(as_list, ours)
    without = compute_advantages(replace(RLOO, beta=0.0), REWARDS, IDS).advantages
    assert torch.equal(without, leave_one_out_advantages(REWARDS, IDS))


PLAIN = [
    row
    for row in ALL
    if row.kl != "reward"
    and row.overlong == "keep"
    and row.advantage not in ("greedy", "gae", "smoothed", "decoupled")
]


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.name)
def test_other_rows_do_not_look_at_what_they_do_not_need(row: Algorithm) -> None:
    ours = compute_advantages(row, REWARDS, IDS, **EVERYTHING)
    alone = compute_advantages(row, REWARDS, IDS)
    assert torch.equal(ours.advantages, alone.advantages)
    assert ours[1:] == alone[1:] == (None, None)


def test_each_baseline_is_its_function() -> None:
    def of(row: Algorithm, rewards: Any = REWARDS, **extra: Any) -> Tensor:
        return compute_advantages(row, rewards, IDS, **{**EVERYTHING, **extra}).advantages

    greedy = EVERYTHING["greedy_rewards"]
    assert torch.equal(of(SCST), self_critical_advantages(REWARDS, greedy))
    assert torch.equal(of(BNPO), beta_normalized_advantages(REWARDS, IDS))
    batch = replace(GRPO, advantage="batch_zscore", ddof=1, eps=0.1)
    wanted = group_advantages(REWARDS, IDS, scale="batch", ddof=1, eps=0.1)
    assert torch.equal(of(batch), wanted)

    two = torch.stack([REWARDS, torch.tensor([0.0, 2.0, 1.0, NAN], dtype=torch.float64)], dim=1)
    weights = torch.tensor([1.0, 0.5])
    row = replace(GDPO, ddof=0, eps=0.01, batch_eps=0.02)
    settings = {"ddof": 0, "eps": 0.01, "batch_eps": 0.02}
    assert torch.equal(of(row, two), decoupled_advantages(two, IDS, **settings))
    wanted = decoupled_advantages(two, IDS, weights=weights, **settings)
    assert torch.equal(of(row, two, reward_weights=weights), wanted)


def test_the_history_goes_in_and_comes_out() -> None:
    first = compute_advantages(DCPO, REWARDS, IDS)
    assert isinstance(first.history, RewardHistory)
    again = compute_advantages(DCPO, 1 - REWARDS, IDS, history=first.history)
    one = smoothed_advantages(REWARDS, IDS)
    two = smoothed_advantages(1 - REWARDS, IDS, one.history)
    assert torch.equal(first.advantages, one.advantages)
    assert torch.equal(again.advantages, two.advantages)
    assert again.history is not None
    assert again.history.visits.tolist() == [2]
    sample_std = compute_advantages(replace(DCPO, ddof=1), REWARDS, IDS).advantages
    assert torch.equal(sample_std, smoothed_advantages(REWARDS, IDS, ddof=1).advantages)
    assert not torch.equal(sample_std, first.advantages)


def test_the_penalty_is_added_before_anything_else() -> None:
    """Lengths 2, 1, 2, 2 of at most 3, the last third of which costs: only length 3 does."""
    row = replace(DAPO, overlong_cache=1 / 3)
    lengths = {"response_mask": MASK, "max_length": 3}
    same = compute_advantages(row, REWARDS, IDS, **lengths).advantages
    assert torch.equal(same, group_advantages(REWARDS, IDS))
    shorter = {"response_mask": MASK, "max_length": 2}  # round(2/3) = 1 token: length 2 costs 1
    ours = compute_advantages(row, REWARDS, IDS, **shorter).advantages
    shaped = REWARDS + torch.tensor([-1.0, 0.0, -1.0, -1.0])
    assert torch.equal(ours, group_advantages(shaped, IDS))
    assert ours.tolist() == [0, 0, 0, 0]  # right and long is worth what wrong and short is
    as_list = compute_advantages(row, [1.0, 0.0, None, 1.0], IDS, **shorter).advantages
    assert torch.equal(as_list, ours)
    with_kl = replace(row, kl="reward", kl_estimator="k1", beta=0.03)
    both = compute_advantages(with_kl, REWARDS, IDS, **{**TENSORS, "max_length": 2}).advantages
    assert torch.equal(
        both, group_advantages(kl_penalized_rewards(shaped, OLD, REF, MASK, beta=0.03), IDS)
    )


def test_a_critic_by_hand() -> None:
    """PPO's row is GAE of the shaped rewards, whitened over the rows that have a reward."""
    ours = compute_advantages(PPO, REWARDS, IDS, **EVERYTHING)
    shaped = kl_shaped_rewards(REWARDS, OLD, REF, MASK, beta=0.02)
    gae = generalized_advantages(
        shaped, VALUES, MASK, lam=0.95, bootstrap_values=EVERYTHING["bootstrap_values"]
    )
    rated = (MASK == 1) & ~REWARDS.isnan()[:, None]
    assert torch.equal(ours.advantages, whiten(torch.where(rated, gae.advantages, 0.0), rated))
    assert ours.returns is not None
    assert torch.equal(ours.returns[rated], gae.returns[rated])
    assert not ours.advantages[~rated].any()
    assert not ours.returns[~rated].any()
    assert ours.advantages[rated].mean().abs() < 1e-15
    bare = compute_advantages(replace(PPO, whiten=False), REWARDS, IDS, **EVERYTHING)
    assert torch.equal(bare.advantages[rated], gae.advantages[rated])


def test_a_missing_reward_does_not_whiten_the_others() -> None:
    without = torch.tensor([0, 1, 3])
    some = {
        name: tensor[without] if isinstance(tensor, Tensor) else tensor
        for name, tensor in EVERYTHING.items()
    }
    ours = compute_advantages(PPO, REWARDS, IDS, **EVERYTHING)
    alone = compute_advantages(PPO, REWARDS[without], IDS[without], **some)
    torch.testing.assert_close(ours.advantages[without], alone.advantages, rtol=0, atol=1e-15)


def test_vapo_has_two_lambdas() -> None:
    row = replace(VAPO, length_alpha=0.75)
    ours = compute_advantages(row, REWARDS, IDS, response_mask=MASK, values=VALUES)
    score = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    lam = length_adaptive_lam([2, 1, 2, 2], alpha=0.75)
    assert 0 < lam[0] < 1
    assert lam[1] == 0
    rated = ~REWARDS.isnan()
    policy = generalized_advantages(score, VALUES, MASK, lam=lam).advantages
    critic = generalized_advantages(score, VALUES, MASK, lam=1.0).returns
    assert ours.returns is not None
    assert torch.equal(ours.advantages[rated], policy[rated])
    assert torch.equal(ours.returns[rated], critic[rated])
    one = compute_advantages(
        replace(row, length_alpha=None, lam_critic=None, lam=0.5, gamma=0.9),
        REWARDS,
        IDS,
        response_mask=MASK,
        values=VALUES,
    )
    both = generalized_advantages(score, VALUES, MASK, lam=0.5, gamma=0.9)
    assert one.returns is not None
    assert torch.equal(one.advantages[rated], both.advantages[rated])
    assert torch.equal(one.returns[rated], both.returns[rated])


def test_a_row_passes_on_all_that_it_says() -> None:
    """Every field away from its default arrives in the objectives, and so does every argument."""
    row = replace(
        GRPO,
        ddof=1,
        eps=0.5,
        ratio_level="sequence",
        epsilon_low=0.01,
        epsilon_high=0.02,
        ratio_max=1.05,
        aggregation="token_mean",
        kl_estimator="k2",
        kl_importance_weighted=True,
        beta=0.7,
        entropy_coef=0.3,
    )
    wanted = group_advantages(REWARDS, IDS, ddof=1, eps=0.5)
    assert torch.equal(compute_advantages(row, REWARDS, IDS).advantages, wanted)

    mask = MASK * torch.tensor([[1], [1], [0], [1]])  # the missing row is left out
    new = OLD + torch.tensor([[0.1, 0.3], [-0.2, 0.0], [0.0, 0.0], [0.4, -0.1]])
    shared: dict[str, Any] = {
        "ref_logprobs": REF, "entropies": -REF, "total": 11, "token_total": 12, "allow_empty": True
    }  # fmt: skip
    ours, stats = compute_loss(row, new, OLD, wanted, mask, constant=9, **shared)
    loss, expected = policy_loss(
        new,
        OLD,
        wanted,
        mask,
        ratio_level="sequence",
        epsilon_low=0.01,
        epsilon_high=0.02,
        ratio_max=1.05,
        aggregation="token_mean",
        beta=0.7,
        kl_estimator="k2",
        kl_importance_weighted=True,
        entropy_coef=0.3,
        **shared,
    )
    assert torch.equal(ours, loss)
    assert stats == expected
    for change in (
        {"kl": "none", "beta": 0.0},
        {"entropy_coef": 0.0},
        {"epsilon_low": 0.5},
        {"epsilon_high": 0.001},
        {"aggregation": "sequence_mean"},
    ):
        other, _ = compute_loss(replace(row, **change), new, OLD, wanted, mask, **shared)
        assert other != loss, change


@pytest.mark.parametrize(
    ("row", "change"),
    [
        (SAPO, {"tau_positive": 2.0}),
        (SAPO, {"tau_negative": 2.0}),
        (DCPO, {"epsilon_low": 0.01}),
        (DCPO, {"ratio_max": 1.05}),
        (DCPO, {"clip_range": "fixed", "ratio_max": None}),
        (replace(DAPO, ratio_max=2.0), {"ratio_max": None}),
        (CISPO, {"epsilon_high": 0.05}),
        (CISPO, {"surrogate": "clip"}),
        (VESPO, {"surrogate": "clip"}),
        (GSPO, {"ratio_level": "token"}),
    ],
    ids=lambda value: getattr(value, "name", None) or next(iter(value)),
)
def test_a_choice_changes_the_loss(row: Algorithm, change: dict[str, Any]) -> None:
    new = torch.where(MASK == 1, OLD, 0.0) + torch.tensor(
        [[0.3, 0.2], [-0.3, 0], [0, 0], [-0.4, 2]]
    )
    advantages = torch.tensor([1.0, -1.0, 0.0, -1.0])
    (ours, _), (other, _) = (
        compute_loss(one, new, OLD, advantages, MASK) for one in (row, replace(row, **change))
    )
    assert not torch.isclose(ours, other, rtol=1e-3)


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


class Batch:
    """Random tensors of a step, float64, with garbage in every padded slot."""

    def __init__(self, seed: int, garbage: float = NAN, moved: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        size, width = 12, 7
        lengths = torch.randint(1, width + 1, (size,), generator=generator)
        self.mask = torch.arange(width) < lengths[:, None]
        self.ids = torch.arange(size).remainder(3)
        self.rewards = torch.randint(0, 2, (size,), generator=generator).double()
        self.rewards[self.ids == 0] = torch.tensor([0, 1, 0, 1], dtype=torch.float64)
        self.several = torch.stack([self.rewards, normal(size)], dim=1)
        self.greedy = torch.randint(0, 2, (3,), generator=generator).double()[self.ids]
        self.correct = self.rewards == 1
        self.truncated = torch.arange(size) % 5 == 4

        def padded(values: Tensor) -> Tensor:
            return torch.where(self.mask, values, garbage)

        old = -normal(size, width).abs()
        self.old = padded(old)
        self.new = padded(old + moved * normal(size, width)).requires_grad_()
        self.ref = padded(old + 0.1 * normal(size, width))
        values = normal(size, width)
        self.values = padded(values).requires_grad_()
        self.old_values = padded(values + 0.3 * normal(size, width))
        self.entropies = padded(normal(size, width).abs()).requires_grad_()

    def advantages(self, row: Algorithm) -> algorithms.Estimates:
        return compute_advantages(
            row,
            self.several if row.reward == "several" else self.rewards,
            self.ids,
            old_logprobs=self.old,
            ref_logprobs=self.ref,
            response_mask=self.mask,
            max_length=7,
            greedy_rewards=self.greedy,
            values=self.values,
        )

    def loss(self, row: Algorithm, rows: Tensor | None = None, **totals: Any) -> tuple[Tensor, Any]:
        chosen = slice(None) if rows is None else rows
        estimates = self.advantages(row)
        returns = estimates.returns
        return compute_loss(
            row,
            self.new[chosen],
            self.old[chosen],
            estimates.advantages[chosen],
            self.mask[chosen],
            ref_logprobs=self.ref[chosen],
            constant=7,
            entropies=self.entropies[chosen],
            values=self.values[chosen],
            old_values=self.old_values[chosen],
            returns=None if returns is None else returns[chosen],
            correct=self.correct[chosen],
            truncated=self.truncated[chosen],
            **totals,
        )

    def gradients(self, loss: Tensor) -> list[Tensor]:
        leaves = [self.new, self.values, self.entropies]
        found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        return [
            torch.zeros_like(leaf) if one is None else one
            for leaf, one in zip(leaves, found, strict=True)
        ]


VARIANTS = [
    *ALL,
    replace(DAPO, name="dapo-filter", overlong="filter"),
    replace(GRPO, name="grpo-filter", overlong="filter"),
    replace(GRPO, name="grpo-entropy", entropy_coef=0.1),
    replace(DR_GRPO, name="dr-grpo-all", entropy_coef=0.1, nll_coef=0.1, overlong="filter"),
    replace(DCPO, name="dcpo-all", entropy_coef=0.1, nll_coef=0.1, overlong="filter"),
    replace(PPO, name="ppo-all", entropy_coef=0.1, nll_coef=0.1, overlong="filter"),
]


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("row", VARIANTS, ids=lambda row: row.name)
@pytest.mark.parametrize("seed", range(3))
def test_the_parts_of_a_step_add_up(row: Algorithm, seed: int) -> None:
    """Every term of every row: the sum over micro-batches is the step, in value and gradient."""
    batch = Batch(seed)
    whole, _ = batch.loss(row)
    totals = step_totals(row, batch.mask, correct=batch.correct, truncated=batch.truncated)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    parts = [batch.loss(row, rows, **totals)[0] for rows in order.split([1, 4, 2, 5])]
    summed = torch.stack(parts).sum()
    close(summed, whole)
    for ours, wanted in zip(batch.gradients(summed), batch.gradients(whole), strict=True):
        close(ours, wanted)
    assert batch.gradients(whole)[0].abs().sum() > 0


@pytest.mark.parametrize("row", VARIANTS, ids=lambda row: row.name)
@pytest.mark.parametrize("garbage", [NAN, math.inf, -1e300])
def test_padding_means_nothing(row: Algorithm, garbage: float) -> None:
    batch, clean = Batch(0, garbage), Batch(0, 0.0)
    (loss, stats), (wanted, expected) = batch.loss(row), clean.loss(row)
    assert torch.equal(loss, wanted)
    assert stats == expected
    for ours, theirs in zip(batch.gradients(loss), clean.gradients(wanted), strict=True):
        assert torch.equal(ours, theirs)
        assert not ours[~batch.mask].any()


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_where_the_policy_has_not_moved_all_rows_push_alike(row: Algorithm) -> None:
    """At ratio 1 the policy's term is A grad log pi, weighted by the row's aggregation, whatever
    its surrogate; what else a row adds is taken off here."""
    plain = replace(
        row, kl="none", beta=0.0, value_coef=0.0, epsilon_value=None, nll_coef=0.0, entropy_coef=0.0
    )
    batch = Batch(1, moved=0.0)
    advantages = batch.advantages(row).advantages
    loss, stats = (
        batch.loss(plain)
        if row.kl != "reward"
        else compute_loss(plain, batch.new, batch.old, advantages, batch.mask)
    )
    wide = advantages[:, None] if advantages.dim() == 1 else advantages
    gain = torch.where(batch.mask, wide * batch.new, 0.0)
    constant = 7 if row.aggregation == "constant" else None
    wanted = aggregate(-gain, batch.mask, how=row.aggregation, constant=constant)
    close(batch.gradients(loss)[0], batch.gradients(wanted)[0])
    assert stats["ratio_mean"] == 1
    assert stats["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("row", VARIANTS, ids=lambda row: row.name)
def test_the_order_of_a_batch_means_nothing(row: Algorithm) -> None:
    batch, other = Batch(2), Batch(2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for name, tensor in vars(other).items():
        shuffled = tensor.detach()[order]
        setattr(other, name, shuffled.requires_grad_(tensor.requires_grad))
    close(other.advantages(row).advantages, batch.advantages(row).advantages[order])
    (loss, _), (wanted, _) = other.loss(row), batch.loss(row)
    close(loss, wanted)
    for ours, theirs in zip(other.gradients(loss), batch.gradients(wanted), strict=True):
        close(ours, theirs[order])


def test_the_critics_term() -> None:
    """PPO's loss is the policy's plus 0.1 times the clipped value loss, in the tokens' mean."""
    batch = Batch(3)
    returns = batch.advantages(PPO).returns
    assert returns is not None
    loss, stats = batch.loss(PPO)
    bare, _ = batch.loss(replace(PPO, value_coef=0.0, epsilon_value=None))
    value, more = value_loss(
        batch.values, returns, batch.mask, old_values=batch.old_values, epsilon=0.2
    )
    close(loss, bare + 0.1 * value)
    assert {name: stats[name] for name in more} == more
    loose, _ = batch.loss(replace(PPO, epsilon_value=None))
    close(loose, bare + 0.1 * value_loss(batch.values, returns, batch.mask)[0])
    assert loose != loss


def test_the_likelihood_of_correct_responses() -> None:
    batch = Batch(3)
    loss, stats = batch.loss(VAPO)
    bare, _ = batch.loss(replace(VAPO, nll_coef=0.0))
    chosen = batch.mask & batch.correct[:, None]
    wanted, _ = sft_loss(batch.new, chosen, allow_empty=True)
    close(loss, bare + 0.1 * wanted)
    assert stats["nll_loss"] == wanted
    totals = {"total": 99, "token_total": 99, "correct_total": 99}
    assert batch.loss(VAPO, **totals)[1]["nll_loss"] == wanted, "of a part: its own mean"
    batch.correct = torch.zeros_like(batch.correct)
    nobody, stats = batch.loss(VAPO)
    close(nobody, bare)
    assert stats["nll_loss"] == 0


def test_filtered_responses_are_in_no_term() -> None:
    """Loss, gradient and counts are those of the batch without the truncated rows."""
    row = VARIANTS[-1]
    batch = Batch(4)
    kept = (~batch.truncated).nonzero()[:, 0]
    loss, _ = batch.loss(row)
    wanted, _ = batch.loss(replace(row, overlong="keep"), kept)
    close(loss, wanted)
    for ours, theirs in zip(batch.gradients(loss), batch.gradients(wanted), strict=True):
        close(ours, theirs)
        assert not ours[batch.truncated].any()
    batch.truncated = torch.ones_like(batch.truncated)
    nothing, _ = batch.loss(row)
    assert nothing == 0


@pytest.mark.parametrize("row", [PPO, replace(DAPO, entropy_coef=0.1)], ids=lambda row: row.name)
def test_the_tokens_of_the_step_divide_every_mean_over_tokens(row: Algorithm) -> None:
    """Where the policy's term is one too, `total` says how many they are."""
    batch = Batch(5)
    ours, _ = batch.loss(row, total=99)
    close(ours, batch.loss(row, total=99, token_total=99)[0])
    whole = int(batch.mask.sum())
    close(ours * 99, batch.loss(row)[0] * whole)


def test_a_sum_over_responses_needs_no_total() -> None:
    row = replace(DCPO, nll_coef=0.1, entropy_coef=0.1)
    batch = Batch(5)
    counts = step_totals(row, batch.mask, correct=batch.correct)
    wanted, _ = batch.loss(row, **counts)
    counts.pop("total")
    close(batch.loss(row, **counts)[0], wanted)


def test_group_ids_may_be_a_list_where_nobody_compares_groups() -> None:
    for row in (REINFORCE, SCST, VAPO):
        given = compute_advantages(row, REWARDS, IDS, **EVERYTHING).advantages
        listed = compute_advantages(row, REWARDS, IDS.tolist(), **EVERYTHING).advantages
        assert torch.equal(given, listed)


def test_totals_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    flags = {
        "known": torch.tensor([True, True, False, True]),
        "correct": torch.tensor([True, False, True, False]),
        "truncated": torch.tensor([False, True, False, False]),
    }
    assert step_totals(GRPO, mask) == {"total": 3, "token_total": 6, "correct_total": 6}
    assert step_totals(DAPO, mask)["total"] == 6
    assert step_totals(GRPO, mask, **flags) == {"total": 2, "token_total": 4, "correct_total": 3}
    filtering = replace(DAPO, overlong="filter")
    ours = step_totals(filtering, mask, **flags)
    assert ours == {"total": 3, "token_total": 3, "correct_total": 3}
    nobody = {name: torch.zeros(4, dtype=torch.bool) for name in ("known", "correct")}
    assert set(step_totals(GRPO, mask, **nobody).values()) == {1}
