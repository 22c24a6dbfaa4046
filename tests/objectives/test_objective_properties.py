"""What must hold for every input, tried on inputs that hypothesis invents."""

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
    KL_ESTIMATORS,
    RATIO_LEVELS,
    SURROGATES,
    aggregate,
    batch_mean_advantages,
    entropy,
    equal_groups,
    group_advantages,
    importance_ratio,
    kl_penalized_rewards,
    kl_per_token,
    largest_group_advantage,
    leave_one_out_advantages,
    policy_loss,
    sft_loss,
    token_logprobs,
)

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlcore")

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
ESTIMATORS = {
    "z-score": lambda rewards, ids: group_advantages(rewards, ids),
    "z-score, ddof 1": lambda rewards, ids: group_advantages(rewards, ids, ddof=1),
    "z-score, eps": lambda rewards, ids: group_advantages(rewards, ids, eps=1e-4),
    "batch std": lambda rewards, ids: group_advantages(rewards, ids, scale="batch"),
    "mean only": lambda rewards, ids: group_advantages(rewards, ids, scale="none"),
    "leave one out": leave_one_out_advantages,
    "batch mean": lambda rewards, ids: batch_mean_advantages(rewards),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)

reward = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def batches(draw: st.DrawFn, missing: bool = True) -> tuple[Tensor, Tensor]:
    """rewards (B,) in float64 and group_ids (B,), rows in any order."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    names = draw(
        st.lists(
            st.integers(-(2**40), 2**40), min_size=len(sizes), max_size=len(sizes), unique=True
        )
    )
    ids = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    one = st.one_of(reward, st.sampled_from([0.0, 1.0]))
    if missing:
        one = st.one_of(one, st.sampled_from([0.0, 1.0]), st.just(math.nan))
    values = draw(st.lists(one, min_size=len(ids), max_size=len(ids)))
    order = draw(st.permutations(range(len(ids))))
    rewards = torch.tensor([values[index] for index in order], dtype=torch.float64)
    return rewards, torch.tensor([ids[index] for index in order])


@st.composite
def responses(draw: st.DrawFn) -> dict[str, Tensor]:
    """Log-probs of three policies, advantages and a mask with at least one token a row."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (len(lengths), draw(st.integers(max(lengths), 6)))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    new = -normal(*shape).abs()
    return {
        "new": new,
        "old": new + 0.3 * normal(*shape),
        "ref": new + 0.3 * normal(*shape),
        "advantages": normal(shape[0]),
        "mask": torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
    }


def close(ours: Tensor, wanted: Any, atol: float = 1e-9, rtol: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), atol=atol, rtol=rtol)


def loss_and_gradient(loss: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


# --- advantages ---------------------------------------------------------------------------------


@every_estimator
@given(batch=batches(), shuffle=st.randoms(use_true_random=False))
def test_shuffling_the_rows_shuffles_the_advantages(name: str, batch: Any, shuffle: Any) -> None:
    rewards, ids = batch
    order = list(range(len(rewards)))
    shuffle.shuffle(order)
    straight = ESTIMATORS[name](rewards, ids)
    assert torch.equal(ESTIMATORS[name](rewards[order], ids[order]), straight[order])


@every_estimator
@given(batch=batches(), renamed=st.permutations(range(4)))
def test_the_names_of_the_groups_mean_nothing(name: str, batch: Any, renamed: Any) -> None:
    rewards, ids = batch
    others = torch.tensor(renamed)[ids.unique(return_inverse=True)[1]]
    close(ESTIMATORS[name](rewards, others), ESTIMATORS[name](rewards, ids))


@every_estimator
@given(batch=batches(), shift=st.floats(-100, 100))
def test_a_shift_of_all_rewards_changes_nothing(name: str, batch: Any, shift: float) -> None:
    rewards, ids = batch
    straight, shifted = ESTIMATORS[name](rewards, ids), ESTIMATORS[name](rewards + shift, ids)
    close(shifted, straight, atol=1e-7, rtol=1e-7)


@given(batch=batches(), factor=st.floats(1e-3, 1e3))
def test_the_scale_of_the_rewards(batch: Any, factor: float) -> None:
    """A z-score (eps = 0) does not see it, a difference is proportional to it."""
    rewards, ids = batch
    for name in ("z-score", "z-score, ddof 1", "batch std"):
        close(ESTIMATORS[name](factor * rewards, ids), ESTIMATORS[name](rewards, ids), atol=1e-7)
    for name in ("mean only", "leave one out", "batch mean"):
        scaled = factor * ESTIMATORS[name](rewards, ids)
        close(ESTIMATORS[name](factor * rewards, ids), scaled, atol=1e-7)
    flipped = group_advantages(-rewards, ids)
    close(flipped, -group_advantages(rewards, ids))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "batch mean"])
