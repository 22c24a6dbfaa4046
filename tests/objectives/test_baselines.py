"""Question 2 without a critic: what each baseline does to the mean gradient, exactly.

The policy of test_enumeration.py can say seven things.  Everything is enumerated: each response,
each group of G of them, each batch, with its probability.
"""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_enumeration import GRADED, PASSED, RESPONSES, parameters, probabilities
from torch import Tensor

from rlcore.objectives import (
    batch_mean_advantages,
    beta_normalized_advantages,
    equal_groups,
    group_advantages,
    leave_one_out_advantages,
    policy_loss,
    probability_all_equal,
    self_critical_advantages,
    token_logprobs,
)

FILE = Path(__file__).parents[1] / "data" / "parity_vectors.json"
VECTORS = {vector["name"]: vector for vector in json.loads(FILE.read_text())["vectors"]}
many = settings(deadline=None, derandomize=True, max_examples=60)

# three prompts, by the responses that answer them: rarely, sometimes and often right
PROMPTS = torch.stack([PASSED, torch.eye(7, dtype=torch.float64)[3], (GRADED > 0).double()])
SIZES = (2, 3, 4)


def close(ours: Tensor, wanted: Any, atol: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), rtol=0, atol=atol)


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()


def gradient(value: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(value, theta, retain_graph=True)[0]


def credits(
    estimator: Callable[[Tensor, Tensor], Tensor], rewards: Tensor, size: int, chances: Tensor
) -> Tensor:
    """(7,): what each response's grad log pi is multiplied by, in the mean over all 7^G groups of
    (1/G) sum_g A^(g) grad log pi(y^(g)).  Differentiable in the chances."""
    groups = torch.tensor(list(itertools.product(range(7), repeat=size)))  # (7^G, G)
    ids = torch.arange(len(groups)).repeat_interleave(size)
    advantages = estimator(rewards[groups.flatten()], ids).view(groups.shape)
    weighted = advantages * chances[groups].prod(dim=1, keepdim=True) / size
    return chances.new_zeros(7).index_add(0, groups.flatten(), weighted.flatten())


def mean_gradient(
    estimator: Callable[[Tensor, Tensor], Tensor], rewards: Tensor, size: int, theta: Tensor
) -> Tensor:
    chances = probabilities(theta)
    return gradient(
        (credits(estimator, rewards, size, chances.detach()) * chances.log()).sum(), theta
    )


def value(theta: Tensor, rewards: Tensor) -> Tensor:
    """J = E R, or p where the rewards are 0 and 1."""
    return (probabilities(theta) * rewards).sum()


@pytest.fixture
def theta() -> Tensor:
    return parameters(0).requires_grad_()


# --- baselines that leave the objective alone ----------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_leave_one_out_is_unbiased(theta: Tensor, size: int) -> None:
    for rewards in (GRADED, *PROMPTS):
        ours = mean_gradient(leave_one_out_advantages, rewards, size, theta)
        close(ours, gradient(value(theta, rewards), theta))


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_the_group_scales_the_gradient(theta: Tensor, size: int) -> None:
    def mean_only(rewards: Tensor, ids: Tensor) -> Tensor:
        return group_advantages(rewards, ids, scale="none")

    for rewards in (GRADED, *PROMPTS):
        ours = mean_gradient(mean_only, rewards, size, theta)
        close(ours, (size - 1) / size * gradient(value(theta, rewards), theta))


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_the_batch_scales_the_gradient_whatever_the_prompts(
    theta: Tensor, size: int
) -> None:
    """One response to each of B prompts: the rewards of the others are a baseline that does not
    depend on the own response, its own share of the mean costs the factor (B-1)/B."""
    prompts = torch.stack([GRADED, *PROMPTS])[:size]
    chances = probabilities(theta).detach()
    given = torch.zeros(7, dtype=torch.float64)
    for batch in itertools.product(range(7), repeat=size):
        rewards = prompts[torch.arange(size), list(batch)]
        chance = chances[list(batch)].prod()
        given = given.index_add(
            0, torch.tensor(batch), chance * batch_mean_advantages(rewards) / size
        )
    ours = gradient((given * probabilities(theta).log()).sum(), theta)
    truth = sum(gradient(value(theta, rewards), theta) for rewards in prompts) / size
    close(ours, (size - 1) / size * truth)


def greedy_response(theta: Tensor) -> int:
    """What the policy says when it takes the likeliest token each time."""
    first = int(theta[0].argmax())
    said = (first,) if first == 2 else (first, int(theta[1 + first].argmax()))
    return RESPONSES.index(said)


def test_the_greedy_answer_as_a_baseline_is_unbiased() -> None:
    """SCST: it depends on the policy but not on the sample, so it drops out of the mean; that the
    greedy answer changes with the policy adds nothing, the baseline has no gradient."""
    seen = set()
    for seed in range(8):
        theta = parameters(seed).requires_grad_()
        greedy = greedy_response(theta)
        seen.add(greedy)
        for rewards in (GRADED, *PROMPTS):
            advantages = self_critical_advantages(rewards, rewards[greedy].expand(7))
            assert advantages[greedy] == 0
            chances = probabilities(theta)
            ours = gradient((chances.detach() * advantages * chances.log()).sum(), theta)
            close(ours, gradient(value(theta, rewards), theta))
    assert len(seen) > 2, "a test of one greedy answer only"


def test_the_worked_example_of_scst() -> None:
    given, expected = (VECTORS["scst"][key] for key in ("inputs", "expected"))
    logits = torch.tensor([given["logits"]], dtype=torch.float64, requires_grad=True)
    assert logits[0].argmax(-1).tolist() == given["greedy"]
    padded = torch.cat([logits, logits[:, :1]], dim=1)  # the last position's logits are not used
    new = token_logprobs(padded, torch.tensor([[0, *given["sampled"]]]))
    advantages = self_critical_advantages([given["R_sampled"]], [given["R_greedy"]])
    loss, _ = policy_loss(
        new,
        new,
        advantages,
        torch.ones(1, 2),
        surrogate="reinforce",
        aggregation="sequence_sum",
    )
    close(loss, expected["loss"])
    close(torch.autograd.grad(loss, logits)[0][0], expected["grad_logits"])


# --- the std of the group does not ---------------------------------------------------------------


def z_score(rewards: Tensor, ids: Tensor) -> Tensor:
    return group_advantages(rewards, ids)


def followed(p: Tensor, size: int) -> Tensor:
    """F_G(p) of the docstring of group_advantages."""
    k = torch.arange(size, dtype=torch.float64)
    ways = torch.tensor([math.comb(size - 1, n) for n in range(size)], dtype=torch.float64)
    exactly = ways * p**k * (1 - p) ** (size - 1 - k)  # successes among G - 1
    at_least = exactly.flip(0).cumsum(0).flip(0)
    return (at_least[1:] / (k * (size - k))[1:].sqrt()).sum()


@pytest.mark.parametrize("size", SIZES)
def test_the_z_score_follows_the_function_that_the_docstring_states(size: int) -> None:
    """Right or wrong: over a batch of prompts, the mean gradient is that of sum_x F_G(p_x)."""
    for seed in range(3):
        theta = parameters(seed).requires_grad_()
        ours = sum(mean_gradient(z_score, rewards, size, theta) for rewards in PROMPTS)
        rates = [value(theta, rewards) for rewards in PROMPTS]
        assert min(rates) < 0.2 < 0.5 < max(rates)
        objective = torch.stack([followed(p, size) for p in rates]).sum()
        close(ours, gradient(objective, theta))
        truth = gradient(torch.stack(rates).sum(), theta)
        if size < 4:  # a multiple of the true one
            close(ours, math.sqrt(size - 1) * truth)
        else:  # from here on another direction
            assert cosine(ours, truth) < 1 - 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_with_the_sample_std_it_follows_the_same_function_more_slowly(
    theta: Tensor, size: int
) -> None:
    def sample_std(rewards: Tensor, ids: Tensor) -> Tensor:
        return group_advantages(rewards, ids, ddof=1)

    for rewards in PROMPTS:
        ours = mean_gradient(sample_std, rewards, size, theta)
        objective = math.sqrt((size - 1) / size) * followed(value(theta, rewards), size)
        close(ours, gradient(objective, theta))


def test_for_large_groups_it_is_an_arcsine() -> None:
    for p in (0.05, 0.3, 0.5, 0.9):
        rate = torch.tensor(p, dtype=torch.float64, requires_grad=True)
        ours = followed(rate, 400)
        assert ours.item() == pytest.approx(2 * math.asin(math.sqrt(p)), abs=0.08)
        slope = torch.autograd.grad(ours, rate)[0].item()
        assert slope == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=0.04)


