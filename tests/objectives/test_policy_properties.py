"""What must hold for every loss, tried on responses that hypothesis invents.

COMBINATIONS are all answers to question 3 that go together; most tests take each of them with each
way to average.
"""

import itertools
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.objectives import (
    AGGREGATIONS,
    CLIP_RANGES,
    KL_ESTIMATORS,
    RATIO_LEVELS,
    SURROGATES,
    aggregate,
    dynamic_clip_range,
    entropy,
    importance_ratio,
    kl_penalized_rewards,
    kl_per_token,
    policy_loss,
    sft_loss,
    surrogates,
    token_logprobs,
)

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("rlcore")

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
COMBINATIONS = [
    {"surrogate": surrogate, "ratio_level": level, "clip_range": clip_range}
    for surrogate, level, clip_range in itertools.product(SURROGATES, RATIO_LEVELS, CLIP_RANGES)
    if (surrogate != "gamma" or level == "sequence_sum")
    and (clip_range == "fixed" or (level == "token" and surrogate in surrogates.USE_RANGE))
]
every_combination = pytest.mark.parametrize(
    "choices", COMBINATIONS, ids=["-".join(choices.values()) for choices in COMBINATIONS]
)
every_aggregation = pytest.mark.parametrize("how", AGGREGATIONS)


@st.composite
def responses(draw: st.DrawFn) -> dict[str, Tensor]:
    """Log-probs of three policies, advantages, entropies and a mask with a token in every row:
    padded right, padded left, or with holes."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (len(lengths), draw(st.integers(max(lengths), 6)))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    new, slot = -normal(*shape).abs(), torch.arange(shape[1])
    mask = slot < torch.tensor(lengths)[:, None]
    place = draw(st.sampled_from(["right", "left", "holes"]))
    if place == "left":
        mask = mask.flip(1)
    if place == "holes":
        mask = mask[:, torch.randperm(shape[1], generator=generator)]
    return {
        "new": new,
        "old": new + 0.3 * normal(*shape),
        "ref": new + 0.3 * normal(*shape),
        "advantages": normal(shape[0]),
        "token_advantages": normal(*shape),
        "entropies": normal(*shape).abs(),
        "mask": mask,
    }


def close(ours: Tensor, wanted: Any, atol: float = 1e-9, rtol: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), atol=atol, rtol=rtol)


def loss_and_gradient(loss: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def arguments(how: str) -> dict[str, Any]:
    return {"aggregation": how, "constant": 7.0 if how == "constant" else None}


def with_all_terms(batch: dict[str, Tensor], rows: Any = slice(None)) -> dict[str, Any]:
    return {
        "ref_logprobs": batch["ref"][rows],
        "beta": 0.1,
        "entropies": batch["entropies"][rows],
        "entropy_coef": 0.2,
    }


# --- the first step -------------------------------------------------------------------------------


@every_combination
@given(batch=responses())
@settings(max_examples=8)
def test_at_the_first_step_nothing_is_clipped(choices: dict, batch: dict) -> None:
    """All ratios are exactly 1, in every dtype; so is the weight of "gamma"."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        new = batch["new"].to(dtype)
        ratio = importance_ratio(new, new, batch["mask"], level=choices["ratio_level"])
        assert (ratio == 1).all()
        _, stats = policy_loss(new, new, batch["advantages"], batch["mask"], **choices)
        assert stats["ratio_mean"] == 1
        for name, value in stats.items():
            assert value == (name in ("ratio_mean", "vespo/phi_seq_mean")), name


@every_aggregation
@every_combination
@given(batch=responses())
@settings(max_examples=6)
def test_at_the_first_step_every_surrogate_is_reinforce(
    how: str, choices: dict, batch: dict
) -> None:
    """Not in value, but in gradient.  The un-rooted ratio of a whole response repeats its gradient
    at each of its tokens, so it is |y| times as long there, unless only log pi carries it."""
    new, mask = batch["new"].requires_grad_(), batch["mask"]
    advantages, size = batch["advantages"], torch.ones(len(mask), dtype=torch.float64)
    if choices["ratio_level"] == "sequence_sum" and choices["surrogate"] in surrogates.USE_RATIO:
        size = mask.sum(1).double()
    loss, _ = policy_loss(new, new, advantages, mask, **choices, **arguments(how))
    plain, _ = policy_loss(
        new, new, advantages * size, mask, surrogate="reinforce", **arguments(how)
    )
    close(loss_and_gradient(loss, new)[1], loss_and_gradient(plain, new)[1])
    if choices["surrogate"] == "clip" and how == "sequence_mean":
        close(loss, -advantages.mean())


# --- what is not there ----------------------------------------------------------------------------