@given(batch=batches())
def test_the_advantages_of_a_group_sum_to_zero(name: str, batch: Any) -> None:
    rewards, ids = batch
    advantages = ESTIMATORS[name](rewards, ids)
    for group in ids.unique():
        assert abs(advantages[ids == group].sum()) < 1e-9
    assert abs(batch_mean_advantages(rewards).sum()) < 1e-9


@given(batch=batches())
def test_no_advantage_is_beyond_the_bound(batch: Any) -> None:
    rewards, ids = batch
    for group in ids.unique():
        mine = ids == group
        known = int((~rewards[mine].isnan()).sum())
        if known < 2:
            continue
        for ddof in (0, 1):
            largest = group_advantages(rewards, ids, ddof=ddof)[mine].abs().max()
            assert largest <= largest_group_advantage(known, ddof=ddof) + 1e-12


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 8, 64, 256])
def test_a_lone_success_meets_the_bound(size: int, ddof: int) -> None:
    rewards = torch.zeros(size, dtype=torch.float64)
    rewards[size // 2] = 1
    advantages = group_advantages(rewards, torch.zeros(size, dtype=torch.int64), ddof=ddof)
    bound = math.sqrt(size - 1) if ddof == 0 else (size - 1) / math.sqrt(size)
    assert advantages[size // 2].item() == pytest.approx(bound, rel=1e-14)
    assert largest_group_advantage(size, ddof=ddof) == bound
    others = advantages[torch.arange(size) != size // 2]
    close(others, [-bound / (size - 1)] * (size - 1), atol=1e-14, rtol=0)


@every_estimator
@given(batch=batches())
def test_a_missing_reward_is_as_if_the_row_were_not_there(name: str, batch: Any) -> None:
    rewards, ids = batch
    advantages, known = ESTIMATORS[name](rewards, ids), ~rewards.isnan()
    assert (advantages[~known] == 0).all()
    assert advantages.isfinite().all()
    kept, groups = rewards[known], ids[known]
    counts = {int(group): int((groups == group).sum()) for group in groups.unique()}
    enough = torch.tensor([counts[int(group)] > 1 for group in groups], dtype=torch.bool)
    if "batch" not in name:
        assert (advantages[known][~enough] == 0).all()
        if enough.any():
            close(advantages[known][enough], ESTIMATORS[name](kept[enough], groups[enough]))


@every_estimator
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool],
)
@given(value=st.floats(-100, 100), size=st.integers(2, 33), gap=st.booleans())
def test_an_all_equal_group_gets_exactly_zero(
    name: str, dtype: torch.dtype, value: float, size: int, gap: bool
) -> None:
    rewards = torch.full((size,), value).to(dtype)
    if gap and dtype.is_floating_point:
        rewards[size // 2] = math.nan
    advantages = ESTIMATORS[name](rewards, torch.full((size,), 3))
    assert (advantages == 0).all()
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-4])
def test_seven_times_a_tenth(eps: float) -> None:
    """In float32 arithmetic the mean of seven 0.1 misses 0.1, and eps 1e-8 then gives -0.41.  Next
    to a group that learns, so that no shortcut for the whole batch helps."""
    rewards = torch.tensor([0.1] * 7 + [0.0, 1.0])
    ids = torch.tensor([5] * 7 + [2] * 2)
    for scale in ("group", "batch", "none"):
        advantages = group_advantages(rewards, ids, scale=scale, eps=eps)
        assert advantages[:7].tolist() == [0.0] * 7
        assert advantages[7] < 0 < advantages[8]
    assert leave_one_out_advantages(rewards, ids)[:7].tolist() == [0.0] * 7