def test_with_graded_rewards_it_follows_no_function_at_all() -> None:
    """The derivative of a gradient is symmetric.  That of the mean z-score gradient is not; that of
    the mean leave-one-out gradient is, and so is the z-score's where rewards are 0 and 1."""

    def asymmetry(estimator: Callable[[Tensor, Tensor], Tensor], rewards: Tensor) -> float:
        def field(flat: Tensor) -> Tensor:
            given = credits(estimator, rewards, 2, probabilities(flat.view(3, 3)))
            scores = torch.func.jacrev(lambda at: probabilities(at.view(3, 3)).log())(flat)
            return given @ scores

        derivative = torch.func.jacrev(field)(parameters(0).flatten())
        return (derivative - derivative.T).abs().max().item()

    assert asymmetry(leave_one_out_advantages, GRADED) < 1e-12
    assert asymmetry(z_score, PASSED) < 1e-12
    assert asymmetry(z_score, GRADED) > 1e-2


# --- the greedy baseline on any input ------------------------------------------------------------

numbers = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([0.0, 1.0]), st.just(math.nan))
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8)


@given(rows=pairs, shift=st.floats(-100, 100), shuffle=st.randoms(use_true_random=False))
@many
def test_the_greedy_baseline_row_by_row(rows: list, shift: float, shuffle: Any) -> None:
    rewards, greedy = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    ours = self_critical_advantages(rewards, greedy)
    for got, (reward, baseline) in zip(ours.tolist(), rows, strict=True):
        missing = math.isnan(reward) or math.isnan(baseline)
        assert got == (0.0 if missing else reward - baseline)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    assert torch.equal(self_critical_advantages(rewards[order], greedy[order]), ours[order])
    close(self_critical_advantages(rewards + shift, greedy + shift), ours, 1e-9)
    close(self_critical_advantages(2 * rewards, 2 * greedy), 2 * ours)
    assert torch.equal(self_critical_advantages(greedy, rewards), -ours)
    as_lists = self_critical_advantages(
        *([None if math.isnan(x) else x for x in column.tolist()] for column in (rewards, greedy))
    )
    assert torch.equal(as_lists, ours)


