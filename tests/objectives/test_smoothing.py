"""DCPO's advantage: against a reference that keeps every reward, and by properties."""

import io
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.objectives import (
    RewardHistory,
    group_advantages,
    largest_group_advantage,
    smoothed_advantages,
)

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlcore")

Step = tuple[Tensor, Tensor]  # rewards (B,), group_ids (B,)


def close(ours: Tensor, wanted: Any, atol: float = 1e-12, rtol: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours, wanted, rtol=rtol, atol=atol)


def same(one: RewardHistory, other: RewardHistory) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@st.composite
def trainings(draw: st.DrawFn, missing: bool = True, same_size: bool = False) -> list[Step]:
    """Some steps, each with the responses to some of five prompts, rows in any order."""
    names = draw(st.lists(st.integers(-(2**62), 2**62), min_size=5, max_size=5, unique=True))
    sizes = [draw(st.integers(2, 5)) for _ in names]
    one = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.integers(-40, 40).map(lambda n: n / 8))
    if missing:
        one = st.one_of(one, one, st.just(math.nan))
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        prompts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
        lines = [
            (draw(one), names[prompt])
            for prompt in prompts
            for _ in range(sizes[prompt] if same_size else draw(st.integers(2, 5)))
        ]
        lines = draw(st.permutations(lines))
        rewards = torch.tensor([reward for reward, _ in lines], dtype=torch.float64)
        steps.append((rewards, torch.tensor([name for _, name in lines])))
    return steps


def run(steps: list[Step], **options: Any) -> tuple[list[Tensor], RewardHistory]:
    found, history = [], None
    for rewards, ids in steps:
        advantages, history = smoothed_advantages(rewards, ids, history, **options)
        found.append(advantages)
    assert history is not None
    return found, history


def visits_of(steps: list[Step]) -> dict[int, list[list[float]]]:
    """Each prompt's visits, as lists of the rewards that were not missing."""
    seen: dict[int, list[list[float]]] = {}
    for rewards, ids in steps:
        for name in ids.unique().tolist():
            group = [reward for reward in rewards[ids == name].tolist() if not math.isnan(reward)]
            if group:
                seen.setdefault(name, []).append(group)
    return seen


def mixture(visits: list[list[float]]) -> tuple[float, float]:
    """Mean and population variance when a visit is drawn first, then one of its rewards."""
    means = [statistics.fmean(group) for group in visits]
    squares = [statistics.pvariance(group) for group in visits]
    return statistics.fmean(means), statistics.fmean(squares) + statistics.pvariance(means)


def term(reward: float, mean: float, std: float) -> float:
    return (reward - mean) / std if std > 1e-9 else 0.0


@given(steps=trainings(missing=False, same_size=True))
def test_the_recursion_is_the_spread_of_all_rewards_so_far(steps: list[Step]) -> None:
    """With the population std and groups of one size: exactly that of a list of them all."""
    _, history = run(steps)
    seen = visits_of(steps)
    assert history.group_ids.tolist() == sorted(seen)
    for name, visits, mean, variance in zip(*(part.tolist() for part in history), strict=True):
        pooled = [reward for group in seen[name] for reward in group]
        assert visits == len(seen[name])
        assert mean == pytest.approx(statistics.fmean(pooled), abs=1e-12)
        assert variance == pytest.approx(statistics.pvariance(pooled), abs=1e-11)


@given(steps=trainings())
def test_with_missing_rewards_every_visit_still_weighs_alike(steps: list[Step]) -> None:
    _, history = run(steps)
    seen = visits_of(steps)
    assert history.group_ids.tolist() == sorted(seen)
    for name, visits, mean, variance in zip(*(part.tolist() for part in history), strict=True):
        assert visits == len(seen[name])
        close(torch.tensor([mean, variance]).double(), mixture(seen[name]), 1e-6)


@given(steps=trainings())
def test_the_advantage_is_the_smaller_of_the_two_smoothed_ones(steps: list[Step]) -> None:
    """Response by response, from the rewards of all visits."""
    found, _ = run(steps)
    for step, (rewards, ids) in enumerate(steps):
        seen = visits_of(steps[: step + 1])
        for reward, name, ours in zip(rewards.tolist(), ids.tolist(), found[step], strict=True):
            if math.isnan(reward):
                assert ours == 0
                continue
            visits, i = seen[name], len(seen[name])
            group = visits[-1]
            mean, variance = mixture(visits)
            new = term(reward, statistics.fmean(group), statistics.pstdev(group))
            total = term(reward, mean, math.sqrt(variance))
            one = (i - 1) / i * new + total / i
            other = new / i + (i - 1) / i * total
            if abs(abs(one) - abs(other)) > 1e-9:
                assert ours.item() == pytest.approx(
                    one if abs(one) < abs(other) else other, abs=1e-9
                )
            else:
                assert abs(ours.item()) == pytest.approx(abs(one), abs=1e-8)


