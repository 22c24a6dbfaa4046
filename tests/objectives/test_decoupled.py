"""GDPO's advantage: several rewards, each compared apart, then added up."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.objectives import decoupled_advantages, group_advantages, whiten

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlcore")

FILE = Path(__file__).parents[1] / "data" / "cases.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())}


def close(ours: Tensor, wanted: Any, atol: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=atol)


Batch = dict[str, Any]


@st.composite
def batches(draw: st.DrawFn, missing: bool = False) -> Batch:
    """rewards (B, n), group_ids (B,), weights (n,), lengths (B,), rows in any order."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    n = draw(st.integers(1, 3))
    ids = draw(st.permutations([7 * g - 3 for g, size in enumerate(sizes) for _ in range(size)]))
    one = st.one_of(st.sampled_from([0.0, 1.0]), st.integers(-40, 40).map(lambda k: k / 8))
    if missing:
        one = st.one_of(one, one, st.just(math.nan))
    line = st.lists(one, min_size=n, max_size=n)
    weights = draw(st.lists(st.sampled_from([1.0, 0.5, 0.1, -2.0]), min_size=n, max_size=n))
    lengths = st.lists(st.integers(1, 6), min_size=len(ids), max_size=len(ids))
    rewards = draw(st.lists(line, min_size=len(ids), max_size=len(ids)))
    return {
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "group_ids": torch.tensor(ids),
        "weights": torch.tensor(weights, dtype=torch.float64),
        "lengths": torch.tensor(draw(lengths)),
    }


def decoupled(batch: Batch, **options: Any) -> Tensor:
    return decoupled_advantages(
        batch["rewards"], batch["group_ids"], **{"weights": batch["weights"]} | options
    )


def summed(batch: Batch, ddof: int = 1, eps: float = 0.0) -> list[float]:
    """A_sum from its formula, with Python's statistics; NaN in a row that misses every reward."""
    rewards, ids = batch["rewards"].tolist(), batch["group_ids"].tolist()
    totals = []
    for mine, name in zip(rewards, ids, strict=True):
        total, known = 0.0, False
        for k, weight in enumerate(batch["weights"].tolist()):
            if math.isnan(mine[k]):
                continue
            known = True
            column = [r[k] for r, other in zip(rewards, ids, strict=True) if other == name]
            group = [reward for reward in column if not math.isnan(reward)]
            if len(set(group)) < 2:
                continue
            std = statistics.stdev(group) if ddof else statistics.pstdev(group)
            total += weight * (mine[k] - statistics.fmean(group)) / (std + eps)
        totals.append(total if known else math.nan)
    return totals


def test_a10_two_rewards_do_not_collapse() -> None:
    given_, expected = CASES["A10"]["input"], CASES["A10"]["expected"]
    part = given_["part_1"]
    rewards = torch.tensor(
        [
            pair
            for name in ("prompt_A", "prompt_B")
            for pair in zip(*part[name].values(), strict=True)
        ]
    ).double()
    ids = torch.tensor([0, 0, 1, 1])
    collapsed = group_advantages(rewards.sum(1), ids, ddof=1)
    close(collapsed, expected["part_1_grpo_sum_then_normalise"], 1e-6)
    apart = decoupled_advantages(rewards, ids, weights=part["weights"], scale_batch=False)
    close(apart, expected["part_1_gdpo_before_batch_norm"], 1e-8)
    scaled = decoupled_advantages(rewards, ids, weights=part["weights"], batch_eps=0)
    close(scaled, expected["part_1_gdpo_after_batch_norm"], 1e-8)


def test_a10_weights_go_after_the_z_score() -> None:
    given_, expected = CASES["A10"]["input"]["part_2"], CASES["A10"]["expected"]
    rewards = torch.tensor([given_["r1"], given_["r2"]]).double().T
    ids = torch.zeros(4, dtype=torch.int64)
    for weights, name in (
        (given_["weights"], "part_2_gdpo_w_1_0.1"),
        ([0.1, 1], "part_2_gdpo_w_0.1_1"),
    ):
        ours = decoupled_advantages(rewards, ids, weights=weights, batch_eps=0)
        close(ours, expected[name], 1e-8)
    before = decoupled_advantages(rewards * torch.tensor(given_["weights"]), ids, batch_eps=0)
    close(before, decoupled_advantages(rewards, ids, batch_eps=0))  # there they would cancel