@pytest.mark.parametrize("unit", [1e-300, 1e-30, 1e30, 1e300])
def test_tiny_and_huge_rewards_stay_in_range(unit: float) -> None:
    rewards = torch.tensor([unit, 0, 0, 0], dtype=torch.float64)
    ids = torch.zeros(4, dtype=torch.int64)
    for scale in ("group", "batch"):
        close(group_advantages(rewards, ids, scale=scale)[0], math.sqrt(3))


def test_rewards_that_differ_in_the_last_bit_are_not_equal() -> None:
    rewards = torch.tensor([1.0, math.nextafter(1.0, 2.0)], dtype=torch.float64)
    ids = torch.zeros(2, dtype=torch.int64)
    assert not equal_groups(rewards, ids).equal.any()
    assert group_advantages(rewards, ids).tolist() == [-1, 1]


@given(batch=batches())
def test_equal_groups_are_those_without_a_gradient(batch: Any) -> None:
    rewards, ids = batch
    found = equal_groups(rewards, ids)
    assert found.group_ids.tolist() == sorted(set(ids.tolist()))
    advantages = group_advantages(rewards, ids)
    for group, equal in zip(found.group_ids, found.equal, strict=True):
        known = {value for value in rewards[ids == group].tolist() if not math.isnan(value)}
        assert bool(equal) == (len(known) < 2)
        assert bool(equal) == bool((advantages[ids == group] == 0).all())
    assert found.share.item() == pytest.approx(found.equal.double().mean().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
@every_estimator
def test_the_dtype_of_rewards(name: str, dtype: torch.dtype) -> None:
    rewards, ids = torch.tensor([3, 1, 2, 2, 0, 5], dtype=dtype), torch.tensor([0, 0, 0, 1, 1, 1])
    ours = ESTIMATORS[name](rewards, ids)
    assert ours.dtype == torch.float32
    wanted = ESTIMATORS[name](rewards.double(), ids)
    assert wanted.dtype == torch.float64
    torch.testing.assert_close(ours, wanted.float(), rtol=0, atol=0)
    as_list = ESTIMATORS[name](rewards.tolist(), ids.tolist())
    torch.testing.assert_close(as_list, wanted, rtol=0, atol=0)


def test_advantages_carry_no_gradient() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    for estimator in ESTIMATORS.values():
        assert not estimator(rewards, torch.zeros(3, dtype=torch.int64)).requires_grad


# --- ratios, KL, aggregation, losses --------------------------------------------------------------


def arguments(how: str) -> dict[str, Any]:
    return {"aggregation": how, "constant": 7.0 if how == "constant" else None}


@pytest.mark.parametrize("level", RATIO_LEVELS)
@given(batch=responses())
def test_the_ratio_is_exactly_one_at_the_first_step(level: str, batch: dict) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        new = batch["new"].to(dtype)
        ratio = importance_ratio(new, new, batch["mask"], level=level)
        assert (ratio == 1).all()
        loss, stats = policy_loss(new, new, batch["advantages"], batch["mask"], ratio_level=level)
        assert stats["ratio_mean"] == 1
        assert stats["clip_ratio/region_mean"] == 0
        close(loss, -batch["advantages"].mean(), atol=1e-5)


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=responses())
def test_at_the_first_step_the_clip_surrogate_is_reinforce(how: str, batch: dict) -> None:
    """Not in value (0 for centred advantages), but in gradient."""
    new = batch["new"].requires_grad_()
    one, two = (
        policy_loss(new, new, batch["advantages"], batch["mask"], surrogate=name, **arguments(how))[
            0
        ]
        for name in SURROGATES
    )
    close(loss_and_gradient(one, new)[1], loss_and_gradient(two, new)[1])


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=responses(), garbage=st.sampled_from(GARBAGE), data=st.data())
@settings(max_examples=25)
def test_padding_may_hold_anything(
    how: str, surrogate: str, level: str, batch: dict, garbage: float, data: st.DataObject
) -> None:
    """In value, in gradient, in every statistic, for every argument that has slots."""
    mask = batch["mask"]
    clean = {key: batch[key].masked_fill(~mask, 0) for key in ("new", "old", "ref")}
    each_token = data.draw(st.booleans(), label="advantages per token")
    advantages = batch["advantages"][:, None].expand(mask.shape)
    extra: dict[str, Any] = {
        "surrogate": surrogate,
        "ratio_level": level,
        "beta": 0.1,
        "kl_estimator": data.draw(st.sampled_from(KL_ESTIMATORS)),
        "kl_importance_weighted": data.draw(st.booleans()),
        **arguments(how),
    }
    results = []
    for fill in (0.0, garbage):
        new, old, ref = (
            clean[key].masked_fill(~mask, fill).requires_grad_() for key in ("new", "old", "ref")
        )
        given_advantages = (
            advantages.masked_fill(~mask, fill) if each_token else batch["advantages"]
        )
        loss, stats = policy_loss(new, old, given_advantages, mask, ref_logprobs=ref, **extra)
        (gradient,) = torch.autograd.grad(loss, new)
        assert (gradient[~mask] == 0).all()
        assert gradient.isfinite().all()
        results.append([loss.detach(), gradient, *stats.values()])
    for plain, filled in zip(*results, strict=True):
        assert torch.equal(plain, filled)