def test_the_dtype_of_the_greedy_baseline() -> None:
    half, single = torch.tensor([1.0, 0.5], dtype=torch.bfloat16), torch.tensor([1.0, 0.5])
    assert self_critical_advantages(half, single).dtype == torch.float32
    assert self_critical_advantages(half, single.double()).dtype == torch.float64
    assert self_critical_advantages(torch.tensor([1, 0]), half).tolist() == [0.0, -0.5]
    assert self_critical_advantages(torch.tensor([True]), [0.25]).tolist() == [0.75]
    graph = torch.ones(2, requires_grad=True)
    assert not self_critical_advantages(graph, graph).requires_grad
    near = torch.tensor([16777216.0]), torch.tensor([16777215.0])
    assert self_critical_advantages(*near).item() == 1
    huge, tiny = 2.0**1020, 5e-324
    assert self_critical_advantages([huge, tiny], [-huge, 0.0]).tolist() == [2 * huge, tiny]


# --- BNPO's Beta density -------------------------------------------------------------------------


def bnpo(rewards: Any, group_size: int, **options: Any) -> Tensor:
    ids = torch.arange(len(rewards)) // group_size
    return beta_normalized_advantages(rewards, ids, **options)


def test_the_worked_example_of_bnpo() -> None:
    vector = VECTORS["bnpo_beta_normalised_adv"]
    given, expected = vector["inputs"], vector["expected"]
    close(bnpo(given["rewards"], given["G"]), expected["adv"])
    assert expected["alpha"] == expected["beta"] == 1.5
    rate = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    density = (rate * (1 - rate)).sqrt() / (math.pi / 8)  # of Beta(1.5, 1.5)
    rewards = torch.tensor(given["rewards"], dtype=torch.float64).view(3, -1)
    close(
        bnpo(given["rewards"], given["G"]).view(3, -1), (rewards - rate[:, None]) / density[:, None]
    )


