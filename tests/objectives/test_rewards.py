"""Question 1, the functions of a reward: KL penalty, overlong penalty, condition."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.objectives import (
    conditioned_rewards,
    kl_penalized_rewards,
    kl_shaped_rewards,
    overlong_penalty,
)

DATA = Path(__file__).parents[1] / "data"
VECTORS = {
    vector["name"]: vector
    for vector in json.loads((DATA / "parity_vectors.json").read_text())["vectors"]
}
CASES = {case["id"]: case for case in json.loads((DATA / "cases.json").read_text())}
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
many = settings(deadline=None, derandomize=True, max_examples=60)


def close(ours: Tensor, wanted: Any, atol: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), rtol=0, atol=atol, equal_nan=True)


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# --- the KL penalty -----------------------------------------------------------------------------


@st.composite
def responses(draw: st.DrawFn) -> dict[str, Any]:
    """Rewards, two policies' log-probs and a mask that may have holes, but no empty row."""
    rows, slots = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = torch.rand(rows, slots, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.1]))
    some = torch.randint(slots, (rows,), generator=generator)
    mask[torch.arange(rows), some] = True
    old, ref = (
        -torch.randn(rows, slots, generator=generator, dtype=torch.float64).abs() for _ in range(2)
    )
    rewards = torch.randn(rows, generator=generator, dtype=torch.float64)
    missing = torch.rand(rows, generator=generator) < draw(st.sampled_from([0.0, 0.4]))
    rewards[missing] = math.nan
    beta = draw(st.sampled_from([0.0, 0.05, 2.0]))
    return {"rewards": rewards, "old": old, "ref": ref, "mask": mask, "beta": beta}


def shaped(batch: dict[str, Any], **other: Any) -> Tensor:
    batch = batch | other
    return kl_shaped_rewards(
        batch["rewards"], batch["old"], batch["ref"], batch["mask"], beta=batch["beta"]
    )


def penalized(batch: dict[str, Any], **other: Any) -> Tensor:
    batch = batch | other
    return kl_penalized_rewards(
        batch["rewards"], batch["old"], batch["ref"], batch["mask"], beta=batch["beta"]
    )


def test_the_worked_example_of_the_shaped_reward() -> None:
    given, expected = (VECTORS["rlhf_kl_shaped_reward"][key] for key in ("inputs", "expected"))
    batch = {
        "rewards": tensor(given["score"]),
        "old": tensor(given["old_logp"]),
        "ref": tensor(given["ref_logp"]),
        "mask": tensor(given["mask"]),
        "beta": given["beta"],
    }
    close(shaped(batch), expected["per_token"])
    close(penalized(batch), expected["sum_equals_score_minus_beta_logratio"])


@given(batch=responses())
@many
def test_what_the_tokens_get_is_what_the_response_gets(batch: dict) -> None:
    """Written down slot by slot, without the functions under test."""
    per_token, whole = shaped(batch), penalized(batch)
    for row, reward in enumerate(batch["rewards"].tolist()):
        slots = batch["mask"][row].nonzero()[:, 0].tolist()
        wanted = [0.0] * batch["mask"].shape[1]
        if not math.isnan(reward):
            for slot in slots:
                gap = (batch["old"][row, slot] - batch["ref"][row, slot]).item()
                wanted[slot] = -batch["beta"] * gap
            wanted[slots[-1]] += reward
            close(per_token[row].sum(), whole[row])
        else:
            assert whole[row].isnan()
        close(per_token[row], wanted)


@pytest.mark.parametrize("function", [shaped, penalized])
@given(batch=responses(), garbage=st.sampled_from(GARBAGE))
@many
def test_padding_may_hold_anything(function: Any, batch: dict, garbage: float) -> None:
    filled = {key: batch[key].masked_fill(~batch["mask"], garbage) for key in ("old", "ref")}
    one, two = function(batch), function(batch, **filled)
    assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
    assert shaped(batch, **filled)[~batch["mask"]].abs().sum() == 0


