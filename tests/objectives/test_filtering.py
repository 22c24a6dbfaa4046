"""Which responses and prompts count: dynamic sampling with its refill, overlong filtering."""

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
    Refill,
    equal_groups,
    group_advantages,
    informative_rows,
    overlong_filter,
    overlong_penalty,
    policy_loss,
    probability_all_equal,
    refill,
)

DATA = Path(__file__).parents[1] / "data"
VECTORS = {
    vector["name"]: vector
    for vector in json.loads((DATA / "parity_vectors.json").read_text())["vectors"]
}
CASES = {case["id"]: case for case in json.loads((DATA / "cases.json").read_text())}
RATES = torch.tensor([0.0, 0.1, 0.4, 0.6, 1.0])  # success rates of prompts to draw from
many = settings(deadline=None, derandomize=True, max_examples=60)


# --- informative prompts ------------------------------------------------------------------------


def test_the_worked_example_of_dynamic_sampling() -> None:
    vector = VECTORS["dapo_dynamic_sampling_keep"]
    correct = torch.tensor(vector["inputs"]["is_correct"])
    ids = torch.arange(len(correct)).repeat_interleave(correct.shape[1])
    for rewards in (correct, 2 * correct - 1, correct.bool()):  # 0/1, DAPO's -1/1, booleans
        kept = informative_rows(rewards.flatten(), ids).view(correct.shape)
        assert kept.all(dim=1).tolist() == kept.any(dim=1).tolist() == vector["expected"]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=6))
    names = draw(st.permutations(range(-3, 3)))
    one = st.sampled_from([0.0, 1.0, 1.0, 0.25, math.nan])
    ids = [name for name, size in zip(names, sizes, strict=False) for _ in range(size)]
    rewards = draw(st.lists(one, min_size=len(ids), max_size=len(ids)))
    order = draw(st.permutations(range(len(ids))))
    return (
        torch.tensor([rewards[index] for index in order], dtype=torch.float64),
        torch.tensor([ids[index] for index in order]),
    )


def known_values(rewards: Tensor, ids: Tensor) -> dict[int, set[float]]:
    """Of every prompt, in the order in which they come."""
    values: dict[int, set[float]] = {}
    for name, reward in zip(ids.tolist(), rewards.tolist(), strict=True):
        values.setdefault(name, set()).update([] if math.isnan(reward) else [reward])
    return values


@given(batch=batches(), shuffle=st.randoms(use_true_random=False))
@many
def test_the_rows_of_prompts_that_teach_something(batch: Any, shuffle: Any) -> None:
    """Written down prompt by prompt; they are the prompts that have an advantage."""
    rewards, ids = batch
    kept = informative_rows(rewards, ids)
    assert kept.dtype == torch.bool
    values = known_values(rewards, ids)
    assert kept.tolist() == [len(values[name]) > 1 for name in ids.tolist()]
    advantages = group_advantages(rewards, ids)
    for name in values:
        assert bool(kept[ids == name].any()) == bool((advantages[ids == name] != 0).any())
    share = 1 - len({name for name in ids[kept].tolist()}) / len(values)
    assert equal_groups(rewards, ids).share.item() == pytest.approx(share)
    order = list(range(len(ids)))
    shuffle.shuffle(order)
    assert torch.equal(informative_rows(rewards[order], ids[order]), kept[order])
    assert torch.equal(informative_rows(3 * rewards - 8, ids), kept)


