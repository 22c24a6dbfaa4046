"""What must hold for every reward, tried on rewards that hypothesis invents."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.objectives import (
    batch_mean_advantages,
    equal_groups,
    group_advantages,
    largest_group_advantage,
    leave_one_out_advantages,
)

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlcore")

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


def close(ours: Tensor, wanted: Any, atol: float = 1e-9, rtol: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), atol=atol, rtol=rtol)


# --- advantages ---------------------------------------------------------------------------------


@every_estimator
@given(batch=batches(), shuffle=st.randoms(use_true_random=False))
def test_shuffling_the_rows_shuffles_the_advantages(name: str, batch: Any, shuffle: Any) -> None:
    rewards, ids = batch
    order = list(range(len(rewards)))
    shuffle.shuffle(order)
    by_prompt = ids.argsort(stable=True)  # ids that ascend are not sorted
    straight = ESTIMATORS[name](rewards, ids)
    for rows in (torch.tensor(order), by_prompt, by_prompt.flip(0)):
        assert torch.equal(ESTIMATORS[name](rewards[rows], ids[rows]), straight[rows])


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


def noisy(dtype: torch.dtype, size: float, ulps: int) -> Tensor:
    """One reward twice, and the one that many ulps (of the dtype, at `size`) away."""
    away = torch.tensor(size, dtype=dtype)
    for _ in range(ulps):
        away = away.nextafter(torch.tensor(0.0, dtype=dtype))
    return torch.stack([torch.tensor(size, dtype=dtype), away, away])


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, -0.3, 1e-30, 1e30])
def test_rewards_that_differ_by_rounding_are_equal(
    name: str, dtype: torch.dtype, size: float
) -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    for ulps in (1, 3, 8):
        rewards = noisy(dtype, size, ulps)
        assert len(set(rewards.tolist())) == 2
        assert (ESTIMATORS[name](rewards, ids) == 0).all()
        assert equal_groups(rewards, ids).equal.all()
    further = noisy(dtype, size, 20)
    assert (ESTIMATORS[name](further, ids) != 0).all()
    assert not equal_groups(further, ids).equal.any()


def test_three_tenths_however_they_were_added_up() -> None:
    rewards = [0.1 + 0.2, 0.3, math.nan, 1.0, 0.0]
    ids = [0, 0, 0, 1, 1]
    for scale in ("group", "batch", "none"):
        advantages = group_advantages(rewards, ids, scale=scale)
        assert advantages[:3].tolist() == [0, 0, 0]
        assert advantages[3] > 0 > advantages[4]
    assert equal_groups(rewards, ids).equal.tolist() == [True, False]


@pytest.mark.parametrize(
    ("dtype", "pair"),
    [
        (torch.float64, [1e-300, 0.0]),
        (torch.float64, [5e-324, 0.0]),
        (torch.float64, [-1e-16, 1e-16]),
        (torch.float32, [1.0, 1 + 2.0**-18]),
        (torch.bfloat16, [1.0, 1 + 2.0**-7]),
        (torch.float16, [1.0, 1 + 2.0**-10]),
        (torch.float8_e4m3fn, [1.0, 1 + 2.0**-3]),
        (torch.int64, [2**52, 2**52 + 1]),
        (torch.int32, [2**24, 2**24 + 1]),
    ],
)
def test_small_differences_that_are_real_count(dtype: torch.dtype, pair: list[float]) -> None:
    rewards, ids = torch.tensor(pair).to(dtype), [0, 0]
    if dtype == torch.float64:
        rewards = torch.tensor(pair, dtype=dtype)
    assert not equal_groups(rewards, ids).equal.any()
    assert group_advantages(rewards, ids).abs().tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@every_estimator
def test_ids_and_rewards_of_any_integer_dtype(name: str, dtype: torch.dtype) -> None:
    rewards, ids = torch.tensor([3, 1, 2, 2, 0, 5]), torch.tensor([0, 0, 0, 1, 1, 1])
    ours = ESTIMATORS[name](rewards.to(dtype), ids.to(dtype))
    assert torch.equal(ours, ESTIMATORS[name](rewards, ids))


@every_estimator
def test_tensors_stay_where_they_are_whatever_the_default_device(name: str) -> None:
    rewards, ids = torch.tensor([3.0, 1, 2, 2, 0, 5]), torch.tensor([0, 0, 0, 1, 1, 1])
    wanted = ESTIMATORS[name](rewards, ids)
    with torch.device("meta"):
        ours, listed = ESTIMATORS[name](rewards, ids), ESTIMATORS[name](rewards, ids.tolist())
        found = equal_groups(rewards, ids)
    assert torch.equal(ours, wanted)
    assert torch.equal(listed, wanted)
    assert found.equal.tolist() == [False, False]


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