@pytest.mark.parametrize("function", [shaped, penalized])
@given(batch=responses(), shuffle=st.randoms(use_true_random=False))
@many
def test_the_order_of_the_rows_means_nothing(function: Any, batch: dict, shuffle: Any) -> None:
    order = list(range(len(batch["rewards"])))
    shuffle.shuffle(order)
    moved = {key: batch[key][order] for key in ("rewards", "old", "ref", "mask")}
    ours, wanted = function(batch, **moved), function(batch)[order]
    assert torch.equal(ours.nan_to_num(7.0), wanted.nan_to_num(7.0))


@given(batch=responses(), shift=st.floats(-5, 5), factor=st.sampled_from([0.5, 8.0]))
@many
def test_shift_and_scale_of_the_reward(batch: dict, shift: float, factor: float) -> None:
    """A constant moves the last token alone; reward and beta in other units change the units."""
    rewards = batch["rewards"]
    moved = shaped(batch, rewards=rewards + shift) - shaped(batch)
    last = batch["mask"].flip(1).int().argmax(1)
    last = batch["mask"].shape[1] - 1 - last
    wanted = torch.zeros_like(moved)
    wanted[torch.arange(len(rewards)), last] = torch.where(rewards.isnan(), 0.0, tensor(shift))
    close(moved, wanted)
    scaled = {"rewards": factor * rewards, "beta": factor * batch["beta"]}
    close(shaped(batch, **scaled), factor * shaped(batch))
    close(penalized(batch, **scaled), factor * penalized(batch))


def test_a_missing_reward_leaves_no_nan_and_no_penalty() -> None:
    old, mask = tensor([[-1.0, -2.0], [-1.0, -2.0]]), torch.ones(2, 2)
    ours = kl_shaped_rewards([None, 1.0], old, old * 2, mask, beta=0.5)
    assert ours.tolist() == [[0, 0], [-0.5, 0]]
    whole = kl_penalized_rewards([None, 1.0], old, old * 2, mask, beta=0.5)
    close(whole, [math.nan, -0.5])


def test_the_penalty_has_no_gradient_and_a_wide_dtype() -> None:
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    half = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.bfloat16)
    for function in (kl_shaped_rewards, kl_penalized_rewards):
        reward = torch.tensor([1.0], requires_grad=True)
        ours = function(reward, logprobs, logprobs * 2, torch.ones(1, 3), beta=0.1)
        assert not ours.requires_grad
        assert ours.dtype == torch.float32
        for rewards, logs, dtype in (
            (torch.tensor([1]), half, torch.float32),
            (torch.tensor([1.0], dtype=torch.float16), half, torch.float32),
            ([1.0], half, torch.float64),
            (torch.tensor([1.0]), half.double(), torch.float64),
        ):
            ours = function(rewards, logs, logs * 2, torch.ones(1, 3), beta=0.1)
            assert ours.dtype == dtype
            close(ours.sum(), 1 - 0.1 * 3.5, 1e-6)


# --- the overlong penalty -----------------------------------------------------------------------


def test_a36_overlong_penalty_edges() -> None:
    given, expected = CASES["A36"]["input"], CASES["A36"]["expected"]
    longest, lengths = given["L_max"], given["lengths"]
    ours = overlong_penalty(lengths, max_length=longest, cache_length=given["L_cache"])
    close(ours, expected["penalty"])
    as_tensor = overlong_penalty(
        torch.tensor(lengths, dtype=torch.int32), max_length=longest, cache_length=given["L_cache"]
    )
    assert torch.equal(as_tensor, ours)
    without = overlong_penalty(
        [0, 1, 99, 100, 101, 10**9], max_length=longest, cache_length=0
    )  # "0 up to 100, -1 above, no division by zero"
    assert without.tolist() == [0, 0, 0, 0, -1, -1]
    with pytest.raises(ValueError, match="cache_length must be at most max_length = 100"):
        overlong_penalty(lengths, max_length=longest, cache_length=120)