def test_a_tie_takes_the_total() -> None:
    """At the third visit the reward 4 has A_new = -1 and A_tot = (4 + 2) / 6 = 1, so the two
    smoothed advantages are -1/3 and 1/3."""
    history = None
    for rewards in ([-8.0, -8.0], [-4.0, -4.0], [4.0, 8.0]):
        advantages, history = smoothed_advantages(rewards, [0, 0], history)
    assert history is not None
    assert history.mean.tolist() == [-2]
    assert history.variance.tolist() == [36]
    close(advantages[0], 1 / 3)


@pytest.mark.parametrize("ddof", [0, 1])
@given(steps=trainings())
def test_the_first_visit_is_the_group_z_score(ddof: int, steps: list[Step]) -> None:
    rewards, ids = steps[0]
    wanted = group_advantages(rewards, ids, ddof=ddof)
    for history in (None, RewardHistory.empty()):
        ours, after = smoothed_advantages(rewards, ids, history, ddof=ddof)
        assert torch.equal(ours, wanted)
        assert (after.visits == 1).all()


@pytest.mark.parametrize("visit", [2, 3, 4, 7])
def test_an_all_equal_group_learns_from_the_visits_before(visit: int) -> None:
    """1/i of where it stands among all rewards so far: eight right answers, after some wrong ones,
    are no longer nothing."""
    mixed, right = torch.tensor([1.0, 0.0, 0.0, 1.0]).double(), torch.ones(4).double()
    history, ids = None, [3] * 4
    for _ in range(visit - 1):
        _, history = smoothed_advantages(mixed, ids, history)
    ours, after = smoothed_advantages(right, ids, history)
    pooled = [1.0, 0.0, 0.0, 1.0] * (visit - 1) + [1.0] * 4
    total = (1 - statistics.fmean(pooled)) / statistics.pstdev(pooled)
    close(ours, [total / visit] * 4)
    assert ours[0] > 0
    wrong, _ = smoothed_advantages(right * 0, ids, history)
    close(wrong, -ours)  # the past is half right, half wrong
    assert after.visits.tolist() == [visit]


def test_the_released_code_has_the_sample_std() -> None:
    """In the same recursion, where it is the spread of nothing."""
    history = None
    for rewards in ([1.0, 0.0], [2.0, 0.0]):
        _, history = smoothed_advantages(rewards, [0, 0], history, ddof=1)
    assert history is not None
    # variances 1/2 and 2, means 1/2 and 1: half their sum, and a quarter of the squared distance
    close(history.variance, [(0.5 + 2) / 2 + 0.25 * 0.25])
    assert abs(history.variance.item() - statistics.variance([1, 0, 2, 0])) > 0.1


@given(steps=trainings(), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_the_rows_means_nothing(steps: list[Step], shuffle: Any) -> None:
    orders = [list(range(len(ids))) for _, ids in steps]
    for order in orders:
        shuffle.shuffle(order)
    mixed = [(r[order], ids[order]) for (r, ids), order in zip(steps, orders, strict=True)]
    (straight, history), (shuffled, other) = run(steps), run(mixed)
    assert same(history, other)
    for ours, wanted, order in zip(shuffled, straight, orders, strict=True):
        assert torch.equal(ours, wanted[order])


@given(steps=trainings())
def test_prompts_do_not_know_each_other(steps: list[Step]) -> None:
    """One prompt at a time, in the order of their visits: the same bits."""
    found, history = run(steps)
    for name in torch.cat([ids for _, ids in steps]).unique():
        alone = [(r[ids == name], ids[ids == name]) for r, ids in steps if (ids == name).any()]
        ours, its = run(alone)
        wanted = [a[ids == name] for a, (_, ids) in zip(found, steps, strict=True)]
        wanted = [part for part in wanted if len(part)]
        for one, other in zip(ours, wanted, strict=True):
            assert torch.equal(one, other)
        here = history.group_ids == name
        assert same(its, RewardHistory(*(part[here] for part in history)))


def test_two_groups_of_a_prompt_in_a_batch_are_one_visit() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 5.0, 5.0, 1.0, 1.0]), torch.tensor([4, 4, 1, 1, 4, 4])
    ours, history = smoothed_advantages(rewards, ids)
    assert history.group_ids.tolist() == [1, 4]
    assert history.visits.tolist() == [1, 1]
    assert history.mean.tolist() == [5, 0.75]
    assert torch.equal(ours, group_advantages(rewards, ids))