@st.composite
def graded_batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Rewards in [0, 1] and ids, groups in any order, at least two known rewards in each."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=6))
    one = st.one_of(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    rewards, ids = [], []
    for name, size in enumerate(sizes):
        known = draw(st.lists(one, min_size=size, max_size=size))
        missing = draw(st.integers(0, 2))
        rewards += known + [math.nan] * missing
        ids += [7 * name - 11] * (size + missing)
    order = draw(st.permutations(range(len(ids))))
    return (
        torch.tensor([rewards[index] for index in order], dtype=torch.float64),
        torch.tensor([ids[index] for index in order]),
    )


def reference_bnpo(rewards: Tensor, ids: Tensor) -> Tensor:
    """The paper's formula with torch's Beta density, group by group."""
    rates = {int(g): float(rewards[ids == g].nanmean()) for g in ids.unique()}
    law = torch.tensor(list(rates.values()), dtype=torch.float64)
    alpha = beta = torch.tensor(1.0, dtype=torch.float64)
    if len(law) > 1 and law.max() - law.min() > 1e-12:
        c = law.mean() * (1 - law.mean()) / law.var() - 1
        alpha, beta = ((1 + c * share / 3).clamp(min=1) for share in (law.mean(), 1 - law.mean()))
    density = torch.distributions.Beta(alpha, beta, validate_args=False)
    advantages = torch.zeros_like(rewards)
    for group, p in rates.items():
        mine = (ids == group) & ~rewards.isnan()
        if len(set(rewards[mine].tolist())) > 1:
            weight = (-density.log_prob(torch.tensor(p, dtype=torch.float64))).exp().clamp(max=1e6)
            advantages[mine] = weight * (rewards[mine] - p)
    return advantages


@given(batch=graded_batches())
@many
def test_bnpo_is_the_formula(batch: Any) -> None:
    rewards, ids = batch
    ours, wanted = beta_normalized_advantages(rewards, ids), reference_bnpo(rewards, ids)
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-9)