@given(batch=responses(), garbage=st.sampled_from(GARBAGE))
def test_padding_of_the_smaller_functions(batch: dict, garbage: float) -> None:
    mask = batch["mask"]
    new, old = (batch[key].masked_fill(~mask, garbage).requires_grad_() for key in ("new", "old"))
    clean_new, clean_old = batch["new"].requires_grad_(), batch["old"]
    rewards = batch["advantages"]
    pairs = [
        (sft_loss(new, mask), sft_loss(clean_new, mask)),
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
            (aggregate(new, mask, how=h), aggregate(clean_new, mask, how=h))
            for h in AGGREGATIONS[:2]
        ),
    ]
    for ours, wanted in pairs:
        assert torch.equal(ours, wanted)
        (one,) = torch.autograd.grad(ours.sum(), new)
        (two,) = torch.autograd.grad(wanted.sum(), clean_new)
        assert torch.equal(one, two.masked_fill(~mask, 0))
    shaped = kl_penalized_rewards(rewards, new, old, mask, beta=0.1)
    assert torch.equal(shaped, kl_penalized_rewards(rewards, clean_new, clean_old, mask, beta=0.1))
    assert not shaped.requires_grad


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=responses(), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_order_of_the_rows_means_nothing(
    how: str, level: str, batch: dict, shuffle: Any
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
            ratio_level=level,
            **arguments(how),
        )[0]
        for rows in (slice(None), order)
    ]
    one, two = (loss_and_gradient(result, new) for result in results)
    close(one[0], two[0])
    close(one[1], two[1])


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=responses(), data=st.data())
@settings(max_examples=40)
def test_the_parts_of_a_step_add_up_to_the_whole(
    how: str, surrogate: str, batch: dict, data: st.DataObject
) -> None:
    """Loss and gradient, KL term included, wherever the batch is cut and in micro-batches of any
    width; for how="token_mean" total counts tokens, else responses."""
    mask, rows = batch["mask"], len(batch["new"])
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=3))) if rows > 1 else []
    )
    new = batch["new"].requires_grad_()

    def loss(part: slice, total: int | None) -> Tensor:
        return policy_loss(
            new[part],
            batch["old"][part],
            batch["advantages"][part],
            mask[part],
            ref_logprobs=batch["ref"][part],
            beta=0.1,
            surrogate=surrogate,
            total=total,
            **arguments(how),
        )[0]

    total = int(mask.sum()) if how == "token_mean" else rows
    whole = loss_and_gradient(loss(slice(None), None), new)
    edges = [0, *cuts, rows]
    parts = [loss(slice(*edge), total) for edge in pairwise(edges)]
    summed = loss_and_gradient(torch.stack(parts).sum(), new)
    close(summed[0], whole[0])
    close(summed[1], whole[1])
    with_tensor = loss(slice(None), torch.tensor(total))  # type: ignore[arg-type]
    close(with_tensor, whole[0])


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=responses(), data=st.data())
@settings(max_examples=40)
def test_rows_left_out_are_as_if_they_were_not_there(
    how: str, batch: dict, data: st.DataObject
) -> None:
    mask, rows = batch["mask"], len(batch["new"])
    left_out = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    new = batch["new"].masked_fill(left_out[:, None], math.nan).requires_grad_()
    advantages = batch["advantages"].masked_fill(left_out, math.nan)
    kept = mask & ~left_out[:, None]
    loss, stats = policy_loss(
        new, batch["old"], advantages, kept, allow_empty=True, **arguments(how)
    )
    ours = loss_and_gradient(loss, new)
    assert (ours[1][left_out] == 0).all()
    if left_out.all():
        assert ours[0] == 0
        return
    rest = ~left_out
    small = batch["new"][rest].requires_grad_()
    alone, stats_alone = policy_loss(
        small, batch["old"][rest], advantages[rest], mask[rest], **arguments(how)
    )
    wanted = loss_and_gradient(alone, small)
    close(ours[0], wanted[0])
    close(ours[1][rest], wanted[1])
    for key, value in stats_alone.items():
        close(stats[key], value)


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=responses())
def test_the_weights_of_the_tokens(how: str, batch: dict) -> None:
    """What aggregate's docstring says, token by token."""
    mask = batch["mask"]
    values = batch["new"].requires_grad_()
    constant = 7.0 if how == "constant" else None
    (weights,) = torch.autograd.grad(aggregate(values, mask, how=how, constant=constant), values)
    rows, lengths = len(mask), mask.sum(1, keepdim=True).double()
    wanted = {
        "sequence_mean": 1 / (rows * lengths),
        "token_mean": 1 / lengths.sum(),
        "constant": torch.tensor(1 / (rows * 7.0), dtype=torch.float64),
        "sequence_sum": torch.tensor(1 / rows, dtype=torch.float64),
    }[how]
    close(weights, wanted.expand(mask.shape) * mask)


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