@pytest.mark.parametrize("ddof", [0, 1])
@given(batch=batches(missing=True), eps=st.sampled_from([0.0, 1e-4, 0.5]))
def test_the_sum_is_its_formula(ddof: int, batch: Batch, eps: float) -> None:
    wanted = summed(batch, ddof, eps)
    ours = decoupled(batch, ddof=ddof, eps=eps, scale_batch=False)
    close(ours, [0.0 if math.isnan(total) else total for total in wanted])


@pytest.mark.parametrize("batch_ddof", [None, 0, 1])
@given(batch=batches(missing=True), batch_eps=st.sampled_from([0.0, 1e-4, 0.5]))
def test_the_batch_is_scaled_by_its_std(
    batch_ddof: int | None, batch: Batch, batch_eps: float
) -> None:
    """Rows that miss every reward are not in it."""
    totals = summed(batch)
    known = [total for total in totals if not math.isnan(total)]
    ours = decoupled(batch, batch_ddof=batch_ddof, batch_eps=batch_eps)
    if len(known) < 2 or max(map(abs, known)) < 1e-9:
        close(ours, [0.0] * len(totals))
        return
    std = statistics.pstdev(known) if batch_ddof == 0 else statistics.stdev(known)
    mean = statistics.fmean(known)
    wanted = [0.0 if math.isnan(total) else (total - mean) / (std + batch_eps) for total in totals]
    close(ours, wanted)
    assert abs(ours.sum()) < 1e-9


@given(batch=batches(missing=True))
def test_the_batch_mean_is_zero_before_it_is_subtracted(batch: Batch) -> None:
    """Also where rewards are missing: each group's z-scores add up to 0."""
    assert abs(decoupled(batch, scale_batch=False).sum()) < 1e-9


@given(batch=batches(missing=True))
def test_the_lengths_make_it_whitening_over_tokens(batch: Batch) -> None:
    totals = torch.tensor(summed(batch), dtype=torch.float64)
    known = ~totals.isnan()
    mask = (torch.arange(6) < batch["lengths"][:, None]) & known[:, None]
    for ddof in (0, 1):
        white = whiten(totals[:, None].expand(mask.shape), mask, ddof=ddof, eps=1e-8)
        wanted = torch.where(known, white[:, 0], 0.0)
        ours = decoupled(batch, lengths=batch["lengths"], batch_ddof=ddof, batch_eps=1e-4)
        close(ours, wanted)
        assert torch.equal(
            ours, decoupled(batch, lengths=batch["lengths"].tolist(), batch_ddof=ddof)
        )


@given(batch=batches(missing=True))
def test_one_length_for_all_changes_nothing(batch: Batch) -> None:
    alike = torch.full_like(batch["lengths"], 3)
    options = {"batch_ddof": 0, "batch_eps": 0.0}
    close(decoupled(batch, lengths=alike, **options), decoupled(batch, **options))


@given(
    batch=batches(), factor=st.floats(1e-3, 1e3), shift=st.floats(-100, 100), k=st.integers(0, 2)
)
def test_no_reward_is_louder_than_another(
    batch: Batch, factor: float, shift: float, k: int
) -> None:
    """With eps = 0, scaling or shifting one of them changes nothing; turning it round turns it."""
    k = k % batch["rewards"].shape[1]
    louder = batch["rewards"].clone()
    louder[:, k] = factor * louder[:, k] + shift
    for scale in (True, False):
        wanted = decoupled(batch, scale_batch=scale)
        close(decoupled(batch | {"rewards": louder}, scale_batch=scale), wanted, 1e-6)
    turned, weights = batch["rewards"].clone(), batch["weights"].clone()
    turned[:, k], weights[k] = -turned[:, k], -weights[k]
    close(decoupled(batch | {"rewards": turned, "weights": weights}), decoupled(batch))