@given(batch=graded_batches(), shuffle=st.randoms(use_true_random=False))
@many
def test_what_bnpo_does_not_see(batch: Any, shuffle: Any) -> None:
    """The order of the rows, the names of the prompts, rows without a reward, prompts without any;
    and right and wrong are treated alike."""
    rewards, ids = batch
    ours = beta_normalized_advantages(rewards, ids)
    assert ours.isfinite().all()
    known = ~rewards.isnan()
    assert (ours[~known] == 0).all()
    for group in ids.unique():
        assert abs(ours[ids == group].sum()) <= 1e-12 * ours.abs().sum()
    order = list(range(len(ids)))
    shuffle.shuffle(order)
    assert torch.equal(beta_normalized_advantages(rewards[order], ids[order]), ours[order])
    assert torch.equal(beta_normalized_advantages(rewards, -ids), ours)
    close(beta_normalized_advantages(rewards[known], ids[known]), ours[known])
    silent = torch.full((3,), math.nan, dtype=torch.float64)
    wider = beta_normalized_advantages(
        torch.cat([silent, rewards]), torch.cat([torch.full((3,), 99), ids])
    )
    assert torch.equal(wider[3:], ours)
    assert (wider[:3] == 0).all()
    mirrored = beta_normalized_advantages(1 - rewards, ids)
    torch.testing.assert_close(mirrored, -ours, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("batch", [[1, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]])
def test_bnpo_without_a_law_only_subtracts_the_mean(batch: list) -> None:
    """One prompt has no variance between prompts; equal success rates have none either."""
    ids = torch.arange(len(batch)) // 4
    close(bnpo(batch, 4), group_advantages(batch, ids, scale="none"))


def test_bnpo_with_success_rates_further_apart_than_a_beta_law_allows() -> None:
    """c < 0 then: both parameters are kept at 1, a uniform density."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.9], dtype=torch.float64)
    rates = rewards.view(2, 2).mean(1)
    assert rates.mean() * (1 - rates.mean()) < rates.var()
    close(bnpo(rewards, 2), [0, 0, 0.05, -0.05])


@pytest.mark.parametrize("least", [5e-324, 1e-300, 1e-151, 1e-30, 1e-17])
def test_bnpo_of_a_success_rate_next_to_nothing(least: float) -> None:
    """Its density is 0, its weight the limit, whatever the other rates are."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        others = 0.3 + 0.4 * torch.rand(8, generator=generator, dtype=torch.float64)
        rewards = torch.cat([torch.tensor([0.0, least], dtype=torch.float64), others])
        ours = bnpo(rewards, 2)
        assert ours.isfinite().all()
        assert ours[1] == -ours[0] == 1e6 * least / 2


def test_bnpo_and_success_rates_that_only_rounding_tells_apart() -> None:
    """The mean of each of these groups is 0.2; in float64 three different numbers come out."""
    rewards = torch.tensor([0.0, 0.1, 0.5, 0.0, 0.2, 0.4, 0.1, 0.2, 0.3], dtype=torch.float64)
    lowest = rewards.view(3, 3)[:, 0]
    assert len(set((lowest + (rewards.view(3, 3) - lowest[:, None]).mean(1)).tolist())) == 3
    close(bnpo(rewards, 3), rewards - 0.2)


@pytest.mark.parametrize("apart", [1e-3, 1e-5, 1e-7, 1e-9, 1e-11])
@pytest.mark.parametrize("middle", [0.5, 0.2])
def test_bnpo_where_success_rates_lie_close_together(apart: float, middle: float) -> None:
    """The Beta density is nearly normal then: n = c/3 large, variance m (1 - m) / n.  Its weights
    would drown in rounding if lgamma(n) were subtracted from its like: n is up to 1e21 here."""
    high, low = middle + apart, middle - apart
    rewards = torch.tensor([high - 0.1, high + 0.1, low - 0.1, low + 0.1], dtype=torch.float64)
    ours = bnpo(rewards, 2)
    n = (middle * (1 - middle) / (2 * apart**2) - 1) / 3
    variance = middle * (1 - middle) / n
    density = math.exp(-(apart**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    wanted = torch.tensor([-0.1, 0.1, -0.1, 0.1]) / density
    torch.testing.assert_close(ours, wanted.double(), rtol=max(1e-4, 5 * apart), atol=0)


def test_bnpo_weights_are_bounded() -> None:
    """One prompt nearly always fails, unlike all others: 1/f of its success rate is the limit."""
    rewards = torch.full((80, 2), 0.5, dtype=torch.float64)
    rewards[:, 1] += torch.linspace(-0.01, 0.01, 80, dtype=torch.float64)
    rewards[0] = torch.tensor([0.0, 1e-9], dtype=torch.float64)
    for limit in (1e6, 7.0):
        ours = bnpo(rewards.flatten(), 2, max_weight=limit)
        close(ours[:2] / 5e-10, [-limit, limit], 1e-9 * limit)
    assert (bnpo(rewards.flatten(), 2)[2:].abs() < 0.1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_the_dtype_of_bnpo(dtype: torch.dtype) -> None:
    rewards = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1], dtype=dtype)
    ids = torch.arange(16) // 4
    ours = beta_normalized_advantages(rewards, ids)
    assert ours.dtype == torch.float32
    wanted = beta_normalized_advantages(rewards.double(), ids)
    assert wanted.dtype == torch.float64
    torch.testing.assert_close(ours, wanted.float(), rtol=0, atol=0)
    assert ours[12:].tolist() == [0, 0, 0, 0]
    graph = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not beta_normalized_advantages(graph, [0, 0]).requires_grad


@given(value=st.floats(0, 1), size=st.integers(2, 9))
@many
def test_bnpo_of_an_all_equal_group_is_exactly_zero(value: float, size: int) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        rewards = torch.cat([torch.full((size,), value), torch.tensor([0.0, 1.0])]).to(dtype)
        ids = torch.tensor([0] * size + [1, 1])
        ours = beta_normalized_advantages(rewards, ids)
        assert (ours[:size] == 0).all()
        assert ours[size] < 0 < ours[size + 1]
        assert equal_groups(rewards, ids).equal.tolist() == [True, False]


# --- dtypes, devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16])
def test_the_share_of_equal_groups_takes_any_real_dtype(dtype: torch.dtype) -> None:
    p = torch.tensor([0.0, 1.0]).to(dtype)
    assert torch.equal(probability_all_equal(p, 8), torch.ones(2))


def test_the_default_device_moves_no_baseline() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    calls = (
        lambda: self_critical_advantages(rewards, rewards.flip(0)),
        lambda: beta_normalized_advantages(rewards, ids),
        lambda: beta_normalized_advantages(rewards, ids.tolist()),
    )
    for call in calls:
        wanted = call()
        with torch.device("meta"):
            assert torch.equal(call(), wanted)


def test_success_rates_of_rewards_that_differ_by_rounding() -> None:
    rewards, ids = [0.1 + 0.2, 0.3, 1.0, 0.0], [0, 0, 1, 1]
    assert beta_normalized_advantages(rewards, ids)[:2].tolist() == [0, 0]
    assert (beta_normalized_advantages(rewards, ids)[2:] != 0).all()