def test_extreme_log_ratios_stay_finite() -> None:
    new = torch.tensor([[300.0, -300.0]], requires_grad=True)
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2)
    for level in RATIO_LEVELS:
        ratio = importance_ratio(new, zero, mask, level=level)
        assert ratio.isfinite().all()
    ratio = importance_ratio(new, zero, mask)
    close(ratio[0], [math.exp(20), math.exp(-20)], rtol=1e-6)
    inside = torch.tensor([[19.0, -19.0]])
    close(importance_ratio(inside, zero, mask), inside.exp(), rtol=1e-6)
    for name in KL_ESTIMATORS:
        values = kl_per_token(new, zero, mask, estimator=name)
        assert values.isfinite().all()
        assert torch.autograd.grad(values.sum(), new)[0].isfinite().all()


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
    assert stats["ratio_mean"].item() == pytest.approx(ratio)
    for value in stats.values():
        assert value.shape == ()
        assert not value.requires_grad


def test_the_statistics_of_a_ratio_per_response() -> None:
    """One response of one token is clipped, one of three is not: a share of 1/2, not of 1/4."""
    ratio = torch.tensor([[1.5, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    mask, advantages = torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.tensor([1.0, 1.0])
    new = torch.where(mask == 1, ratio, 1.0).log()
    for level in ("sequence", "sequence_sum"):
        _, stats = policy_loss(new, torch.zeros(2, 3), advantages, mask, ratio_level=level)
        assert stats["clip_ratio/high_mean"].item() == pytest.approx(0.5, abs=1e-15)
        assert stats["ratio_mean"].item() == pytest.approx(1.25, abs=1e-15)
    _, stats = policy_loss(new, torch.zeros(2, 3), advantages, mask)
    assert stats["clip_ratio/high_mean"].item() == pytest.approx(0.25, abs=1e-15)
    assert stats["ratio_mean"].item() == pytest.approx(4.5 / 4, abs=1e-15)


def test_reinforce_clips_nothing() -> None:
    new, old = torch.tensor([[1.0, -1.0]]), torch.zeros(1, 2)
    advantages = torch.tensor([[1.0, -1.0]])
    _, clipped = policy_loss(new, old, advantages, torch.ones(1, 2))
    assert clipped["clip_ratio/region_mean"] == 1
    _, stats = policy_loss(new, old, advantages, torch.ones(1, 2), surrogate="reinforce")
    for name in ("low_mean", "high_mean", "region_mean"):
        assert stats[f"clip_ratio/{name}"] == 0
    assert stats["ratio_mean"].item() == pytest.approx(math.cosh(1), rel=1e-6)


def test_what_padded_slots_hold() -> None:
    new, old = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-2.0, -1.5, -1.0]])
    mask = torch.tensor([[1, 1, 0]])
    for level in RATIO_LEVELS:
        ratio = importance_ratio(new, old, mask, level=level)
        assert ratio[0, 2] == 1
        assert (ratio[0, :2] != 1).all()
    for name in KL_ESTIMATORS:
        assert kl_per_token(new, old, mask, estimator=name)[0, 2] == 0