def test_a_prompt_without_a_reward_is_not_visited() -> None:
    _, history = smoothed_advantages([1.0, 0.0, None, None], [0, 0, 7, 7])
    assert history.group_ids.tolist() == [0]
    ours, after = smoothed_advantages([None, None, 1.0, None], [0, 0, 7, 7], history)
    assert ours.tolist() == [0, 0, 0, 0]
    assert after.group_ids.tolist() == [0, 7]
    assert after.visits.tolist() == [1, 1]
    assert after.mean.tolist() == [0.5, 1]
    nothing, unchanged = smoothed_advantages([None, None], [0, 0], history)
    assert nothing.tolist() == [0, 0]
    assert same(unchanged, history)


def test_a_lone_reward_is_compared_with_the_visits_before() -> None:
    _, history = smoothed_advantages([1.0, 0.0], [0, 0])
    ours, _ = smoothed_advantages([1.0, None], [0, 0], history)
    mean, variance = mixture([[1.0, 0.0], [1.0]])
    close(ours, [(1 - mean) / math.sqrt(variance) / 2, 0])


@given(steps=trainings())
def test_the_history_given_is_not_changed(steps: list[Step]) -> None:
    history = RewardHistory.empty()
    for rewards, ids in steps:
        before = RewardHistory(*(part.clone() for part in history))
        given_rewards, given_ids = rewards.clone(), ids.clone()
        first, after = smoothed_advantages(rewards, ids, history)
        assert same(history, before)
        torch.testing.assert_close(rewards, given_rewards, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ids, given_ids)
        again, after_again = smoothed_advantages(rewards, ids, history)
        assert torch.equal(first, again)
        assert same(after, after_again)
        history = after