@every_aggregation
@every_combination
@given(batch=responses(), garbage=st.sampled_from(GARBAGE), data=st.data())
@settings(max_examples=6)
def test_padding_may_hold_anything(
    how: str, choices: dict, batch: dict, garbage: float, data: st.DataObject
) -> None:
    """In value, in both gradients, in every statistic, for every argument that has slots."""
    mask = batch["mask"]
    each_token = data.draw(st.booleans(), label="advantages per token")
    extra: dict[str, Any] = {
        "beta": 0.1,
        "kl_estimator": data.draw(st.sampled_from(KL_ESTIMATORS)),
        "kl_importance_weighted": data.draw(st.booleans()),
        "entropy_coef": 0.2,
        **choices,
        **arguments(how),
    }
    if choices["surrogate"] == "clip":
        extra["ratio_max"] = data.draw(st.sampled_from([None, 1.3]))
    results = []
    for fill in (0.0, garbage):
        new, old, ref, entropies, advantages = (
            batch[key].masked_fill(~mask, fill).requires_grad_()
            for key in ("new", "old", "ref", "entropies", "token_advantages")
        )
        loss, stats = policy_loss(
            new,
            old,
            advantages if each_token else batch["advantages"],
            mask,
            ref_logprobs=ref,
            entropies=entropies,
            **extra,
        )
        gradients = torch.autograd.grad(loss, [new, entropies])
        for gradient in gradients:
            assert (gradient[~mask] == 0).all()
            assert gradient.isfinite().all()
        results.append([loss.detach(), *gradients, *stats.values()])
    for plain, filled in zip(*results, strict=True):
        assert torch.equal(plain, filled)


@given(batch=responses(), garbage=st.sampled_from(GARBAGE))
def test_padding_of_the_smaller_functions(batch: dict, garbage: float) -> None:
    mask = batch["mask"]
    new, old = (batch[key].masked_fill(~mask, garbage).requires_grad_() for key in ("new", "old"))
    clean_new, clean_old = batch["new"].requires_grad_(), batch["old"]
    rewards = batch["advantages"]
    pairs = [
        (sft_loss(new, mask)[0], sft_loss(clean_new, mask)[0]),
        *(
            (
                kl_per_token(new, old, mask, estimator=name),
                kl_per_token(clean_new, clean_old, mask, estimator=name),
            )
            for name in KL_ESTIMATORS
        ),
        *(
            (
                importance_ratio(new, old, mask, level=level),
                importance_ratio(clean_new, clean_old, mask, level=level),
            )
            for level in RATIO_LEVELS
        ),
        *(
            (
                aggregate(new, mask, how=how, constant=arguments(how)["constant"]),
                aggregate(clean_new, mask, how=how, constant=arguments(how)["constant"]),
            )
            for how in AGGREGATIONS
        ),
    ]
    for ours, wanted in pairs:
        assert torch.equal(ours, wanted)
        (one,) = torch.autograd.grad(ours.sum(), new)
        (two,) = torch.autograd.grad(wanted.sum(), clean_new)
        assert torch.equal(one, two.masked_fill(~mask, 0))
    for ours, wanted in zip(
        dynamic_clip_range(old, mask), dynamic_clip_range(clean_old, mask), strict=True
    ):
        assert torch.equal(ours[mask], wanted[mask])
        assert not ours.requires_grad
        assert ours.isfinite().all()
    shaped = kl_penalized_rewards(rewards, new, old, mask, beta=0.1)
    assert torch.equal(shaped, kl_penalized_rewards(rewards, clean_new, clean_old, mask, beta=0.1))
    assert not shaped.requires_grad


@every_aggregation
@every_combination
@given(batch=responses(), data=st.data())
@settings(max_examples=6)
def test_rows_left_out_are_as_if_they_were_not_there(
    how: str, choices: dict, batch: dict, data: st.DataObject
) -> None:
    mask, rows = batch["mask"], len(batch["new"])
    left_out = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    new = batch["new"].masked_fill(left_out[:, None], math.nan).requires_grad_()
    advantages = batch["advantages"].masked_fill(left_out, math.nan)
    kept = mask & ~left_out[:, None]
    extra = {**choices, **arguments(how)}
    loss, stats = policy_loss(
        new, batch["old"], advantages, kept, allow_empty=True, **extra, **with_all_terms(batch)
    )
    ours = loss_and_gradient(loss, new)
    assert (ours[1][left_out] == 0).all()
    if left_out.all():
        assert ours[0] == 0
        assert all(value == 0 for value in stats.values())
        return
    rest = ~left_out
    small = batch["new"][rest].requires_grad_()
    alone, stats_alone = policy_loss(
        small,
        batch["old"][rest],
        advantages[rest],
        mask[rest],
        **extra,
        **with_all_terms(batch, rest),
    )
    wanted = loss_and_gradient(alone, small)
    close(ours[0], wanted[0])
    close(ours[1][rest], wanted[1])
    assert stats.keys() == stats_alone.keys()
    for key, value in stats_alone.items():
        close(stats[key], value, atol=1e-7)


# --- the batch ------------------------------------------------------------------------------------


@every_aggregation
@every_combination
@given(batch=responses(), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=6)
def test_the_order_of_the_rows_means_nothing(
    how: str, choices: dict, batch: dict, shuffle: Any
) -> None:
    order = list(range(len(batch["new"])))
    shuffle.shuffle(order)
    new = batch["new"].requires_grad_()
    results = [
        policy_loss(
            new[rows],
            batch["old"][rows],
            batch["advantages"][rows],
            batch["mask"][rows],
            **choices,
            **arguments(how),
            **with_all_terms(batch, rows),
        )
        for rows in (slice(None), order)
    ]
    one, two = (loss_and_gradient(loss, new) for loss, _ in results)
    close(one[0], two[0])
    close(one[1], two[1])
    for key, value in results[0][1].items():
        close(value, results[1][1][key], atol=1e-7)