def test_the_gradient_flows_through_the_policy_only() -> None:
    """Not through pi_old, pi_ref or A, also when they come from a graph."""
    new, old, ref = (torch.full((2, 2), -value, requires_grad=True) for value in (1.0, 1.1, 1.2))
    advantages, mask = torch.tensor([1.0, -1.0], requires_grad=True), torch.ones(2, 2)
    for weighted in (False, True):
        loss, _ = policy_loss(
            new,
            old,
            advantages,
            mask,
            ref_logprobs=ref,
            beta=0.1,
            kl_importance_weighted=weighted,
        )
        loss.backward()
        assert new.grad is not None
        assert old.grad is ref.grad is advantages.grad is None
    for name in KL_ESTIMATORS:
        kl_per_token(new, ref, mask, estimator=name).sum().backward()
    assert ref.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_losses(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.tensor([[-1.0, -0.5], [-2.0, -0.25]], dtype=dtype)
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, stats = policy_loss(values, values, advantages, mask, ref_logprobs=values, beta=0.1)
    assert loss.dtype == wide
    assert all(value.dtype in (torch.float32, wide) for value in stats.values())
    assert sft_loss(values, mask).dtype == wide
    assert aggregate(values, mask).dtype == wide
    assert importance_ratio(values, values, mask).dtype == wide
    assert kl_per_token(values, values, mask).dtype == wide
    logits = torch.zeros(1, 3, 4, dtype=dtype)
    assert token_logprobs(logits, torch.zeros(1, 3, dtype=torch.int64)).dtype == wide
    assert entropy(logits).dtype == wide


@pytest.mark.parametrize("power", [-1074, -1073, -1030, -1000, -600, -499, 900, 1016])
@pytest.mark.parametrize("rewards", [[1.0, 0.0], [1.0, 0.0, 0.0], [3.0, 2.0, -1.0, math.nan]])
def test_group_statistics_hold_to_both_ends_of_float64(power: int, rewards: list[float]) -> None:
    """Rewards of a few units of 2^power, down to the smallest number that there is."""
    unit = 2.0**power
    tiny = [reward * unit for reward in rewards]
    ids, two = [0] * len(rewards), [0] * len(rewards) * 2
    for scale, groups, double in (("group", ids, 1), ("batch", two, 2)):
        for ddof in (0, 1):
            options: Any = {"scale": scale, "ddof": ddof}
            ours = group_advantages(tiny * double, groups, **options)
            assert ours.tolist() == group_advantages(rewards * double, groups, **options).tolist()
            guarded = group_advantages(tiny * double, groups, eps=unit, **options)
            wanted = group_advantages(rewards * double, groups, eps=1.0, **options)
            assert guarded.tolist() == wanted.tolist()
    plain = [
        (leave_one_out_advantages(tiny, ids), leave_one_out_advantages(rewards, ids)),
        (group_advantages(tiny, ids, scale="none"), group_advantages(rewards, ids, scale="none")),
        (batch_mean_advantages(tiny), batch_mean_advantages(rewards)),
    ]
    for ours, wanted in plain:
        assert ours.tolist() == [number * unit for number in wanted.tolist()]