@given(batch=batches(), wanted=st.integers(0, 7))
@many
def test_the_surplus_is_dropped_first_come_first_kept(batch: Any, wanted: int) -> None:
    rewards, ids = batch
    first = [name for name, values in known_values(rewards, ids).items() if len(values) > 1]
    kept = informative_rows(rewards, ids, wanted=wanted)
    assert kept.tolist() == [name in first[:wanted] for name in ids.tolist()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_is_equal_up_to_rounding(dtype: torch.dtype) -> None:
    """Seven times 0.1 are equal in every dtype; numbers that rounding cannot have made of one are
    not (neighbours, where the dtype is coarser than the arithmetic), down to the smallest."""
    steps = 10 if dtype.itemsize >= 4 else 1
    near = torch.tensor([1.0, 1.0 + steps * torch.finfo(dtype).eps], dtype=dtype)
    least = torch.tensor([0.0, 5e-324], dtype=torch.float64)
    assert not informative_rows(torch.full((7,), 0.1, dtype=dtype), [4] * 7).any()
    assert informative_rows(near, [0, 0]).all()
    assert informative_rows(least, [0, 0]).all()


def test_the_verifiers_rewards_decide_not_the_penalized_ones() -> None:
    """Two wrong answers, one of them too long: nothing to learn about the task, but with the
    overlong penalty their rewards differ."""
    wrong = torch.zeros(2, dtype=torch.float64)
    shaped = wrong + overlong_penalty([50, 100], max_length=100, cache_length=20)
    assert not informative_rows(wrong, [0, 0]).any()
    assert informative_rows(shaped, [0, 0]).all()


# --- the refill ---------------------------------------------------------------------------------


@given(
    kept=st.integers(0, 20),
    wanted=st.integers(1, 10),
    rounds=st.integers(0, 6),
    limit=st.one_of(st.none(), st.integers(1, 5)),
)
@many
def test_the_rule_of_the_refill(kept: int, wanted: int, rounds: int, limit: int | None) -> None:
    ours = refill(kept, wanted, rounds, max_rounds=limit)
    full, last = kept >= wanted, limit is not None and rounds >= limit
    assert ours == (Refill(0, True) if full or last else Refill(wanted, False))


def simulate(
    rates: Tensor, wanted: int, size: int, limit: int | None, seed: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """A step of dynamic sampling: each round's rewards, then rewards and ids of them all."""
    generator = torch.Generator().manual_seed(seed)
    rounds: list[Tensor] = []
    rewards = torch.zeros(0, dtype=torch.float64)
    ids = torch.zeros(0, dtype=torch.int64)
    kept = 0
    while not (step := refill(kept, wanted, len(rounds), max_rounds=limit)).stop:
        drawn = rates[torch.randint(len(rates), (step.prompts,), generator=generator)]
        chance = torch.rand(step.prompts, size, generator=generator, dtype=torch.float64)
        rounds.append((chance < drawn[:, None]).double())
        rewards = torch.cat([part.flatten() for part in rounds])
        ids = torch.arange(len(rewards)) // size
        kept = int(informative_rows(rewards, ids).sum()) // size
    return rounds, rewards, ids


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [None, 1, 3])
def test_a_simulated_step(seed: int, limit: int | None) -> None:
    """Rounds are drawn while too few prompts are kept, not once more; then the batch holds the
    first informative prompts, in full groups, as many as wanted, or all there are at the limit."""
    wanted, size = 5, 4
    rounds, rewards, ids = simulate(RATES, wanted, size, limit, seed)
    informative = [
        0 < row.sum() < size for part in rounds for row in part
    ]  # without the functions under test
    after_each = [sum(informative[: wanted * n]) for n in range(1, len(rounds) + 1)]
    assert all(count < wanted for count in after_each[:-1])
    assert limit is None or len(rounds) <= limit
    if limit is None or len(rounds) < limit:
        assert after_each[-1] >= wanted
    assert all(len(part) == wanted for part in rounds)
    kept = informative_rows(rewards, ids, wanted=wanted)
    first = [number for number, useful in enumerate(informative) if useful][:wanted]
    assert ids[kept].tolist() == [number for number in first for _ in range(size)]
    advantages = group_advantages(rewards[kept], ids[kept]) if first else torch.zeros(0)
    assert (advantages != 0).all()


def test_the_simulation_meets_every_end() -> None:
    """A batch that is full at once, one that is refilled, with a surplus and without, and one that
    the limit leaves short, down to nothing."""
    found = set()
    for seed in range(20):
        rounds, rewards, ids = simulate(RATES, 5, 4, 3, seed)
        kept = int(informative_rows(rewards, ids).sum()) // 4
        found |= {("rounds", len(rounds)), ("kept", (kept > 5) - (kept < 5))}
    assert {("rounds", 2), ("rounds", 3), ("kept", -1), ("kept", 0), ("kept", 1)} <= found
    rounds, rewards, ids = simulate(torch.tensor([0.5]), 2, 16, 3, 0)
    assert len(rounds) == 1
    rounds, rewards, ids = simulate(torch.tensor([0.0, 1.0]), 5, 4, 3, 0)
    assert len(rounds) == 3
    assert not informative_rows(rewards, ids, wanted=5).any()


@pytest.mark.parametrize("size", CASES["F07"]["input"]["G"])
def test_f07_what_dynamic_sampling_pays_for_a_group_that_teaches(size: int) -> None:
    """The share of all-equal groups is the case's; the mean number of groups sampled for one that
    is not is 1 over the rest, found here by following the refill rule with its probabilities."""
    given, expected = CASES["F07"]["input"], CASES["F07"]["expected"]
    equal = float(probability_all_equal(given["p"], size))
    wanted = expected["P_all_equal"][given["G"].index(size)]
    assert equal == pytest.approx(wanted, abs=1e-6)
    sampled, going, rounds = 0.0, 1.0, 0
    while not (step := refill(0, 1, rounds, max_rounds=2000)).stop:
        sampled += going * step.prompts
        going *= equal  # it goes on if the round's only group was all equal
        assert refill(1, 1, rounds + 1, max_rounds=2000).stop
        rounds += 1
    assert rounds == 2000
    assert sampled == pytest.approx(1 / (1 - equal), rel=1e-12)


# --- overlong filtering -------------------------------------------------------------------------


def test_the_worked_example_of_overlong_filtering() -> None:
    """DAPO's loss divides by the tokens that are left, the mean per response by the responses that
    are left; TRL's "grpo" divides by all rows, which is `total`."""
    given, expected = (VECTORS["dapo_overlong_filtering"][key] for key in ("inputs", "expected"))
    new, old, advantages, mask = (
        torch.tensor(given[key], dtype=torch.float64)
        for key in ("new_logp", "old_logp", "advantages", "mask")
    )
    left = overlong_filter(mask, torch.tensor(given["truncated"]))
    assert left.dtype == torch.bool
    assert int(left.sum()) == expected["n_tokens"]
    options: dict[str, Any] = {
        "epsilon_low": given["eps_lo"],
        "epsilon_high": given["eps_hi"],
        "allow_empty": True,
    }
    by_token, _ = policy_loss(new, old, advantages, left, aggregation="token_mean", **options)
    assert by_token.item() == pytest.approx(expected["token_mean_loss"], abs=1e-12)
    as_trl, _ = policy_loss(new, old, advantages, left, total=len(mask), **options)
    theirs = expected["seq_mean_token_mean_loss_trl_divides_by_all_B"]
    assert as_trl.item() == pytest.approx(theirs, abs=1e-12)
    ours, _ = policy_loss(new, old, advantages, left, **options)
    assert ours.item() == pytest.approx(theirs * 8 / 6, abs=1e-12)


@given(
    rows=st.lists(
        st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.booleans()), min_size=1
    ),
    dtype=st.sampled_from([torch.bool, torch.int64, torch.float32, torch.bfloat16]),
)
@many
def test_overlong_filtering_row_by_row(rows: list, dtype: torch.dtype) -> None:
    mask = torch.tensor([slots for slots, _ in rows]).to(dtype)
    truncated = torch.tensor([cut for _, cut in rows])
    before = mask.clone()
    left = overlong_filter(mask, truncated)
    assert left.tolist() == [[False] * 3 if cut else slots for slots, cut in rows]
    assert torch.equal(mask, before)  # a new mask, not the old one changed
    assert torch.equal(overlong_filter(left, truncated), left)