@every_aggregation
@every_combination
@given(batch=responses(), data=st.data())
@settings(max_examples=6)
def test_the_parts_of_a_step_add_up_to_the_whole(
    how: str, choices: dict, batch: dict, data: st.DataObject
) -> None:
    """Loss and both gradients, KL and entropy terms included, wherever the batch is cut; for
    how="token_mean" total counts tokens, else responses."""
    mask, rows = batch["mask"], len(batch["new"])
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=3))) if rows > 1 else []
    )
    leaves = batch["new"].requires_grad_(), batch["entropies"].requires_grad_()

    def loss(part: slice, total: Any, token_total: Any) -> Tensor:
        return policy_loss(
            batch["new"][part],
            batch["old"][part],
            batch["advantages"][part],
            mask[part],
            total=total,
            token_total=token_total,
            **choices,
            **arguments(how),
            **with_all_terms(batch, part),
        )[0]

    tokens = int(mask.sum())
    total = tokens if how == "token_mean" else rows
    for_tokens = None if how == "token_mean" else tokens  # there total says it
    whole = loss(slice(None), None, None)
    parts = [loss(slice(*edge), total, for_tokens) for edge in pairwise([0, *cuts, rows])]
    summed = torch.stack(parts).sum()
    close(summed, whole)
    for leaf in leaves:
        close(loss_and_gradient(summed, leaf)[1], loss_and_gradient(whole, leaf)[1])
    close(loss(slice(None), torch.tensor(total), torch.tensor(tokens)), whole)


@every_aggregation
@given(batch=responses())
def test_the_weights_of_the_tokens(how: str, batch: dict) -> None:
    """What aggregate's docstring says, token by token."""
    mask = batch["mask"]
    values = batch["new"].requires_grad_()
    constant = 7.0 if how == "constant" else None
    (weights,) = torch.autograd.grad(aggregate(values, mask, how=how, constant=constant), values)
    rows, lengths = len(mask), mask.sum(1, keepdim=True).double()
    one = torch.tensor(1.0, dtype=torch.float64)
    wanted = {
        "sequence_mean": 1 / (rows * lengths),
        "token_mean": 1 / lengths.sum(),
        "constant": one / (rows * 7.0),
        "sequence_sum": one / rows,
        "only_token_mean": 1 / lengths,
    }[how]
    close(weights, wanted.expand(mask.shape) * mask)


def test_a_sum_has_no_divisor() -> None:
    """DCPO's eq. 8 takes no total, and none changes it; it must be a possible one all the same."""
    values, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    assert aggregate(values, mask, how="only_token_mean") == 7
    assert aggregate(values, mask, how="only_token_mean", total=10) == 7
    assert aggregate(values, mask, how="sequence_mean") == 3.5


# --- the KL term ----------------------------------------------------------------------------------


@given(batch=responses())
def test_k3_and_k2_are_never_negative(batch: dict) -> None:
    for name in ("k2", "k3"):
        values = kl_per_token(batch["new"], batch["ref"], batch["mask"], estimator=name)
        assert (values >= 0).all()
        same = kl_per_token(batch["new"], batch["new"], batch["mask"], estimator=name)
        assert (same == 0).all()


@pytest.mark.parametrize("gap", [-1e-4, 1e-4])
def test_k3_of_two_policies_that_nearly_agree(gap: float) -> None:
    """d^2/2 to first order: exp(-d) - 1 + d in float32 would lose it to rounding."""
    new, mask = torch.tensor([[-2.0]]), torch.ones(1, 1)
    ref = new - gap
    difference = (new - ref).double().item()
    exact = math.expm1(-difference) + difference
    ours = kl_per_token(new, ref, mask, estimator="k3").item()
    assert ours == pytest.approx(exact, abs=2e-11)


@every_aggregation
@every_combination
@given(batch=responses(), name=st.sampled_from(KL_ESTIMATORS), weighted=st.booleans())
@settings(max_examples=6)
def test_the_kl_term_is_averaged_as_the_gain_is(
    how: str, choices: dict, batch: dict, name: str, weighted: bool
) -> None:
    """beta times the aggregate of what kl_per_token gives, times the ratio if asked for."""
    new, old, mask = batch["new"].requires_grad_(), batch["old"], batch["mask"]
    term = kl_per_token(new, batch["ref"], mask, estimator=name)
    if weighted:
        term = term * importance_ratio(new, old, mask, level=choices["ratio_level"])
    wanted = 0.3 * aggregate(term, mask, how=how, constant=arguments(how)["constant"])
    losses = [
        policy_loss(
            new,
            old,
            batch["advantages"],
            mask,
            ref_logprobs=batch["ref"],
            beta=beta,
            kl_estimator=name,
            kl_importance_weighted=weighted and beta > 0,
            **choices,
            **arguments(how),
        )
        for beta in (0.3, 0.0)
    ]
    ours = losses[0][0] - losses[1][0]
    close(ours, wanted)
    close(loss_and_gradient(ours, new)[1], loss_and_gradient(wanted, new)[1])
    plain = aggregate(kl_per_token(new, batch["ref"], mask, estimator=name), mask, how="token_mean")
    for _, stats in losses:
        close(stats["kl"], plain)
        close(stats[f"kl/{name}"], plain)


