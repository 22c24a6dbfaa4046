"""A critic's advantages, whitening and value loss: by enumeration, by definition, by properties.

The tiny world: tokens 0 and 1, and 2 to stop; after three tokens a response is cut.  That makes
fifteen responses, each with its probability, so every expectation here is a finite sum.
"""

import itertools
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
    AGGREGATIONS,
    generalized_advantages,
    length_adaptive_lam,
    value_loss,
    whiten,
)

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlcore")

FILE = Path(__file__).parents[1] / "data" / "cases.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())}
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


def case(name: str) -> tuple[dict, dict]:
    return CASES[name]["input"], CASES[name]["expected"]


def close(ours: Tensor, wanted: Any, atol: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), rtol=0, atol=atol)


def row(numbers: list[float]) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


# --- the policy gradient with a critic, exactly -------------------------------------------------

STOP, LONGEST = 2, 3
PREFIXES = [
    prefix for size in range(LONGEST) for prefix in itertools.product((0, 1), repeat=size)
]  # the states in which a token is drawn
STATE = {prefix: number for number, prefix in enumerate(PREFIXES)}
RESPONSES = [
    *((*prefix, STOP) for prefix in PREFIXES),
    *itertools.product((0, 1), repeat=LONGEST),
]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class World:
    """A policy (logits per state) and a reward for each token in each state."""

    def __init__(self, seed: int, cut: int = LONGEST) -> None:
        self.theta = random(len(PREFIXES), 3, seed=seed).requires_grad_()
        self.paid = random(len(PREFIXES), 3, seed=seed + 100)
        short = [y for y in RESPONSES if len(y) <= cut]
        cut_off = [*itertools.product((0, 1), repeat=cut)] if cut < LONGEST else []
        self.responses = [*short, *cut_off]
        self.is_cut = torch.tensor([False] * len(short) + [True] * len(cut_off))
        self.mask = torch.tensor([[t < len(y) for t in range(cut)] for y in self.responses])
        self.rewards = self.per_slot(self.paid)
        self.logprobs = self.per_slot(self.theta.log_softmax(-1))
        self.chances = torch.where(self.mask, self.logprobs, 0.0).sum(1).exp().detach()

    def per_slot(self, table: Tensor) -> Tensor:
        """table[state, token] at each token of each response, NaN in the slots it does not have."""
        rows = [
            [table[STATE[y[:t]], y[t]] if t < len(y) else torch.tensor(math.nan) for t in slots]
            for y in self.responses
            for slots in [range(self.mask.shape[1])]
        ]
        return torch.stack([torch.stack(list(cells)).double() for cells in rows])

    def states(self, values: Tensor) -> Tensor:
        """values[state] where each token was drawn, NaN elsewhere."""
        return self.per_slot(values[:, None].expand(-1, 3))

    def true_values(self, gamma: float = 1.0) -> Tensor:
        """V of every state under the policy, from the longest prefixes back."""
        policy, values = self.theta.detach().softmax(-1), torch.zeros(len(PREFIXES)).double()
        for prefix in reversed(PREFIXES):
            state = STATE[prefix]
            for token in range(3):
                after = STATE.get((*prefix, token))
                worth = self.paid[state, token] + (gamma * values[after] if after else 0.0)
                values[state] += policy[state, token] * worth
        return values

    def expected_gradient(self, advantages: Tensor) -> Tensor:
        """E sum_t A_t grad log pi(y_t), over all responses."""
        weighted = torch.where(self.mask, advantages * self.logprobs, 0.0).sum(1) * self.chances
        return torch.autograd.grad(weighted.sum(), self.theta, retain_graph=True)[0]

    def true_gradient(self) -> Tensor:
        """of J = E sum_t r_t, from the probabilities of whole responses."""
        chances = torch.where(self.mask, self.logprobs, 0.0).sum(1).exp()
        earned = torch.where(self.mask, self.rewards, 0.0).sum(1)
        return torch.autograd.grad((chances * earned).sum(), self.theta, retain_graph=True)[0]