@given(batch=batches(), factor=st.floats(1e-3, 1e3))
def test_only_the_ratio_of_the_weights_matters(batch: Batch, factor: float) -> None:
    louder = {"weights": factor * batch["weights"]}
    close(decoupled(batch | louder, batch_eps=0), decoupled(batch, batch_eps=0))
    close(
        decoupled(batch | louder, scale_batch=False),
        factor * decoupled(batch, scale_batch=False),
        1e-6,
    )


@given(batch=batches(missing=True))
def test_one_reward_is_the_group_z_score_scaled(batch: Batch) -> None:
    column, ids = batch["rewards"][:, :1], batch["group_ids"]
    for ddof in (0, 1):
        alone = decoupled_advantages(column, ids, ddof=ddof, scale_batch=False)
        z = group_advantages(column[:, 0], ids, ddof=ddof)
        close(alone, z)
        scaled = decoupled_advantages(column, ids, ddof=ddof, batch_eps=0)
        largest = z.abs().argmax()
        if z[largest] != 0:
            assert scaled[largest] * z[largest] > 0
            close(scaled, z * scaled[largest] / z[largest])


def test_one_reward_and_no_equal_group_is_the_z_score() -> None:
    """With the population std each group has variance 1, so the batch has, too."""
    rewards = torch.tensor([[1.0], [0.0], [3.0], [2.0], [5.0]]).double()
    ids = torch.tensor([0, 0, 1, 1, 1])
    ours = decoupled_advantages(rewards, ids, ddof=0, batch_eps=0)
    close(ours, group_advantages(rewards[:, 0], ids), 1e-12)