# --- the entropy term -----------------------------------------------------------------------------


@every_aggregation
@given(batch=responses())
def test_the_entropy_is_a_mean_over_tokens_whatever_the_aggregation(how: str, batch: dict) -> None:
    entropies, mask = batch["entropies"].requires_grad_(), batch["mask"]
    given_ = (batch["new"], batch["old"], batch["advantages"], mask)
    plain, _ = policy_loss(*given_, **arguments(how))
    measured, stats = policy_loss(*given_, entropies=entropies, **arguments(how))
    close(measured, plain)
    assert not measured.requires_grad
    mean = entropies.detach()[mask].mean()
    close(stats["entropy"], mean)
    loss, stats = policy_loss(*given_, entropies=entropies, entropy_coef=0.25, **arguments(how))
    close(loss, plain - 0.25 * mean)
    close(stats["entropy"], mean)
    close(loss_and_gradient(loss, entropies)[1], -0.25 * mask.double() / mask.sum())
    half, stats = policy_loss(
        *given_,
        entropies=entropies,
        entropy_coef=0.25,
        token_total=2 * mask.sum(),
        **arguments(how),
    )
    close(half, plain - 0.125 * mean)  # of a step of twice as many tokens
    close(stats["entropy"], mean)  # of the part that is here


# --- the clip -------------------------------------------------------------------------------------


def textbook_clip(
    ratio: Tensor, advantages: Tensor, low: Any, high: Any, ratio_max: float | None
) -> Tensor:
    """As papers and TRL write it: the smaller of two products."""
    free = ratio if ratio_max is None else ratio.clamp(max=ratio_max)
    return torch.minimum(free * advantages, ratio.clamp(low, high) * advantages)


@pytest.mark.parametrize("ratio_max", [None, 1.3, 3.0])
@given(batch=responses(), per_token=st.booleans(), dynamic=st.booleans())
def test_the_clip_is_the_smaller_of_two_products(
    ratio_max: float | None, batch: dict, per_token: bool, dynamic: bool
) -> None:
    """Value and gradient, with the range of every token or of all, with and without a cap."""
    log_ratio = (4 * (batch["new"] - batch["old"])).requires_grad_()
    advantages = batch["token_advantages"] if per_token else batch["advantages"][:, None]
    ends: tuple[Any, Any] = (0.8, 1.25)
    if dynamic:
        cap = 10.0 if ratio_max is None else ratio_max
        ends = dynamic_clip_range(batch["old"], batch["mask"], ratio_max=cap)
    results = [
        loss_and_gradient(function(log_ratio.exp(), advantages, *ends, ratio_max).sum(), log_ratio)
        for function in (surrogates.clip, textbook_clip)
    ]
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "learns"),
    [
        (1.3, 1.0, 0, 1, False),
        (1.3, -1.0, 0, 0, True),
        (0.7, -1.0, 1, 0, False),
        (0.7, 1.0, 0, 0, True),
        (1.1, 1.0, 0, 0, True),
        (1.3, 0.0, 0, 0, False),
        (0.7, 0.0, 0, 0, False),
    ],
)
def test_the_clip_and_its_statistics(
    ratio: float, advantage: float, low: int, high: int, learns: bool
) -> None:
    """A token is counted as clipped where, and only where, the clip takes its gradient away."""
    new = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    loss, stats = policy_loss(new, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1))
    limited = min(max(ratio, 0.8), 1.2)
    assert loss.item() == pytest.approx(-min(ratio * advantage, limited * advantage), abs=1e-12)
    assert bool(torch.autograd.grad(loss, new)[0] != 0) == learns
    assert stats["clip_ratio/low_mean"] == low
    assert stats["clip_ratio/high_mean"] == high
    assert stats["clip_ratio/region_mean"] == low + high
    assert "clip_ratio/max_mean" not in stats
    assert stats["ratio_mean"].item() == pytest.approx(ratio)
    for value in stats.values():
        assert value.shape == ()
        assert not value.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "learns", "beyond"),
    [
        (2.9, -2.0, 5.8, True, 0),
        (3.1, -2.0, 6.0, False, 1),
        (3.1, 2.0, -2.4, False, 0),  # the range acts here, not the cap
        (0.5, -2.0, 1.6, False, 0),
        (3.1, 0.0, 0.0, False, 0),
    ],
)
def test_the_cap_on_the_ratio(
    ratio: float, advantage: float, loss: float, learns: bool, beyond: int
) -> None:
    new = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    ours, stats = policy_loss(
        new, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), ratio_max=3.0
    )
    assert ours.item() == pytest.approx(loss, abs=1e-12)
    assert bool(torch.autograd.grad(ours, new)[0] != 0) == learns
    assert stats["clip_ratio/max_mean"] == beyond
    assert stats["clip_ratio/high_mean"] == (ratio > 1.2 and advantage > 0)