def test_the_tiny_world_is_one() -> None:
    world = World(0)
    assert len(world.responses) == 15
    assert world.chances.sum().item() == pytest.approx(1)
    earned = torch.where(world.mask, world.rewards, 0.0).sum(1)
    close((world.chances * earned).sum(), world.true_values()[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_with_the_true_values_every_lambda_is_unbiased(seed: int, lam: float) -> None:
    world = World(seed)
    values = world.states(world.true_values())
    estimates = generalized_advantages(world.rewards, values, world.mask, lam=lam)
    close(world.expected_gradient(estimates.advantages), world.true_gradient())


@pytest.mark.parametrize("seed", range(3))
def test_with_lambda_1_any_values_are_unbiased(seed: int) -> None:
    """They are a baseline then: what was already earned decides, whatever the critic says."""
    world = World(seed)
    for wrong in (torch.zeros(7).double(), 10 * random(7, seed=9)):
        estimates = generalized_advantages(
            world.rewards, world.states(wrong), world.mask, gamma=1, lam=1
        )
        close(world.expected_gradient(estimates.advantages), world.true_gradient(), 1e-11)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_the_bias_of_wrong_values_is_the_stated_one(gamma: float, lam: float) -> None:
    """Values off by e: as if each later state paid gamma (1 - lam) (gamma lam)^(k-1) e more."""
    world, error = World(0), random(7, seed=9)
    exact = world.true_values(gamma)
    ours, best = (
        generalized_advantages(
            world.rewards, world.states(values), world.mask, gamma=gamma, lam=lam
        ).advantages
        for values in (exact + error, exact)
    )
    off = torch.where(world.mask, world.states(error), 0.0)
    extra = torch.zeros_like(off)
    for t in range(LONGEST):
        for k in range(1, LONGEST - t):
            extra[:, t] += gamma * (1 - lam) * (gamma * lam) ** (k - 1) * off[:, t + k]
    bias = world.expected_gradient(ours) - world.expected_gradient(best)
    close(bias, world.expected_gradient(extra))
    assert bias.abs().max() > 1e-3
    if gamma == 1:
        close(world.expected_gradient(best), world.true_gradient())


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_bootstrapping_undoes_the_bias_of_a_length_limit(lam: float) -> None:
    """Responses cut after two tokens.  With the true value of what would have come, the gradient is
    that of the uncut objective; without, it is that of a world where nothing comes."""
    whole, cut = World(1), World(1, cut=2)
    exact = whole.true_values()
    what_comes = [
        exact[STATE[y]] if is_cut else 0.0
        for y, is_cut in zip(cut.responses, cut.is_cut, strict=True)
    ]
    after = torch.tensor(what_comes, dtype=torch.float64)
    values = cut.states(exact)
    given = generalized_advantages(
        cut.rewards, values, cut.mask, lam=lam, bootstrap_values=after
    ).advantages
    drawn = slice(0, 3)  # the states in which the first two tokens are drawn
    close(cut.expected_gradient(given)[drawn], whole.true_gradient()[drawn])
    without = generalized_advantages(cut.rewards, values, cut.mask, lam=lam).advantages
    missed = cut.expected_gradient(without) - cut.expected_gradient(given)
    assert missed[drawn].abs().max() > 1e-2
    if lam == 1:
        close(cut.expected_gradient(without), cut.true_gradient())


# --- the recursion ------------------------------------------------------------------------------


def by_definition(
    rewards: list, values: list, mask: list, gamma: float, lam: float, after: float
) -> tuple[list, list]:
    """One row: the double sum over what is still to come, of the real tokens only."""
    real = [t for t, here in enumerate(mask) if here]
    v = [values[t] for t in real] + [after]
    delta = [rewards[t] + gamma * v[n + 1] - v[n] for n, t in enumerate(real)]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for n, t in enumerate(real):
        advantages[t] = sum((gamma * lam) ** (m - n) * delta[m] for m in range(n, len(real)))
        returns[t] = advantages[t] + v[n]
    return advantages, returns


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Rewards, values, a mask with holes on any side, gamma, a lambda per row, what comes after."""
    rows, slots = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    lines = st.lists(st.booleans(), min_size=slots, max_size=slots).filter(any)
    mask = torch.tensor(draw(st.lists(lines, min_size=rows, max_size=rows)))
    seed = draw(st.integers(0, 2**32))
    unit = st.sampled_from([0.0, 0.3, 0.95, 1.0])
    return {
        "rewards": random(rows, slots, seed=seed),
        "values": random(rows, slots, seed=seed + 1),
        "mask": mask,
        "gamma": draw(unit),
        "lam": torch.tensor(
            draw(st.lists(unit, min_size=rows, max_size=rows)), dtype=torch.float64
        ),
        "after": random(rows, seed=seed + 2) * draw(st.integers(0, 1)),
        "garbage": draw(st.sampled_from(GARBAGE)),
    }


def estimate(batch: dict[str, Any], **changed: Any) -> Any:
    b = batch | changed
    return generalized_advantages(
        b["rewards"],
        b["values"],
        b["mask"],
        gamma=b["gamma"],
        lam=b["lam"],
        bootstrap_values=b["after"],
    )


@given(batch=batches())
def test_the_recursion_is_the_double_sum(batch: dict[str, Any]) -> None:
    ours = estimate(batch)
    names = ("rewards", "values", "mask", "lam", "after")
    for index, each in enumerate(zip(*(batch[name].tolist() for name in names), strict=True)):
        rewards, values, mask, lam, after = each
        wanted = by_definition(rewards, values, mask, batch["gamma"], lam, after)
        close(ours.advantages[index], wanted[0])
        close(ours.returns[index], wanted[1])


@given(batch=batches())
def test_one_lambda_for_all_rows_is_the_same_for_each(batch: dict[str, Any]) -> None:
    each = torch.full((len(batch["mask"]),), 0.9, dtype=torch.float64)
    one_by_one, single = estimate(batch, lam=each), estimate(batch, lam=0.9)
    assert torch.equal(single.advantages, one_by_one.advantages)


@given(batch=batches())
def test_masked_slots_may_hold_anything(batch: dict[str, Any]) -> None:
    clean = estimate(batch)
    dirty = {
        name: torch.where(batch["mask"], batch[name], batch["garbage"])
        for name in ("rewards", "values")
    }
    ours = estimate(batch | dirty)
    for got, wanted in zip(ours, clean, strict=True):
        assert torch.equal(got, wanted)
        assert (got[~batch["mask"]] == 0).all()
    for mask in (batch["mask"].int(), batch["mask"].double()):
        assert torch.equal(estimate(batch, mask=mask).advantages, clean.advantages)


@given(batch=batches(), shuffle=st.randoms(use_true_random=False))
def test_rows_do_not_know_each_other(batch: dict[str, Any], shuffle: Any) -> None:
    order = list(range(len(batch["mask"])))
    shuffle.shuffle(order)
    names = ("rewards", "values", "mask", "lam", "after")
    shuffled = estimate(batch | {name: batch[name][order] for name in names})
    for got, wanted in zip(shuffled, estimate(batch), strict=True):
        close(got, wanted[order])
    alone = estimate(batch | {name: batch[name][:1] for name in names})
    close(alone.advantages, estimate(batch).advantages[:1])


@given(batch=batches())
def test_where_the_padding_is_means_nothing(batch: dict[str, Any]) -> None:
    """Right, left, in between: the same numbers at the real tokens."""
    mask, ours = batch["mask"], estimate(batch)
    for descending in (True, False):
        order = mask.int().argsort(dim=1, descending=descending, stable=True)
        moved = {name: batch[name].gather(1, order) for name in ("rewards", "values", "mask")}
        close(estimate(batch | moved).advantages, ours.advantages.gather(1, order))


def test_a21_the_recursion_runs_over_real_tokens_only() -> None:
    given_, expected = case("A21")
    rewards, mask = row(given_["rewards"]), torch.tensor([given_["mask"]])
    values, arguments = row(given_["values"]), {"gamma": given_["gamma"], "lam": given_["lambda"]}
    poisoned = torch.where(mask == 1, values, math.nan)
    for held in (values, poisoned):
        ours = generalized_advantages(rewards, held, mask, **arguments)
        close(ours.advantages, [expected["advantages"]], 1e-12)
        close(ours.returns, [expected["returns"]], 1e-12)


def test_a22_the_return_is_what_is_still_to_come() -> None:
    given_, expected = case("A22")
    ours = generalized_advantages(
        row(given_["token_rewards_incl_KL"]),
        row(given_["values"]),
        torch.tensor([given_["mask"]]),
        gamma=given_["gamma"],
        lam=given_["lambda"],
    )
    close(ours.returns, [expected["returns"]], 1e-12)
    close(ours.advantages, [expected["advantages"]], 1e-12)


def test_f11_returns_are_built_before_whitening() -> None:
    given_, expected = case("F11")
    rewards, values, mask = row(given_["rewards"]), row(given_["values"]), torch.ones(1, 3)
    leaf = values.clone().requires_grad_()
    ours = generalized_advantages(rewards, leaf, mask, gamma=given_["gamma"], lam=given_["lambda"])
    assert not ours.returns.requires_grad
    assert not ours.advantages.requires_grad
    close(ours.advantages, [expected["advantages"]], 1e-12)
    close(ours.returns, [expected["returns"]], 1e-12)
    white = whiten(ours.advantages, mask, ddof=0, eps=0)
    close(white, [expected["whitened_advantages_population"]], 1e-8)
    assert (white + values - ours.returns).abs().max() > 0.5  # the trap


def test_a_long_response_loses_no_digits() -> None:
    """2048 tokens, in float32, against the plain recursion in float64."""
    rewards, values = random(3, 2048, seed=0), random(3, 2048, seed=1)
    mask = torch.rand(3, 2048, generator=torch.Generator().manual_seed(2)) < 0.9
    for gamma, lam in ((1.0, 0.95), (1.0, 1.0), (0.99, 0.999)):
        wanted, following, running = torch.zeros(3, 2048).double(), torch.zeros(3), torch.zeros(3)
        for t in reversed(range(2048)):
            delta = rewards[:, t] + gamma * following - values[:, t]
            running = torch.where(mask[:, t], delta + gamma * lam * running, running)
            following = torch.where(mask[:, t], values[:, t], following)
            wanted[:, t] = torch.where(mask[:, t], running, 0.0)
        ours = generalized_advantages(rewards, values, mask, gamma=gamma, lam=lam)
        close(ours.advantages, wanted, 1e-10)
        single = generalized_advantages(rewards.float(), values.float(), mask, gamma=gamma, lam=lam)
        assert single.advantages.dtype == torch.float32
        close(single.advantages.double(), wanted, 5e-6 * wanted.abs().max().item())


def test_rows_without_tokens_may_pass() -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    rewards = torch.tensor([[1.0, 2.0], [math.nan, 3.0]])
    ours = generalized_advantages(rewards, rewards, mask, lam=1.0, allow_empty=True)
    assert ours.returns.tolist() == [[3, 2], [0, 0]]
    after = torch.tensor([1.0, 5.0])  # nothing to add it to
    ours = generalized_advantages(
        rewards, rewards, mask, lam=1.0, bootstrap_values=after, allow_empty=True
    )
    assert ours.returns.tolist() == [[4, 3], [0, 0]]
    nothing = generalized_advantages(rewards, rewards, mask * 0, allow_empty=True)
    assert nothing.advantages.tolist() == nothing.returns.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_the_dtype_of_estimates(dtype: torch.dtype) -> None:
    rewards, mask = torch.tensor([[1, 0, 2], [3, 1, 1]], dtype=dtype), torch.ones(2, 3)
    single = generalized_advantages(rewards, rewards, mask)
    double = generalized_advantages(rewards.double(), rewards, mask)
    assert {result.dtype for result in single} == {torch.float32}
    assert {result.dtype for result in double} == {torch.float64}
    close(single.advantages.double(), double.advantages, 1e-6)
    wide = torch.tensor([0.5, 0.25], dtype=torch.float64)
    for arguments in ({"lam": wide}, {"bootstrap_values": wide}, {"lam": wide.float()}):
        found = generalized_advantages(rewards, rewards, mask, **arguments)
        assert found.advantages.dtype == torch.float32
    assert whiten(rewards, mask).dtype == torch.float32
    assert whiten(rewards.double(), mask).dtype == torch.float64
    loss, stats = value_loss(rewards, rewards, mask, old_values=rewards, epsilon=0.1)
    assert loss.dtype == torch.float32
    assert {value.dtype for value in stats.values()} == {torch.float32}
    assert value_loss(rewards.double(), rewards, mask)[0].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_numbers_that_pass_stay_finite(dtype: torch.dtype) -> None:
    """Just inside the limit that the message gives, with signs that add up."""
    mask = torch.ones(2, 16)
    largest = torch.finfo(dtype).max / (8 * 16) * 0.99
    rewards = torch.full((2, 16), largest, dtype=dtype)
    ours = generalized_advantages(
        rewards, -rewards, mask, gamma=1, lam=1, bootstrap_values=rewards[:, 0]
    )
    assert ours.advantages.isfinite().all()
    assert ours.returns.isfinite().all()
    signs = rewards * torch.tensor([1.0, -1.0], dtype=dtype).repeat(8)
    assert whiten(signs, mask).isfinite().all()
    close(whiten(signs, mask, ddof=0), signs.sign(), 1e-6)
    squarable = (torch.finfo(dtype).max / 32) ** 0.5 / 8 * 0.99 * signs.sign()
    leaf = squarable.clone().requires_grad_()
    loss, stats = value_loss(leaf, -squarable, mask, old_values=-squarable, epsilon=1e30)
    loss.backward()
    assert leaf.grad is not None
    for found in (loss, leaf.grad, *stats.values()):
        assert found.isfinite().all()
    tiny = torch.full((2, 16), torch.finfo(dtype).tiny, dtype=dtype) * signs.sign()
    close(whiten(tiny, mask, ddof=0, eps=0), signs.sign(), 1e-6)


# --- whitening ----------------------------------------------------------------------------------


@given(batch=batches())
def test_whitened_tokens_have_mean_0_and_variance_1(batch: dict[str, Any]) -> None:
    values, mask = batch["values"] * 3 + 5, batch["mask"]
    for ddof in (0, 1):
        white = whiten(values, mask, ddof=ddof, eps=0)
        assert (white[~mask] == 0).all()
        real = white[mask]
        if len(real) < 2:
            assert real.tolist() == [0.0]
            continue
        assert abs(real.mean()) < 1e-12
        assert real.var(correction=ddof).item() == pytest.approx(1, abs=1e-12)
        close(whiten(values, mask, ddof=ddof, eps=0.7), by_formula(values, mask, ddof, 0.7))
        with_mean = whiten(values, mask, ddof=ddof, eps=0.7, shift_mean=False)
        wanted = by_formula(values, mask, ddof, 0.7) + values[mask].mean()
        close(with_mean, torch.where(mask, wanted, 0.0))


def by_formula(values: Tensor, mask: Tensor, ddof: int, eps: float) -> Tensor:
    real = values[mask]
    white = (values - real.mean()) / (real.var(correction=ddof) + eps).sqrt()
    return torch.where(mask, white, 0.0)


def test_the_default_is_the_sample_variance_with_1e_8() -> None:
    values, mask = row([1e-4, 3e-4, 9.0]), torch.tensor([[1, 1, 0]])
    close(whiten(values, mask), by_formula(values, mask == 1, 1, 1e-8))


@given(batch=batches(), shift=st.floats(-100, 100), factor=st.floats(1e-3, 1e3))
def test_whitening_sees_neither_shift_nor_scale_nor_garbage(
    batch: dict[str, Any], shift: float, factor: float
) -> None:
    values, mask = batch["values"], batch["mask"]
    white = whiten(values, mask, eps=0)
    close(whiten(factor * values + shift, mask, eps=0), white, 1e-8)
    assert torch.equal(whiten(torch.where(mask, values, batch["garbage"]), mask, eps=0), white)
    close(whiten(values.flip(0, 1), mask.flip(0, 1), eps=0), white.flip(0, 1))


def test_a05_one_token_has_no_spread() -> None:
    given_, expected = case("A05")
    alone = row(given_["values"][0]), torch.tensor(given_["mask"])
    for ddof in (0, 1):
        for eps in (0.0, 1e-8):
            assert whiten(*alone, ddof=ddof, eps=eps).tolist() == [[0, 0, 0]]
            kept = whiten(*alone, ddof=ddof, eps=eps, shift_mean=False)
            assert kept.tolist() == [[0.7, 0, 0]]
            nothing = torch.zeros(1, 3)
            assert whiten(alone[0], nothing, ddof=ddof, eps=eps).tolist() == [[0, 0, 0]]
            assert whiten(alone[0], nothing, shift_mean=False).tolist() == [[0, 0, 0]]
    control = row(given_["control"]["values"][0]), torch.tensor(given_["control"]["mask"])
    for ddof, name in ((0, "control_population"), (1, "control_sample")):
        close(whiten(*control, ddof=ddof)[:, :2], [expected[name]], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@given(value=st.floats(-100, 100), size=st.integers(1, 33))
def test_equal_tokens_whiten_to_exactly_zero(dtype: torch.dtype, value: float, size: int) -> None:
    values = torch.full((1, size), value, dtype=dtype)
    for eps in (0.0, 1e-8):
        white = whiten(values, torch.ones(1, size), eps=eps)
        assert (white == 0).all()
        kept = whiten(values, torch.ones(1, size), eps=eps, shift_mean=False)
        assert torch.equal(kept, values.to(kept.dtype))


def test_whitening_carries_no_gradient() -> None:
    leaf = random(2, 3, seed=0).requires_grad_()
    assert not whiten(leaf, torch.ones(2, 3)).requires_grad


# --- the value loss -----------------------------------------------------------------------------

# V_old = 0, epsilon = 0.2: value, return, the error that counts, whether the critic learns
TOKENS = [
    (0.1, 1.0, 0.9, True),  # inside the range
    (0.5, 1.0, 0.8, False),  # beyond it, towards the return: held back
    (0.5, -1.0, 1.5, True),  # beyond it, away from the return: called back
    (-0.5, -1.0, 0.8, False),
    (-0.5, 1.0, 1.5, True),
    (0.5, 0.5, 0.3, False),  # right, but too fast
    (0.2, 1.0, 0.8, True),  # on the edge: still inside
    (-0.2, 1.0, 1.2, True),
    (0.0, 1.0, 1.0, True),  # the first step
]


@pytest.mark.parametrize(("value", "wanted", "error", "learns"), TOKENS)
def test_the_value_clip_token_by_token(
    value: float, wanted: float, error: float, learns: bool
) -> None:
    leaf = row([value]).requires_grad_()
    old, mask = row([0.0]), torch.ones(1, 1)
    loss, stats = value_loss(leaf, row([wanted]), mask, old_values=old, epsilon=0.2)
    assert loss.item() == pytest.approx(error**2 / 2, abs=1e-15)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.item() == pytest.approx((value - wanted) if learns else 0.0, abs=1e-15)
    assert stats["val/vf_clipfrac"] == (not learns)
    free, _ = value_loss(leaf, row([wanted]), mask)
    assert free.item() == pytest.approx((value - wanted) ** 2 / 2, abs=1e-15)


def test_without_a_range_nothing_is_clipped() -> None:
    """Not even where the old values are given, and they are not looked at."""
    batch = random(2, 3, seed=0), random(2, 3, seed=1), torch.ones(2, 3)
    plain, stats = value_loss(*batch)
    ignored, _ = value_loss(*batch, old_values=torch.full((2, 3), math.nan))
    close(plain, (batch[0] - batch[1]).square().mean() / 2)
    assert torch.equal(plain, ignored)
    assert stats["val/vf_clipfrac"] == 0
    wide, _ = value_loss(*batch, old_values=batch[1], epsilon=1e30)
    close(wide, plain)


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=batches(), epsilon=st.sampled_from([None, 0.0, 0.2, 1.0]))
def test_the_value_loss_is_its_formula(
    how: str, batch: dict[str, Any], epsilon: float | None
) -> None:
    mask, returns, old = batch["mask"], batch["rewards"], batch["values"]
    values = old + 0.3 * random(*mask.shape, seed=5)
    constant = {"constant": 7.0} if how == "constant" else {}
    leaf = torch.where(mask, values, batch["garbage"]).requires_grad_()
    loss, stats = value_loss(
        leaf, returns, mask, old_values=old, epsilon=epsilon, aggregation=how, **constant
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    lengths, wanted, slope, count = mask.sum(1).tolist(), 0.0, torch.zeros(mask.shape), 0
    for b, t in mask.nonzero().tolist():
        v, r, o = (x[b, t].item() for x in (values, returns, old))
        held = v if epsilon is None else min(max(v, o - epsilon), o + epsilon)
        weight = {
            "sequence_mean": 1 / (len(mask) * lengths[b]),
            "token_mean": 1 / sum(lengths),
            "constant": 1 / (len(mask) * 7),
            "sequence_sum": 1 / len(mask),
            "only_token_mean": 1 / lengths[b],
        }[how]
        wanted += weight * max((v - r) ** 2, (held - r) ** 2) / 2
        clipped = (held - r) ** 2 > (v - r) ** 2
        slope[b, t] = 0.0 if clipped else weight * (v - r)
        count += clipped
    assert loss.item() == pytest.approx(wanted, abs=1e-12)
    close(gradient, slope.double(), 1e-6)
    assert stats["val/vf_clipfrac"].item() == pytest.approx(count / sum(lengths), abs=1e-6)


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=batches())
def test_the_parts_of_a_step_add_up(how: str, batch: dict[str, Any]) -> None:
    mask, cut = batch["mask"], len(batch["mask"]) // 2
    arguments: dict[str, Any] = {"epsilon": 0.2, "aggregation": how}
    if how == "constant":
        arguments["constant"] = 7.0
    total = int(mask.sum()) if how == "token_mean" else len(mask)
    whole, _ = value_loss(
        batch["values"], batch["rewards"], mask, old_values=batch["values"] / 2, **arguments
    )
    parts = [
        value_loss(
            batch["values"][part],
            batch["rewards"][part],
            mask[part],
            old_values=batch["values"][part] / 2,
            total=total,
            **arguments,
        )[0]
        for part in (slice(0, cut), slice(cut, None))
        if len(mask[part])
    ]
    close(sum(parts), whole)


def test_the_gradient_flows_through_the_values_only() -> None:
    leaves = [random(2, 3, seed=seed).requires_grad_() for seed in range(3)]
    values, returns, old = leaves
    loss, stats = value_loss(values, returns, torch.ones(2, 3), old_values=old, epsilon=0.2)
    loss.backward()
    assert values.grad is not None
    assert returns.grad is old.grad is None
    for value in stats.values():
        assert value.shape == ()
        assert not value.requires_grad
    for result in generalized_advantages(values, returns, torch.ones(2, 3)):
        assert not result.requires_grad


@given(batch=batches())
def test_the_statistics_of_the_critic(batch: dict[str, Any]) -> None:
    mask, values, returns = batch["mask"], batch["values"], batch["rewards"]
    held = torch.where(mask, values, batch["garbage"])
    _, stats = value_loss(held, torch.where(mask, returns, math.nan), mask)
    v, r = values[mask], returns[mask]
    close(stats["val/vpred_mean"], v.mean())
    close(stats["val/return_mean"], r.mean())
    wanted = 0.0
    if len(r) > 1:
        wanted = 1 - (r - v).var(correction=0).item() / r.var(correction=0).item()
    assert stats["val/explained_variance"].item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_explained_variance_by_name() -> None:
    returns, mask = row([0.0, 1.0, 2.0, 3.0]), torch.ones(1, 4)

    def explained(values: Tensor, wanted: Tensor = returns) -> float:
        return value_loss(values, wanted, mask)[1]["val/explained_variance"].item()

    assert explained(returns) == 1
    assert explained(returns + 5) == 1  # a critic that is off by a constant explains all of it
    assert explained(torch.full((1, 4), 1.5).double()) == 0  # one that only knows the mean, nothing
    assert explained(-returns) == pytest.approx(-3)
    assert explained(returns, torch.ones(1, 4).double()) == 0  # nothing to explain


@pytest.mark.parametrize("size", [0.1, 1.0, -0.3, 3e7, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_returns_that_are_all_equal_leave_nothing_to_explain(
    dtype: torch.dtype, size: float
) -> None:
    """Seven times 0.1: its mean misses it by a bit, and a share of that bit is -1e15."""
    for count in (3, 7, 1000):
        values = random(2, count, seed=count).to(dtype)
        mask = torch.ones(2, count)
        mask[1, 1:] = 0
        returns = torch.where(mask.bool(), torch.full((2, count), size), math.nan).to(dtype)
        stats = value_loss(values, returns, mask)[1]
        assert stats["val/explained_variance"].item() == 0


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("lam", [1.0, torch.ones(4)])
def test_returns_that_differ_by_rounding_leave_nothing_to_explain(reward: float, lam: Any) -> None:
    """With lambda = 1 every return is the reward, as an advantage plus a value: up to rounding."""
    values, mask = random(4, 300, seed=3).float(), torch.ones(4, 300)
    rewards = torch.zeros(4, 300)
    rewards[:, -1] = reward
    _, returns = generalized_advantages(rewards, values, mask, lam=lam)
    assert len(returns.unique()) > 1
    stats = value_loss(values, returns, mask)[1]
    assert stats["val/explained_variance"].item() == 0
    returns[0] += 1e-3
    assert value_loss(values, returns, mask)[1]["val/explained_variance"].item() < 0


def test_numbers_that_differ_by_rounding_have_no_spread() -> None:
    numbers, mask = row([0.1 + 0.2, 0.3, 0.3]), torch.ones(1, 3)
    for dtype in (torch.float32, torch.float64):
        near = numbers.to(dtype)
        near[0, 0] = near[0, 1].nextafter(torch.tensor(1.0, dtype=dtype))
        assert whiten(near, mask, eps=0.0).tolist() == [[0, 0, 0]]
        torch.testing.assert_close(whiten(near, mask, eps=0.0, shift_mean=False), near)
    far = torch.tensor([[1.0, 1 + 2.0**-18]])
    close(whiten(far, torch.ones(1, 2), ddof=0, eps=0.0), [[-1.0, 1.0]])


def test_where_the_clipped_error_is_the_larger_one_no_gradient_flows() -> None:
    """The target is 1, the old value 0, the range 0.2.  Values at the far edge towards the target,
    past it, and so far past it that the error itself is the larger one again."""
    values = row([0.1, 0.5, 1.5, 1.9, -0.5]).requires_grad_()
    returns, old = torch.ones_like(values), torch.zeros_like(values)
    value_loss(
        values, returns, torch.ones(1, 5), old_values=old, epsilon=0.2, aggregation="sequence_sum"
    )[0].backward()
    assert values.grad is not None
    close(values.grad, [[-0.9, 0.0, 0.0, 0.9, -1.5]])


def test_the_default_device_moves_no_critic() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1, 1, 0]])
    wanted = generalized_advantages(values, values, mask)
    white = whiten(values, mask)
    loss = value_loss(values, values * 2, mask)
    with torch.device("meta"):
        ours = generalized_advantages(values, values, mask)
        assert torch.equal(whiten(values, mask), white)
        again = value_loss(values, values * 2, mask)
    for one, other in zip(ours, wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(again[0], loss[0])
    assert again[1] == loss[1]


def test_half_arithmetic_around_the_critic_changes_nothing() -> None:
    values, mask = random(3, 5, seed=0).float().requires_grad_(), torch.ones(3, 5)
    returns = random(3, 5, seed=1).float()
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            estimates = generalized_advantages(returns, values, mask)
            loss, stats = value_loss(values, estimates.returns, mask)
            grad = torch.autograd.grad(loss, values)[0]
            found.append([*estimates, loss, grad, *stats.values(), whiten(returns, mask)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_lambda_takes_lengths_of_any_integer_dtype(dtype: torch.dtype) -> None:
    lengths = torch.tensor([3, 40, 100])
    assert torch.equal(length_adaptive_lam(lengths.to(dtype)), length_adaptive_lam(lengths))
    with torch.device("meta"):
        ours = length_adaptive_lam(lengths)
    assert torch.equal(ours, length_adaptive_lam(lengths.tolist()))


def test_empty_rows_may_pass() -> None:
    values, returns = row([1.0, 2.0]).repeat(2, 1), row([0.0, 0.0]).repeat(2, 1)
    mask = torch.tensor([[1, 1], [0, 0]])
    loss, _ = value_loss(values, returns, mask, allow_empty=True)
    assert loss.item() == pytest.approx(5 / 4)
    by_row, _ = value_loss(values, returns, mask, aggregation="sequence_mean", allow_empty=True)
    assert by_row.item() == pytest.approx(5 / 4)


# --- lambda by length ---------------------------------------------------------------------------


def test_lambda_by_length() -> None:
    lengths = [0, 1, 19, 20, 21, 40, 10**6]
    ours = length_adaptive_lam(lengths)
    assert ours.dtype == torch.float64
    close(ours, [0.0, 0.0, 0.0, 0.0, 1 - 1 / (0.05 * 21), 0.5, 1 - 2e-5])
    assert torch.equal(length_adaptive_lam(torch.tensor(lengths)), ours)
    close(length_adaptive_lam([3], alpha=1), [2 / 3])
    assert length_adaptive_lam([1], alpha=1e-300).tolist() == [0]
    assert length_adaptive_lam([1], alpha=1e300).tolist() == [1]


@given(length=st.integers(21, 10**6))
def test_lambda_spans_the_stated_share_of_the_response(length: int) -> None:
    lam = length_adaptive_lam([length]).item()
    assert 1 / (1 - lam) == pytest.approx(0.05 * length, rel=1e-8)


def test_lambda_by_length_drives_the_estimates() -> None:
    """A row of 2 tokens has lambda 0, a row of 4 has 1/2 (alpha = 1/2)."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    rewards, values = random(2, 4, seed=0), random(2, 4, seed=1)
    lam = length_adaptive_lam(mask.sum(1), alpha=0.5)
    assert lam.tolist() == [0, 0.5]
    ours = generalized_advantages(rewards, values, mask, lam=lam).advantages
    for index in (0, 1):
        only = slice(index, index + 1)
        alone = generalized_advantages(
            rewards[only], values[only], mask[only], lam=lam[index].item()
        )
        close(ours[only], alone.advantages)