@given(batch=batches(missing=True), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_rows_and_rewards_means_nothing(batch: Batch, shuffle: Any) -> None:
    order = list(range(len(batch["group_ids"])))
    shuffle.shuffle(order)
    mixed = {name: batch[name][order] for name in ("rewards", "group_ids", "lengths")}
    assert torch.equal(decoupled(batch | mixed), decoupled(batch)[order])
    by_token = decoupled(batch, lengths=batch["lengths"])
    assert torch.equal(decoupled(batch | mixed, lengths=mixed["lengths"]), by_token[order])
    turned = {"rewards": batch["rewards"].flip(1), "weights": batch["weights"].flip(0)}
    close(decoupled(batch | turned), decoupled(batch))


@given(batch=batches(missing=True))
def test_a_row_without_any_reward_is_as_if_it_were_not_there(batch: Batch) -> None:
    known = ~batch["rewards"].isnan().all(dim=1)
    groups = batch["group_ids"][known]
    if not known.any() or groups.unique(return_counts=True)[1].min() < 2:
        return
    kept = {name: batch[name][known] for name in ("rewards", "group_ids", "lengths")}
    for options in ({}, {"scale_batch": False}):
        ours = decoupled(batch, **options)
        assert (ours[~known] == 0).all()
        close(ours[known], decoupled(batch | kept, **options))
    by_token = decoupled(batch, lengths=batch["lengths"])
    assert (by_token[~known] == 0).all()
    close(by_token[known], decoupled(batch | kept, lengths=kept["lengths"]))


def test_a_missing_reward_leaves_the_others_of_its_row() -> None:
    """The second reward of row 0 is missing: its row has the first only, and the group of the
    second is that of the other two rows.  (Turning it into 0 would move all three.)"""
    lists = [[1.0, None], [0.0, 1.0], [0.5, 3.0]]
    ours = decoupled_advantages(lists, [0, 0, 0], scale_batch=False)
    half = math.sqrt(0.5)
    close(ours, [1.0, -1.0 - half, half], 1e-12)
    with_zero = decoupled_advantages([[1.0, 0.0], *lists[1:]], [0, 0, 0], scale_batch=False)
    assert (with_zero - ours).abs().min() > 0.1


def test_a_reward_that_counts_only_with_another() -> None:
    """A length reward for right answers only, made before: wrong and short gets nothing."""
    right = torch.tensor([1.0, 1.0, 0.0, 0.0]).double()
    short = torch.tensor([1.0, 0.0, 1.0, 0.0]).double()
    ids = torch.zeros(4, dtype=torch.int64)
    conditioned = torch.stack([right, torch.where(right >= 1, short, 0.0)], dim=1)
    ours = decoupled_advantages(conditioned, ids)
    assert ours[2] == ours[3]
    assert ours[0] > ours[1] > ours[2]
    plain = decoupled_advantages(torch.stack([right, short], dim=1), ids)
    assert plain[2] > plain[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_an_all_equal_group_gets_exactly_zero(dtype: torch.dtype) -> None:
    """Beside groups that learn, whose advantages need not add up to 0 in the last bit."""
    rewards = torch.full((11, 2), 0.1, dtype=torch.float64).to(dtype)
    rewards[7:, 0] = torch.tensor([1, 0, 0, 3]).to(dtype)
    rewards[7:, 1] = torch.tensor([2, 2, 0, 0]).to(dtype)
    ids = torch.tensor([5] * 7 + [2] * 4)
    for options in ({}, {"eps": 1e-8}, {"weights": [0.3, 0.7], "batch_eps": 0}):
        ours = decoupled_advantages(rewards, ids, **options)
        assert (ours[:7] == 0).all()
        assert (ours[7:] != 0).any()
        assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    nothing = decoupled_advantages(rewards[:7], ids[:7], batch_eps=0)
    assert (nothing == 0).all()


@given(batch=batches(missing=True))
def test_rewards_that_cancel_leave_exactly_nothing(batch: Batch) -> None:
    """What rounding leaves of a sum that is 0 is not blown up by a small std."""
    against = torch.cat([batch["rewards"], -batch["rewards"]], dim=1)
    weights = batch["weights"].repeat(2)
    ours = decoupled_advantages(against, batch["group_ids"], weights=weights, batch_eps=0)
    assert (ours == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_the_dtype_of_rewards(dtype: torch.dtype) -> None:
    """float64 inside: the result is rounded once, at the end."""
    numbers = torch.randint(0, 9, (12, 3), generator=torch.Generator().manual_seed(0))
    rewards, ids, weights = numbers.to(dtype), [0] * 5 + [1] * 7, [1, 0.3, -0.7]
    ours = decoupled_advantages(rewards, ids, weights=weights)
    wide = torch.tensor(weights, dtype=torch.float64)
    wanted = decoupled_advantages(rewards.double(), ids, weights=wide)
    assert ours.dtype == torch.float32
    assert wanted.dtype == torch.float64
    assert torch.equal(ours, wanted.float())
    assert torch.equal(decoupled_advantages(rewards.tolist(), ids, weights=weights), wanted)
    assert not decoupled_advantages(wanted[:, None].requires_grad_(), ids).requires_grad


@pytest.mark.parametrize("unit", [1e-300, 1e-30, 1e30, 1e300])
def test_tiny_and_huge_rewards_and_weights_stay_in_range(unit: float) -> None:
    rewards = torch.tensor([[1.0, 0], [0, 2], [0, 1], [0, 0]]).double()
    ids = torch.zeros(4, dtype=torch.int64)
    close(decoupled_advantages(unit * rewards, ids), decoupled_advantages(rewards, ids))
    weight = min(unit, 1e30)
    scaled = decoupled_advantages(rewards, ids, weights=[weight, weight], batch_eps=0)
    close(scaled, decoupled_advantages(rewards, ids, batch_eps=0))
    assert (
        decoupled_advantages(rewards.float(), ids, weights=[1e30, -1e30], scale_batch=False)
        .isfinite()
        .all()
    )


# --- what counts, rounding, dtypes, devices -----------------------------------------------------


@pytest.mark.parametrize("lengths", [[0, 0], [1, 0], [0, 1], [0, 7]])
def test_a_batch_without_two_counted_responses_has_no_spread(lengths: list[int]) -> None:
    for eps in (1e-4, 0.0):
        for batch_ddof in (0, 1):
            ours = decoupled_advantages(
                [[1.0], [0.0]], [0, 0], lengths=lengths, batch_eps=eps, batch_ddof=batch_ddof
            )
            assert ours.tolist() == [0, 0]


@given(batch=batches(missing=True), empty=st.randoms(use_true_random=False))
def test_a_row_without_tokens_gets_zero_and_changes_no_other(batch: Batch, empty: Any) -> None:
    """The others are as if it had missed all its rewards in the batch's statistics only."""
    lengths = batch["lengths"].clone()
    for index in range(len(lengths)):
        lengths[index] *= empty.random() < 0.6
    ours = decoupled(batch, lengths=lengths)
    assert (ours[lengths == 0] == 0).all()
    total = decoupled(batch, scale_batch=False)
    known = ~batch["rewards"].isnan().all(dim=1) & (lengths > 0)
    each = total[known].repeat_interleave(lengths[known])
    if len(each) < 2 or each.max() - each.min() <= 1e-12 * each.abs().max():
        assert (ours == 0).all()
    else:
        wanted = (total - each.mean()) / torch.hypot(each.std(), torch.tensor(1e-4).double())
        close(ours[known], wanted[known])


def test_totals_that_differ_by_rounding_have_no_spread() -> None:
    """Only the winners of two groups have tokens; their z-scores miss each other by a bit."""
    rewards = [[0.1], [0.0], [0.0], [0.7], [0.0], [0.0]]
    total = decoupled_advantages(rewards, [0, 0, 0, 1, 1, 1], scale_batch=False)
    ours = decoupled_advantages(
        rewards, [0, 0, 0, 1, 1, 1], lengths=[3, 0, 0, 5, 0, 0], batch_eps=0.0
    )
    assert total[0] == pytest.approx(total[3].item(), rel=1e-14)
    assert ours.tolist() == [0] * 6


def test_rewards_that_differ_by_rounding_are_equal_in_each_column() -> None:
    rewards = [[0.1 + 0.2, 1.0], [0.3, 0.0], [1.0, 0.5], [0.0, 0.5]]
    ours = decoupled_advantages(rewards, [0, 0, 1, 1], scale_batch=False, ddof=0)
    assert ours.tolist() == [1, -1, 1, -1]
    narrow = torch.tensor(rewards) + torch.tensor([[2.0**-24, 0]] + [[0.0, 0]] * 3)
    assert len(narrow[:2, 0].unique()) == 2
    ours = decoupled_advantages(narrow, [0, 0, 1, 1], scale_batch=False, ddof=0)
    assert ours.tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16]
)
def test_rewards_and_weights_of_any_dtype(dtype: torch.dtype) -> None:
    rewards, ids = torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1]]), [0, 0, 1, 1]
    ours = decoupled_advantages(rewards.to(dtype), ids, weights=torch.ones(2).to(dtype))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, decoupled_advantages(rewards.float(), ids))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_lengths_of_any_integer_dtype(dtype: torch.dtype) -> None:
    lengths = torch.tensor([1, 2, 3, 4])
    rewards, ids = torch.tensor([[1.0], [0.0], [1.0], [3.0]]), [0, 0, 1, 1]
    ours = decoupled_advantages(rewards, ids, lengths=lengths.to(dtype))
    assert torch.equal(ours, decoupled_advantages(rewards, ids, lengths=lengths))


def test_the_default_device_moves_nothing() -> None:
    rewards, ids = torch.tensor([[1.0, 0], [0, 0], [1, 1], [3, 1]]), torch.tensor([0, 0, 1, 1])
    weights, lengths = torch.tensor([1.0, 0.5]), torch.tensor([1, 2, 3, 4])
    wanted = decoupled_advantages(rewards, ids, weights=weights, lengths=lengths)
    with torch.device("meta"):
        ours = decoupled_advantages(rewards, ids, weights=weights, lengths=lengths)
        listed = decoupled_advantages(
            rewards, ids.tolist(), weights=weights.tolist(), lengths=lengths.tolist()
        )
        decoupled_advantages(rewards, ids)
    assert torch.equal(ours, wanted)
    assert torch.equal(listed, wanted)