def test_a_truncated_response_still_shapes_its_group() -> None:
    """Its reward is compared with the others', only its own tokens leave the loss."""
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), [0] * 4
    cut = torch.tensor([False, False, True, False])
    logprobs = torch.full((4, 2), -1.0, dtype=torch.float64)
    logprobs[2] = math.nan  # not even looked at
    new = logprobs.clone().requires_grad_()
    advantages = group_advantages(rewards, ids)
    loss, _ = policy_loss(
        new, logprobs, advantages, overlong_filter(torch.ones(4, 2), cut), allow_empty=True
    )
    (gradient,) = torch.autograd.grad(loss, new)
    assert (gradient[2] == 0).all()
    third = 1 / 3
    wanted = -advantages[~cut] * third / 2
    torch.testing.assert_close(gradient[~cut], wanted[:, None].expand(3, 2))
    without = group_advantages(rewards[~cut], ids[:3])
    assert (advantages[~cut] - without).abs().max() > 0.1


def test_rewards_that_differ_by_rounding_teach_nothing() -> None:
    rewards, ids = [0.1 + 0.2, 0.3, 1.0, 0.0], [4, 4, 2, 2]
    assert informative_rows(rewards, ids).tolist() == [False, False, True, True]
    narrow = torch.tensor([1.0, 1 + 2.0**-23, 1.0, 1 + 2.0**-18])
    assert informative_rows(narrow, ids).tolist() == [False, False, True, True]


def test_the_default_device_does_not_move_the_rows() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([4, 4, 2, 2])
    with torch.device("meta"):
        rows = informative_rows(rewards, ids, wanted=1)
        mask = overlong_filter(rewards.bool()[:, None], rewards == 0)
    assert rows.tolist() == [True, True, False, False]
    assert mask.flatten().tolist() == [True, False, True, True]