@given(steps=trainings(), stop=st.integers(0, 6))
def test_a_checkpoint_goes_on_with_the_same_bits(steps: list[Step], stop: int) -> None:
    """Saved after `stop` steps and read back the safe way, that runs no code."""
    (straight, wanted), history = run(steps), RewardHistory.empty()
    for number, (rewards, ids) in enumerate(steps):
        if number == stop:
            file = io.BytesIO()
            torch.save({"history": history._asdict()}, file)
            file.seek(0)
            saved = torch.load(file, map_location="cpu", weights_only=True)
            history = RewardHistory(**saved["history"])
        ours, history = smoothed_advantages(rewards, ids, history)
        assert torch.equal(ours, straight[number])
    assert same(history, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ddof", [0, 1])
@example(value=0.1, sizes=[7, 7, 4, 7, 7, 7])  # a mean of six 0.1 can miss 0.1
@given(value=st.floats(-100, 100), sizes=st.lists(st.integers(2, 33), min_size=1, max_size=8))
def test_a_prompt_with_one_reward_only_stays_at_exactly_zero(
    dtype: torch.dtype, ddof: int, value: float, sizes: list[int]
) -> None:
    history = None
    for size in sizes:
        rewards = torch.full((size,), value, dtype=torch.float64).to(dtype)
        ours, history = smoothed_advantages(rewards, [0] * size, history, ddof=ddof)
        assert (ours == 0).all()
        assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert history.variance.tolist() == [0]
        assert history.mean.tolist() == [rewards[0].item()]


@given(steps=trainings(missing=False, same_size=True))
def test_no_advantage_is_beyond_the_bounds(steps: list[Step]) -> None:
    """Each term has the bound of its own group, sqrt(G - 1) or sqrt(i G - 1); so has their mix."""
    found, _ = run(steps)
    seen: dict[int, int] = {}
    for ours, (_, ids) in zip(found, steps, strict=True):
        for name in ids.unique().tolist():
            mine = ids == name
            seen[name] = seen.get(name, 0) + 1
            size, i = int(mine.sum()), seen[name]
            new, total = (largest_group_advantage(count) for count in (size, i * size))
            assert ours[mine].abs().max() <= (1 - 1 / i) * new + total / i + 1e-9


@given(steps=trainings(), factor=st.sampled_from([0.25, 4.0]), shift=st.integers(-8, 8))
def test_neither_shift_nor_scale_of_the_rewards_is_seen(
    steps: list[Step], factor: float, shift: int
) -> None:
    moved = [(factor * rewards + shift, ids) for rewards, ids in steps]
    for ours, wanted in zip(run(moved)[0], run(steps)[0], strict=True):
        close(ours.abs(), wanted.abs(), 1e-6, 1e-6)  # a tie may fall the other way
    flipped = [(-rewards, ids) for rewards, ids in steps]
    for ours, wanted in zip(run(flipped)[0], run(steps)[0], strict=True):
        close(ours.abs(), wanted.abs(), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_the_dtype_of_rewards(dtype: torch.dtype) -> None:
    steps = [torch.tensor([1, 0, 0, 2]), torch.tensor([0, 0, 3, 0])]
    low, high, lists = None, None, None
    for rewards in steps:
        ours, low = smoothed_advantages(rewards.to(dtype), [0] * 4, low)
        wanted, high = smoothed_advantages(rewards.double(), [0] * 4, high)
        as_list, lists = smoothed_advantages(rewards.tolist(), [0] * 4, lists)
        assert ours.dtype == torch.float32
        assert wanted.dtype == as_list.dtype == torch.float64
        assert torch.equal(ours, wanted.float())
        assert torch.equal(as_list, wanted)
    assert low is not None
    assert high is not None
    assert same(low, high)
    assert [part.dtype for part in low] == [torch.int64] * 2 + [torch.float64] * 2


@pytest.mark.parametrize("unit", [1e-140, 1e-30, 1e30, 1e149])
def test_tiny_and_huge_rewards(unit: float) -> None:
    plain, scaled = None, None
    for rewards in ([1.0, 0, 0, 3], [2.0, 2, 2, 2], [0.0, 1, 4, 1]):
        wanted, plain = smoothed_advantages(rewards, [0] * 4, plain)
        ours, scaled = smoothed_advantages([unit * reward for reward in rewards], [0] * 4, scaled)
        close(ours, wanted, 1e-9)


@pytest.mark.parametrize("unit", [1e-200, 1e-158])
def test_a_spread_below_what_can_be_squared_counts_as_none(unit: float) -> None:
    """Squared, it is 0, or a number with a few digits left.  The first visit squares nothing."""
    tiny = [unit, 0.0, 0.0, 0.0]
    ours, history = smoothed_advantages(tiny, [0] * 4)
    close(ours, group_advantages(tiny, [0] * 4))
    assert history.variance.tolist() == [0]
    later, _ = smoothed_advantages(tiny, [0] * 4, history)
    close(later, ours / 2)


def test_gradients_stop_at_the_rewards() -> None:
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    ours, history = smoothed_advantages(rewards, torch.tensor([0, 0]))
    assert not ours.requires_grad
    assert not any(part.requires_grad for part in history)


# --- rounding, dtypes, devices ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_visits_that_differ_by_rounding_have_no_spread(dtype: torch.dtype) -> None:
    """0.3 twice and 0.1 + 0.2 twice: in one group, and one after the other."""
    ids = torch.tensor([5, 5, 8, 8])
    away = torch.tensor(0.3, dtype=dtype).nextafter(torch.tensor(1.0, dtype=dtype)).item()
    visits = [[0.3, away, 1.0, 0.0], [away, away, 1.0, 0.0], [0.3, 0.3, 1.0, 0.0]]
    history = None
    for visit in [*visits, *visits]:
        rewards = torch.tensor(visit, dtype=dtype)
        advantages, history = smoothed_advantages(rewards, ids, history)
        assert advantages.tolist() == [0, 0, 1, -1]
    small = torch.tensor([0.3 * (1 + 1e-5)] * 2 + [1, 0], dtype=dtype)
    assert (smoothed_advantages(small, ids, history).advantages[:2] > 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint16, torch.float8_e5m2])
def test_rewards_of_any_dtype_are_smoothed(dtype: torch.dtype) -> None:
    steps = [[1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1]]
    ids, history, wanted_history = torch.tensor([3, 3, 9, 9]), None, None
    for step in steps:
        rewards = torch.tensor(step).to(dtype)
        ours, history = smoothed_advantages(rewards, ids, history)
        wanted, wanted_history = smoothed_advantages(torch.tensor(step), ids, wanted_history)
        assert ours.dtype == torch.float32
        assert torch.equal(ours, wanted)
        assert same(history, wanted_history)


def test_the_default_device_moves_nothing() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([3, 3, 9, 9])
    wanted, history = smoothed_advantages(rewards, ids)
    with torch.device("meta"):
        ours, found = smoothed_advantages(rewards, ids, RewardHistory.empty())
        again, later = smoothed_advantages(rewards, ids.tolist(), found)
    assert torch.equal(ours, wanted)
    assert same(found, history)
    assert torch.equal(again, smoothed_advantages(rewards, ids, history).advantages)
    assert later.visits.tolist() == [2, 2]