@pytest.mark.parametrize("name", ["dapo_soft_overlong", "dapo_soft_overlong_paper_scale"])
def test_the_overlong_penalty_of_the_paper(name: str) -> None:
    given = VECTORS[name]["inputs"]
    ours = overlong_penalty(
        given["lengths"], max_length=given["L_max"], cache_length=given["L_cache"]
    )
    close(ours, VECTORS[name]["expected"], VECTORS[name]["tolerance"])
    assert ours.dtype == torch.float64


@given(longest=st.integers(1, 300), data=st.data())
@many
def test_the_overlong_penalty_at_every_length(longest: int, data: st.DataObject) -> None:
    """Zero, then a straight line down to -1 at the longest length, then -1."""
    cache = data.draw(st.integers(0, longest))
    lengths = torch.arange(longest + 20)
    ours = overlong_penalty(lengths, max_length=longest, cache_length=cache)
    start = longest - cache
    assert (ours[: start + 1] == 0).all()
    assert (ours[longest + 1 :] == -1).all()
    inside = ours[start : longest + 1]
    close(inside, -torch.linspace(0, 1, cache + 1, dtype=torch.float64))
    assert ((ours <= 0) & (ours >= -1)).all()


# --- a condition --------------------------------------------------------------------------------


def test_the_worked_example_of_a_condition() -> None:
    given, expected = (VECTORS["gdpo_conditioned_reward"][key] for key in ("inputs", "expected"))
    for read in (tensor, list):
        ours = conditioned_rewards(
            read(given["r_easy"]), read(given["r_hard"]), threshold=given["t"]
        )
        close(ours, expected)


numbers = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 0.5, 1.0]), st.just(math.nan))


@given(pairs=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), at=st.floats(-2, 2))
@many
def test_a_condition_row_by_row(pairs: list, at: float) -> None:
    rewards, condition = (tensor(column) for column in zip(*pairs, strict=True))
    ours = conditioned_rewards(rewards, condition, threshold=at)
    for got, (reward, earned) in zip(ours.tolist(), pairs, strict=True):
        if math.isnan(reward) or math.isnan(earned):
            assert math.isnan(got)
        else:
            assert got == (reward if earned >= at else 0.0)


def test_the_dtype_of_conditioned_rewards() -> None:
    half = torch.tensor([0.5, 2.0, 3.0], dtype=torch.bfloat16)
    for rewards, condition, dtype in (
        (half, half.double(), torch.float32),
        (torch.tensor([0, 2, 3]), half, torch.float32),
        (half.double(), torch.tensor([False, True, True]), torch.float64),
        ([0.5, 2.0, 3.0], half, torch.float64),
    ):
        ours = conditioned_rewards(rewards, condition, threshold=1)
        assert ours.dtype == dtype
        assert ours.tolist() == [0, 2, 3]
    graph = torch.ones(2, requires_grad=True)
    assert not conditioned_rewards(graph, graph, threshold=0.5).requires_grad
    mixed = conditioned_rewards([1.0, None, 1.0], torch.tensor([1.0, 1.0, math.nan]), threshold=1)
    close(mixed, [1.0, math.nan, math.nan])


# --- dtypes, devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_the_overlong_penalty_takes_lengths_of_any_integer_dtype(dtype: torch.dtype) -> None:
    lengths = torch.tensor([3, 99, 101])
    ours = overlong_penalty(lengths.to(dtype), max_length=100, cache_length=2)
    assert torch.equal(ours, overlong_penalty(lengths, max_length=100, cache_length=2))


def test_the_default_device_moves_no_reward() -> None:
    rewards, lengths = tensor([1.0, 0.0]), torch.tensor([3, 99])
    logprobs, mask = tensor([[-1.0, -2.0], [-0.5, -1.0]]), torch.tensor([[1, 1], [1, 0]])
    calls = (
        lambda: overlong_penalty(lengths, max_length=100, cache_length=2),
        lambda: conditioned_rewards(rewards, rewards, threshold=0.5),
        lambda: kl_penalized_rewards(rewards, logprobs, logprobs * 2, mask, beta=0.1),
        lambda: kl_shaped_rewards(rewards, logprobs, logprobs * 2, mask, beta=0.1),
    )
    for call in calls:
        wanted = call()
        with torch.device("meta"):
            assert torch.equal(call(), wanted)