def test_the_statistics_of_a_ratio_per_response() -> None:
    """One response of one token is clipped, one of three is not: a share of 1/2, not of 1/4."""
    ratio = torch.tensor([[1.5, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    mask, advantages = torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.tensor([1.0, 1.0])
    new = torch.where(mask == 1, ratio, 1.0).log()
    for level in ("sequence", "sequence_token", "sequence_sum"):
        _, stats = policy_loss(new, torch.zeros(2, 3), advantages, mask, ratio_level=level)
        assert stats["clip_ratio/high_mean"].item() == pytest.approx(0.5, abs=1e-7)
        assert stats["ratio_mean"].item() == pytest.approx(1.25, abs=1e-15)
    _, stats = policy_loss(new, torch.zeros(2, 3), advantages, mask)
    assert stats["clip_ratio/high_mean"].item() == pytest.approx(0.25, abs=1e-7)
    assert stats["ratio_mean"].item() == pytest.approx(4.5 / 4, abs=1e-15)
    _, stats = policy_loss(
        new, torch.zeros(2, 3), advantages, mask, surrogate="gamma", ratio_level="sequence_sum"
    )
    phi = 1.5**2 * math.exp(3 * (1 - 1.5))
    assert stats["vespo/phi_seq_mean"].item() == pytest.approx((phi + 1) / 2, abs=1e-12)


@pytest.mark.parametrize("surrogate", [name for name in SURROGATES if name != "clip"])
def test_the_others_clip_nothing(surrogate: str) -> None:
    new, old = torch.tensor([[1.0], [-1.0]]), torch.zeros(2, 1)
    advantages, level = torch.tensor([[1.0], [-1.0]]), "sequence_sum"  # one token: all levels alike
    _, clipped = policy_loss(new, old, advantages, torch.ones(2, 1), ratio_level=level)
    assert clipped["clip_ratio/region_mean"] == 1
    _, stats = policy_loss(
        new, old, advantages, torch.ones(2, 1), ratio_level=level, surrogate=surrogate
    )
    for name in ("low_mean", "high_mean", "region_mean"):
        assert stats[f"clip_ratio/{name}"] == 0
    assert stats["ratio_mean"].item() == pytest.approx(math.cosh(1), rel=1e-6)


def test_the_share_of_weights_that_were_cut() -> None:
    """TRL's: where A > 0 only, though the cap holds for both signs."""
    ratio = torch.tensor([[1.5, 1.1, 1.5, 0.1]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, stats = policy_loss(
        ratio.log(),
        torch.zeros(1, 4),
        advantages,
        torch.ones(1, 4),
        surrogate="capped",
        epsilon_low=0.8,
        epsilon_high=0.2,
    )
    assert stats["cispo_clip_ratio"] == 0.25
    weights = torch.tensor([1.2, 1.1, 1.2, 0.2])
    close(loss, -(weights * advantages[0] * ratio[0].log()).mean(), atol=1e-6)


@given(ratio=st.floats(0.01, 20), advantage=st.floats(-3, 3))
def test_the_weights_of_the_soft_and_of_the_gamma_gate(ratio: float, advantage: float) -> None:
    """Against the formulas, written for one number."""
    rho = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[advantage]], dtype=torch.float64)
    tau = 0.7 if advantage > 0 else 1.9
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    value, slope = loss_and_gradient(surrogates.soft(rho, a, 0.7, 1.9).sum(), rho)
    close(value, 4 / tau * gate * advantage)
    close(slope[0, 0], 4 * gate * (1 - gate) * advantage)
    power, rate = (2, 3) if advantage >= 0 else (3, 2)
    phi = math.exp(power * math.log(ratio) + rate * (1 - ratio))
    close(surrogates.gamma_weight(rho, a)[0, 0], phi)
    assert not surrogates.gamma(rho, a, a).requires_grad


def test_the_gates_of_soft_and_gamma_at_one() -> None:
    """f'(1) = 1 and phi(1) = 1 for both signs, so that the first step is the policy gradient; and
    what the defaults are."""
    one = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    (slope,) = torch.autograd.grad(surrogates.soft(one, signs).sum(), one)
    close(slope, signs)
    close(surrogates.soft(one, signs).detach(), [[2.0], [-2 / 1.05]])
    assert surrogates.gamma_weight(one, signs).tolist() == [[1.0], [1.0]]


# --- the dynamic range ----------------------------------------------------------------------------


@given(
    log_q=st.floats(-12, 0),
    epsilon_low=st.floats(0, 0.25),
    epsilon_high=st.floats(0, 1),
    ratio_max=st.floats(1, 50),
)
def test_the_dynamic_range_limits_the_change_of_the_probability(
    log_q: float, epsilon_low: float, epsilon_high: float, ratio_max: float
) -> None:
    """At each end |(rho - 1) rho q| is epsilon, or the end is 1/2 (nowhere can it be so much) or
    r_max; inside it is less."""
    q = math.exp(log_q)
    low, high = (
        end.item()
        for end in dynamic_clip_range(
            torch.tensor([[log_q]], dtype=torch.float64),
            torch.ones(1, 1),
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            ratio_max=ratio_max,
        )
    )

    def moved(rho: float) -> float:
        return abs((rho - 1) * rho * q)

    assert 0.5 <= low <= 1 <= high <= ratio_max
    if low > 0.5:
        assert moved(low) == pytest.approx(epsilon_low, abs=1e-12)
    else:
        assert q / 4 <= epsilon_low + 1e-12  # the most that (1 - rho) rho q can be
    if high < ratio_max:
        assert moved(high) == pytest.approx(epsilon_high, abs=1e-12)
    else:
        assert moved(ratio_max) <= epsilon_high + 1e-9


@pytest.mark.parametrize(("given", "cap"), [(None, 10.0), (5.0, 5.0), (20.0, 20.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_cap_of_the_dynamic_range_holds_for_both_signs(
    given: float | None, cap: float, sign: float
) -> None:
    """A token of probability 1e-4, whose range without a cap would end at 45."""
    old = torch.tensor([[math.log(1e-4)]], dtype=torch.float64)
    for ratio, wanted in ((4.0, 4.0), (21.0, cap)):
        new = (old + math.log(ratio)).requires_grad_()
        loss, stats = policy_loss(
            new,
            old,
            torch.tensor([sign]),
            torch.ones(1, 1),
            clip_range="dynamic",
            epsilon_low=0.16,
            ratio_max=given,
        )
        assert loss.item() == pytest.approx(-sign * wanted, abs=1e-9)
        assert bool(torch.autograd.grad(loss, new)[0] != 0) == (ratio < cap)
        assert stats["clip_ratio/high_mean"] == (sign > 0 and ratio > cap)
        assert stats["clip_ratio/max_mean"] == (sign < 0 and ratio > cap)


def test_where_the_dynamic_range_meets_the_fixed_one() -> None:
    """Exactly, with eps_low = eps (1 - eps) and eps_high = eps; the defaults are those of 0.2."""
    for eps in (0.2, 0.1, 0.4):
        old = torch.tensor([[0.0, -math.log1p(eps)]], dtype=torch.float64)
        low, high = dynamic_clip_range(
            old, torch.ones(1, 2), epsilon_low=eps * (1 - eps), epsilon_high=eps
        )
        assert low[0, 0].item() == pytest.approx(max(1 - eps, 0.5), abs=1e-14)
        assert high[0, 1].item() == pytest.approx(1 + eps, abs=1e-14)
        if eps == 0.2:
            for ours, wanted in zip(
                dynamic_clip_range(old, torch.ones(1, 2)), (low, high), strict=True
            ):
                close(ours, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dynamic_range_of_a_token_that_was_all_but_impossible(dtype: torch.dtype) -> None:
    old = torch.tensor([[-60.0, -1000.0, -60000.0]], dtype=dtype)
    for eps in (0.0, 0.2, 1.0):
        low, high = dynamic_clip_range(old, torch.ones(1, 3), epsilon_low=eps, epsilon_high=eps)
        assert low.dtype == high.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert low.tolist() == [[0.5 if eps else 1.0] * 3]
        assert high.tolist() == [[10.0 if eps else 1.0] * 3]


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_the_log_ratio_is_limited_and_nothing_else_is(level: str, sign: int) -> None:
    zero, mask = torch.zeros(2, 1), torch.ones(2, 1)
    new = sign * torch.tensor([[300.0], [21.0]])
    new.requires_grad_()
    ratio = importance_ratio(new, zero, mask, level=level)
    close(ratio[:, 0], [math.exp(sign * 20)] * 2, atol=0, rtol=1e-6)
    assert (torch.autograd.grad(ratio.sum(), new)[0] == 0).all()
    tight = importance_ratio(new, zero, mask, level=level, max_log_ratio=2.0)
    close(tight[:, 0], [math.exp(sign * 2)] * 2, atol=0, rtol=1e-6)
    inside = sign * torch.tensor([[19.9], [0.5]])
    inside.requires_grad_()
    ratio = importance_ratio(inside, zero, mask, level=level)
    close(ratio, inside.exp(), atol=0, rtol=1e-6)
    close(torch.autograd.grad(ratio.sum(), inside)[0], inside.exp(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_kl_of_policies_that_are_far_apart_stays_finite(name: str) -> None:
    new = torch.tensor([[300.0, -300.0]], requires_grad=True)
    values = kl_per_token(new, torch.zeros(1, 2), torch.ones(1, 2), estimator=name)
    assert values.isfinite().all()
    assert torch.autograd.grad(values.sum(), new)[0].isfinite().all()
    if name == "k3":
        inside = torch.tensor([[-19.5]])
        ours = kl_per_token(inside, torch.zeros(1, 1), torch.ones(1, 1), estimator=name)
        assert ours.item() == pytest.approx(math.exp(19.5) - 1 - 19.5, rel=1e-6)


@every_aggregation
@every_combination
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(how: str, choices: dict, dtype: torch.dtype) -> None:
    """Advantage 0 too, where inf * 0 would be NaN; loss, statistics and gradient."""
    new = torch.tensor([[300.0, -300.0], [-300.0, 300.0], [300.0, 300.0], [-1e4, -1e4]])
    new = new.to(dtype).requires_grad_()
    old, mask = torch.zeros(4, 2, dtype=dtype), torch.ones(4, 2)
    for advantages in ([0.0] * 4, [1.0, -1.0, 0.0, 1.0], [-1.0] * 4, [1e3] * 4):
        for weighted in (False, True):
            loss, stats = policy_loss(
                new,
                old,
                torch.tensor(advantages),
                mask,
                ref_logprobs=old,
                beta=0.1,
                kl_importance_weighted=weighted,
                **choices,
                **arguments(how),
            )
            assert loss.isfinite()
            assert all(value.isfinite() for value in stats.values())
            assert torch.autograd.grad(loss, new)[0].isfinite().all()


# --- shapes, dtypes, gradients --------------------------------------------------------------------


def test_what_padded_slots_hold() -> None:
    new, old = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-2.0, -1.5, -1.0]])
    mask = torch.tensor([[1, 1, 0]])
    for level in RATIO_LEVELS:
        ratio = importance_ratio(new, old, mask, level=level)
        assert ratio[0, 2] == 1
        assert (ratio[0, :2] != 1).all()
    for name in KL_ESTIMATORS:
        assert kl_per_token(new, old, mask, estimator=name)[0, 2] == 0
    low, high = dynamic_clip_range(old, mask)
    close(low[0, 2], 0.8, atol=1e-6)
    close(high[0, 2], 0.5 + math.sqrt(1.8) / 2, atol=1e-6)


@every_combination
def test_one_advantage_for_all_tokens_or_one_for_each(choices: dict) -> None:
    """(B,) is the (B, T) that repeats it, also where T is 1 or B."""
    for shape in ((3, 1), (1, 3), (3, 3)):
        generator = torch.Generator().manual_seed(sum(shape))
        new, old = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        advantages = torch.randn(shape[0], generator=generator, dtype=torch.float64)
        mask, wide = torch.ones(shape), advantages[:, None].expand(shape)
        results = [policy_loss(new, old, given_, mask, **choices) for given_ in (advantages, wide)]
        close(results[0][0], results[1][0])
        assert results[0][1].keys() == results[1][1].keys()
        for key, value in results[0][1].items():
            close(value, results[1][1][key], atol=1e-7)


@every_combination
def test_the_gradient_flows_through_the_policy_only(choices: dict) -> None:
    """Not through pi_old, pi_ref or A, also when they come from a graph."""
    new, old, ref = (torch.full((2, 2), -value, requires_grad=True) for value in (1.0, 1.1, 1.2))
    entropies = torch.ones(2, 2, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -1.0], requires_grad=True), torch.ones(2, 2)
    for weighted in (False, True):
        loss, stats = policy_loss(
            new,
            old,
            advantages,
            mask,
            ref_logprobs=ref,
            beta=0.1,
            kl_importance_weighted=weighted,
            entropies=entropies,
            entropy_coef=0.1,
            **choices,
        )
        loss.backward()
        assert new.grad is not None
        assert entropies.grad is not None
        assert old.grad is ref.grad is advantages.grad is None
        assert not any(value.requires_grad for value in stats.values())
    for name in KL_ESTIMATORS:
        kl_per_token(new, ref, mask, estimator=name).sum().backward()
    importance_ratio(new, old, mask, level=choices["ratio_level"]).sum().backward()
    assert old.grad is ref.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_losses(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.tensor([[-1.0, -0.5], [-2.0, -0.25]], dtype=dtype)
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for choices in COMBINATIONS:
        loss, stats = policy_loss(
            values,
            values,
            advantages,
            mask,
            ref_logprobs=values,
            beta=0.1,
            entropies=-values,
            entropy_coef=0.1,
            **choices,
        )
        assert loss.dtype == wide
        assert all(value.dtype in (torch.float32, wide) for value in stats.values())
    assert sft_loss(values, mask)[0].dtype == wide
    assert aggregate(values, mask).dtype == wide
    for level in RATIO_LEVELS:
        assert importance_ratio(values, values, mask, level=level).dtype == wide
    assert kl_per_token(values, values, mask).dtype == wide
    logits = torch.zeros(1, 3, 4, dtype=dtype)
    assert token_logprobs(logits, torch.zeros(1, 3, dtype=torch.int64)).dtype == wide
    assert entropy(logits).dtype == wide


@every_combination
@given(batch=responses())
@settings(max_examples=6)
def test_half_precision_inputs_are_computed_in_float32(choices: dict, batch: dict) -> None:
    """The loss of bfloat16 log-probs is that of the same numbers in float32, bit for bit."""
    new, old = batch["new"].bfloat16(), batch["old"].bfloat16()
    advantages, mask = batch["advantages"].bfloat16(), batch["mask"]
    half, stats_half = policy_loss(new, old, advantages, mask, **choices)
    full, stats_full = policy_loss(new.float(), old.float(), advantages.float(), mask, **choices)
    assert torch.equal(half, full)
    assert all(torch.equal(stats_half[key], stats_full[key]) for key in stats_full)


def test_statistics_of_the_likelihood() -> None:
    """Of this call's tokens alone, whatever the aggregation and the size of the step."""
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, math.inf, 5.0]], dtype=torch.float64)
    entropies = torch.tensor([[0.5, 1.0, -math.inf], [0.3, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for how, total, loss in (
        ("token_mean", None, 2.0),
        ("token_mean", 12, 0.5),
        ("sequence_mean", 2, 2.25),
    ):
        leaf = entropies.clone().requires_grad_()
        ours, stats = sft_loss(
            logprobs.clone().requires_grad_(), mask, aggregation=how, total=total, entropies=leaf
        )
        assert ours.item() == pytest.approx(loss)
        assert stats.keys() == {"nll_loss", "num_tokens", "entropy"}
        assert not any(value.requires_grad for value in stats.values())
        assert [stats[name].item() for name in stats] == pytest.approx([2.0, 3, 0.6])
    assert sft_loss(logprobs, mask)[1].keys() == {"nll_loss", "num_tokens"}


# --- settings of torch ----------------------------------------------------------------------------


def everything(dtype: torch.dtype, choices: dict, how: str = "token_mean") -> list[Tensor]:
    """The loss, its gradient and all its statistics, and those of the likelihood."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(4, 3, 5, generator=generator, dtype=dtype, device="cpu")
    mask = torch.ones(3, 5, dtype=torch.bool, device="cpu")
    mask[1, 3:] = False
    new, old, ref, entropies = -draw.abs()
    new.requires_grad_()
    advantages = new.new_tensor([1.0, -1.0, 0.5]).detach()
    loss, stats = policy_loss(
        new,
        old,
        advantages,
        mask,
        ref_logprobs=ref,
        beta=0.1,
        entropies=-entropies,
        entropy_coef=0.1,
        **choices,
        **arguments(how),
    )
    likelihood, counts = sft_loss(new, mask, entropies=-entropies)
    gradient = torch.autograd.grad(loss + likelihood, new)[0]
    values = [*stats.values(), *counts.values(), aggregate(new, mask), entropy(draw)]
    values += [token_logprobs(draw, torch.zeros(4, 3, dtype=torch.int64, device="cpu"))]
    return [loss.detach(), likelihood.detach(), gradient, *(value.detach() for value in values)]


@every_combination
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nothing_depends_on_what_torch_is_set_to(choices: dict, dtype: torch.dtype) -> None:
    """Not on the default dtype or device, nor on autocast: the same bits in the same dtypes."""
    wanted = everything(dtype, choices)
    before = torch.get_default_dtype()
    for default in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            found = everything(dtype, choices)
        finally:
            torch.set_default_dtype(before)
        same(found, wanted)
    with torch.device("meta"):
        same(everything(dtype, choices), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        same(everything(dtype, choices), wanted)


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, two in zip(found, wanted, strict=True):
        assert (one.dtype, one.device) == (two.dtype, two.device)
        assert torch.equal(one, two)


# --- the limit of the log-ratios ------------------------------------------------------------------


@every_combination
@pytest.mark.parametrize("limit", [2.0, 80.0])
def test_the_limit_of_the_log_ratio_is_that_of_the_functions(choices: dict, limit: float) -> None:
    """Of the ratio and of k3, which are computed with it alone."""
    new = torch.tensor([[30.0, -30.0], [1.0, 60.0]], dtype=torch.float64)
    zero, mask = torch.zeros_like(new), torch.ones_like(new)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    _, stats = policy_loss(
        new, zero, advantages, mask, ref_logprobs=zero, max_log_ratio=limit, **choices
    )
    level = choices["ratio_level"]
    ratio = importance_ratio(new, zero, mask, level=level, max_log_ratio=limit)
    close(stats["ratio_mean"], ratio.mean())
    close(stats["kl"], kl_per_token(new, zero, mask, max_log_ratio=limit).mean())
    _, plain = policy_loss(new, zero, advantages, mask, ref_logprobs=zero, **choices)
    assert plain["kl"] != stats["kl"]


def test_the_gate_of_gamma_is_0_at_any_ratio_that_is_far_off() -> None:
    """Where the power overflows and the exponential is 0, the product is 0."""
    new, mask = torch.tensor([[45.0, 30.0]], requires_grad=True), torch.ones(1, 2)
    for sign in (1.0, -1.0):
        loss, stats = policy_loss(
            new,
            torch.zeros(1, 2),
            torch.tensor([sign]),
            mask,
            surrogate="gamma",
            ratio_level="sequence_sum",
            max_log_ratio=80.0,
        )
        assert loss == 0
        assert stats["vespo/phi_seq_mean"] == 0
        assert (torch.autograd.grad(loss, new)[0] == 0).all()


@pytest.mark.parametrize("distance", [1e-6, 1e-3, -1e-5, 2.0])
def test_the_gradient_of_k3_keeps_its_digits_near_the_reference(distance: float) -> None:
    """1 - exp(-d), which for small d is a difference of two numbers near 1."""
    new = torch.tensor([[distance, math.nan]], requires_grad=True)
    kl = kl_per_token(new, torch.zeros(1, 2), torch.tensor([[True, False]]))
    kl.sum().backward()
    assert new.grad is not None
    assert new.grad[0, 0].item() == pytest.approx(-math.expm1(-distance), rel=2e-7)
    assert new.grad[0, 1] == 0
