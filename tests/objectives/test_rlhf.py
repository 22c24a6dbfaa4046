"""The RLHF objective on whole distributions: its solution, and that estimators follow it.

The seven responses of test_enumeration.py are all that its tiny policy can say; here they are the
outcomes of a distribution that the policy's logits define.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_enumeration import GRADED, MASK, parameters, probabilities, response_logprobs
from torch import Tensor

from rlcore.objectives import (
    implied_rewards,
    kl_penalized_rewards,
    kl_shaped_rewards,
    optimal_policy,
    policy_loss,
    regularized_value,
)

FILE = Path(__file__).parents[1] / "data" / "parity_vectors.json"
VECTORS = {vector["name"]: vector for vector in json.loads(FILE.read_text())["vectors"]}
many = settings(deadline=None, derandomize=True, max_examples=60)

BETAS = (0.05, 0.5, 3.0)


def close(ours: Tensor, wanted: Any, atol: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), rtol=0, atol=atol)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def policies(*shape: int, seed: int) -> Tensor:
    return (2 * normal(*shape, seed=seed)).log_softmax(-1)


def kl(policy: Tensor, other: Tensor) -> Tensor:
    """From probabilities, without the functions under test."""
    return (policy.exp() * (policy - other)).sum(-1)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    """log pi_ref and R of P prompts with Y outcomes each, and beta."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(2, 6)))
    seed = draw(st.integers(0, 2**32))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    beta = 10.0 ** draw(st.integers(-3, 3))
    return policies(*shape, seed=seed), scale * normal(*shape, seed=seed + 1), beta


# --- the solution -------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    given, expected = (VECTORS["closed_form_policy"][key] for key in ("inputs", "expected"))
    reference = torch.tensor(given["pi_ref"], dtype=torch.float64).log()
    rewards, beta = torch.tensor(given["R"], dtype=torch.float64), given["beta"]
    best = optimal_policy(reference, rewards, beta=beta)
    close(best.log_partition.exp(), expected["Z"], 1e-11)
    close(best.logprobs.exp(), expected["pi_star"])
    close(beta * best.log_partition, expected["beta_log_Z"])
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64).log()
    for policy, value in (
        (best.logprobs, expected["J_at_pi_star"]),
        (reference, expected["J_at_pi_ref"]),
        (uniform, expected["J_uniform"]),
    ):
        close(regularized_value(policy, reference, rewards, beta=beta), value)
    close(beta * kl(uniform, best.logprobs), expected["gap_uniform_equals_beta_KL"])
    recovered = implied_rewards(
        best.logprobs, reference, beta=beta, log_partition=best.log_partition
    )
    close(recovered, expected["recovered_R"])


@given(problem=problems(), seed=st.integers(0, 2**32))
@many
def test_no_policy_is_better_and_by_how_much_each_is_worse(problem: Any, seed: int) -> None:
    """J(pi*) = beta log Z, and J(pi*) - J(pi) = beta KL(pi || pi*) >= 0 for any pi."""
    reference, rewards, beta = problem
    best = optimal_policy(reference, rewards, beta=beta)
    size = 1 + float(rewards.abs().max()) + 30 * beta  # what rounding is measured against
    close(best.logprobs.exp().sum(-1), torch.ones(len(rewards)))
    value = regularized_value(best.logprobs, reference, rewards, beta=beta)
    close(value, beta * best.log_partition, 1e-13 * size)
    other = policies(*rewards.shape, seed=seed)
    gap = value - regularized_value(other, reference, rewards, beta=beta)
    close(gap, beta * kl(other, best.logprobs), 1e-12 * size)
    assert (gap > 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_vanishes_at_the_solution_and_only_there(beta: float) -> None:
    reference, rewards = policies(2, 5, seed=0), normal(2, 5, seed=1)
    best = optimal_policy(reference, rewards, beta=beta).logprobs
    for start, zero in ((best, True), (reference, False), (policies(2, 5, seed=2), False)):
        logits = start.clone().requires_grad_()
        value = regularized_value(logits.log_softmax(-1), reference, rewards, beta=beta)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert bool(gradient.abs().max() < 1e-13 * (1 + beta)) == zero


@pytest.mark.parametrize("beta", BETAS)
def test_climbing_the_objective_ends_at_the_solution(beta: float) -> None:
    """From three starts, by the natural gradient: dJ/dlogits / p = R - beta log(pi / pi_ref) - J,
    so a step of 1 / (2 beta) halves the distance to log pi*."""
    reference, rewards = policies(4, seed=3), normal(4, seed=4)
    best = optimal_policy(reference, rewards, beta=beta).logprobs
    for seed in range(3):
        policy = policies(4, seed=10 + seed)
        for _ in range(60):
            logits = policy.clone().requires_grad_()
            value = regularized_value(logits.log_softmax(-1), reference, rewards, beta=beta)
            (gradient,) = torch.autograd.grad(value, logits)
            policy = (policy + gradient / policy.exp() / (2 * beta)).log_softmax(-1)
        close(policy, best, 1e-10)


@given(problem=problems())
@many
def test_the_reward_comes_back(problem: Any) -> None:
    """implied_rewards inverts optimal_policy, to the rounding of numbers of R's and beta's size.
    And the other way round: every policy is the best one for the reward that it implies."""
    reference, rewards, beta = problem
    best = optimal_policy(reference, rewards, beta=beta)
    size = float(rewards.abs().max() + beta * reference.abs().max())
    back = implied_rewards(best.logprobs, reference, beta=beta, log_partition=best.log_partition)
    close(back, rewards, 1e-14 * size)
    without = implied_rewards(best.logprobs, reference, beta=beta)
    difference = without - rewards  # a constant for each prompt
    close(difference, difference[:, :1].expand_as(rewards), 1e-14 * size)
    policy = policies(*rewards.shape, seed=5)
    implied = implied_rewards(policy, reference, beta=beta, log_partition=0.7)
    again = optimal_policy(reference, implied, beta=beta)
    close(again.logprobs, policy, 1e-12)
    close(again.log_partition, [0.7] * len(rewards), 1e-12)


@given(problem=problems(), shift=st.floats(-10, 10), factor=st.sampled_from([0.25, 4.0, 1024.0]))
@many
def test_what_the_solution_does_not_see(problem: Any, shift: float, factor: float) -> None:
    reference, rewards, beta = problem
    best = optimal_policy(reference, rewards, beta=beta)
    moved = optimal_policy(reference, rewards + shift, beta=beta)
    scale = 1 + (float(rewards.abs().max()) + abs(shift)) / beta
    close(moved.logprobs, best.logprobs, 1e-14 * scale)
    close(moved.log_partition, best.log_partition + shift / beta, 1e-14 * scale)
    scaled = optimal_policy(reference, factor * rewards, beta=factor * beta)
    close(scaled.logprobs, best.logprobs, 1e-14 * scale)
    order = torch.arange(rewards.shape[1]).flip(0)
    turned = optimal_policy(reference[:, order], rewards[:, order], beta=beta)
    close(turned.logprobs, best.logprobs[:, order], 1e-14 * scale)
    one = optimal_policy(reference[0], rewards[0], beta=beta)  # prompts do not mix
    close(one.logprobs, best.logprobs[0], 1e-14 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_between_the_reference_and_the_best_answer(dtype: torch.dtype) -> None:
    """beta from its smallest to its largest: from the best answers, in the reference's proportions
    where several are best, to the reference."""
    reference = torch.tensor([0.1, 0.3, 0.4, 0.2], dtype=dtype).log()
    rewards = torch.tensor([2.0, 2.0, 1.0, -1.0], dtype=dtype)
    least = optimal_policy(reference, rewards * 0.5, beta=1e-30)
    close(least.logprobs[:2].exp(), [0.25, 0.75], 1e-6)
    assert (least.logprobs[2:] < -1e29).all()
    assert least.log_partition.isfinite()
    most = optimal_policy(reference, rewards, beta=1e30)
    close(most.logprobs, reference, 1e-6)
    beta = torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0])
    found = [optimal_policy(reference, rewards, beta=float(b)).logprobs.exp() for b in beta]
    expected_reward = torch.stack([(policy * rewards).sum() for policy in found])
    distance = torch.stack([kl(policy.log(), reference) for policy in found[1:]])
    assert (expected_reward.diff() < 0).all()
    assert (distance.diff() < 0).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_an_outcome_that_cannot_happen_counts_nothing(garbage: float) -> None:
    """Value and gradient are those of the distribution without it, whatever its reward."""
    reference, rewards = policies(3, seed=6), normal(3, seed=7)
    never = torch.tensor([-math.inf], dtype=torch.float64)
    wide_reference = torch.cat([reference, never])
    wide_rewards = torch.cat([rewards, torch.tensor([garbage], dtype=torch.float64)])
    narrow = optimal_policy(reference, rewards, beta=0.3)
    wide = optimal_policy(wide_reference, wide_rewards, beta=0.3)
    close(wide.logprobs[:3], narrow.logprobs)
    close(wide.log_partition, narrow.log_partition)
    assert wide.logprobs[3] == -math.inf
    # nor is it the best outcome, from which the others are measured
    least = optimal_policy(wide_reference, wide_rewards * 0 - 1.0, beta=1e-20)
    close(least.logprobs[:3], reference)
    back = implied_rewards(
        wide.logprobs, wide_reference, beta=0.3, log_partition=wide.log_partition
    )
    close(back[:3], rewards)
    assert back[3].isnan()
    short, long = policies(3, seed=8).requires_grad_(), policies(3, seed=8).requires_grad_()
    one = regularized_value(short, reference, rewards, beta=0.3)
    two = regularized_value(torch.cat([long, never]), wide_reference, wide_rewards, beta=0.3)
    close(one, two)
    close(*(torch.autograd.grad(value, leaf)[0] for value, leaf in ((one, short), (two, long))))
    # pi may leave out what pi_ref could say
    kept = torch.cat([policies(3, seed=8), never])
    all_four = policies(4, seed=9).requires_grad_()
    left_out = regularized_value(kept, all_four.detach(), wide_rewards, beta=0.3)
    wanted = regularized_value_by_hand(kept[:3], all_four[:3], rewards, 0.3)
    close(left_out, wanted)
    leaf = kept.clone().requires_grad_()
    value = regularized_value(leaf, all_four.detach(), wide_rewards, beta=0.3)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert gradient.isfinite().all()
    assert gradient[3] == 0


def regularized_value_by_hand(
    policy: Tensor, reference: Tensor, rewards: Tensor, beta: float
) -> Tensor:
    return (policy.exp() * (rewards - beta * (policy - reference))).sum()


def test_the_gradient_flows_through_the_policy_only() -> None:
    reference, rewards = policies(4, seed=0), normal(4, seed=1)
    leaves = [tensor.requires_grad_() for tensor in (policies(4, seed=2), reference, rewards)]
    policy, reference, rewards = leaves
    regularized_value(policy, reference, rewards, beta=0.5).backward()
    assert policy.grad is not None
    assert reference.grad is rewards.grad is None
    chance = policy.detach().exp()  # each log-prob on its own, as the docstring says
    worth = rewards.detach() - 0.5 * (policy - reference).detach()
    close(policy.grad, chance * worth - 0.5 * chance)
    assert not any(part.requires_grad for part in optimal_policy(reference, rewards, beta=0.5))
    log_partition = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    policy.grad = None
    implied_rewards(policy, reference, beta=0.5, log_partition=log_partition).sum().backward()
    close(policy.grad, torch.full((4,), 0.5))
    assert reference.grad is log_partition.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_of_distributions(dtype: torch.dtype) -> None:
    """Arithmetic in float32 or wider: a half-precision input is exact in it."""
    reference = policies(50, seed=0).to(dtype)
    rewards = torch.linspace(-1, 1, 50, dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    best = optimal_policy(reference, rewards, beta=0.1)
    exact = optimal_policy(reference.double().log_softmax(-1), rewards.double(), beta=0.1)
    assert best.logprobs.dtype == best.log_partition.dtype == wide
    shift = float(reference.double().logsumexp(-1))  # what the dtype lost of probability 1
    assert abs(shift) < 0.01
    close(best.logprobs.double(), exact.logprobs, 1e-5)
    assert regularized_value(reference, reference, rewards, beta=0.1).dtype == wide
    assert implied_rewards(reference, reference, beta=0.1).dtype == wide
    uniform = torch.full((1000,), 1e-3, dtype=torch.float64).log().to(dtype)  # rounded all one way
    close(
        optimal_policy(uniform, 0 * uniform, beta=0.1).logprobs.double(),
        [-math.log(1000)] * 1000,
        1e-6,
    )


def test_log_z_may_come_once_per_prompt_or_once_per_outcome() -> None:
    """For whole distributions (P, Y) and log Z (P,); for the responses at hand, (B,) and (B,)."""
    reference, rewards = policies(3, 4, seed=0), normal(3, 4, seed=1)
    best = optimal_policy(reference, rewards, beta=0.4)
    chosen = torch.tensor([2, 0, 3])
    picked = [tensor.gather(1, chosen[:, None])[:, 0] for tensor in (best.logprobs, reference)]
    ours = implied_rewards(*picked, beta=0.4, log_partition=best.log_partition)
    close(ours, rewards.gather(1, chosen[:, None])[:, 0])
    one = implied_rewards(
        best.logprobs[0], reference[0], beta=0.4, log_partition=float(best.log_partition[0])
    )
    close(one, rewards[0])


# --- what estimators of it follow ---------------------------------------------------------------


def log_responses(theta: Tensor) -> Tensor:
    """log pi_theta(y) of the seven responses, (7,)."""
    return torch.where(MASK == 1, response_logprobs(theta), 0.0).sum(1)


@pytest.mark.parametrize("beta", [0.0, *BETAS])
def test_the_mean_of_the_penalized_reward_is_the_objective(beta: float) -> None:
    """E[R - beta k1] over what pi samples is J(pi), and REINFORCE with that reward climbs it: its
    mean gradient is that of J, exactly, although the reward carries none."""
    theta, reference = parameters(0).requires_grad_(), parameters(1)
    value = regularized_value(log_responses(theta), log_responses(reference), GRADED, beta=beta)
    (truth,) = torch.autograd.grad(value, theta)
    new = response_logprobs(theta)
    penalized = kl_penalized_rewards(GRADED, new, response_logprobs(reference), MASK, beta=beta)
    chance = probabilities(theta).detach()
    close((chance * penalized).sum(), value)
    loss, _ = policy_loss(
        new, new, 7 * chance * penalized, MASK, surrogate="reinforce", aggregation="sequence_sum"
    )
    close(torch.autograd.grad(loss, theta)[0], -truth)


@pytest.mark.parametrize("beta", [0.0, *BETAS])
def test_the_shaped_reward_climbs_the_same_objective(beta: float) -> None:
    """Each token credited with what follows it: sum_{s >= t} r_s.  What came before does not depend
    on it, so the mean gradient is again that of J."""
    theta, reference = parameters(0).requires_grad_(), parameters(1)
    value = regularized_value(log_responses(theta), log_responses(reference), GRADED, beta=beta)
    (truth,) = torch.autograd.grad(value, theta)
    new = response_logprobs(theta)
    shaped = kl_shaped_rewards(GRADED, new, response_logprobs(reference), MASK, beta=beta)
    to_go = shaped.flip(1).cumsum(1).flip(1)
    chance = probabilities(theta).detach()
    loss, _ = policy_loss(
        new,
        new,
        7 * chance[:, None] * to_go,
        MASK,
        surrogate="reinforce",
        aggregation="sequence_sum",
    )
    close(torch.autograd.grad(loss, theta)[0], -truth)


def test_the_best_token_by_token_policy_is_the_tilted_one() -> None:
    """Reading pi* of the seven responses as a policy that writes token by token: at its logits the
    gradient of J is 0, so the sequences' solution is one that the policy can reach."""
    reference = parameters(1)
    best = optimal_policy(log_responses(reference), GRADED, beta=0.5).logprobs.exp()
    after_0, after_1 = best[1:4], best[4:7]
    first = torch.stack([after_0.sum(), after_1.sum(), best[0]])
    theta = torch.stack([first, after_0 / after_0.sum(), after_1 / after_1.sum()]).log()
    theta.requires_grad_()
    close(probabilities(theta), best)
    value = regularized_value(log_responses(theta), log_responses(reference), GRADED, beta=0.5)
    close(torch.autograd.grad(value, theta)[0], torch.zeros(3, 3))


# --- the ends of the range, dtypes --------------------------------------------------------------


def test_rewards_of_any_size_have_an_optimal_policy() -> None:
    """6e38 apart: more than float32 holds, less than a billionth of beta."""
    even = torch.tensor([0.5, 0.5]).log()
    ours = optimal_policy(even, torch.tensor([3e38, -3e38]), beta=1e30)
    assert ours.logprobs.tolist() == pytest.approx([0.0, -6e8])
    assert ours.log_partition.item() == pytest.approx(3e8)
    wide = optimal_policy(even.double(), torch.tensor([3e38, -3e38]).double(), beta=1e30)
    close(ours.logprobs.double() / 6e8, wide.logprobs / 6e8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.bool])
def test_a_log_partition_of_any_dtype(dtype: torch.dtype) -> None:
    policy, reference = policies(2, 3, seed=0), policies(2, 3, seed=1)
    shift = torch.tensor([1, 0]).to(dtype)
    ours = implied_rewards(policy, reference, beta=0.5, log_partition=shift)
    close(ours, implied_rewards(policy, reference, beta=0.5, log_partition=shift.double()))


def test_the_default_device_moves_no_distribution() -> None:
    policy, rewards = policies(2, 3, seed=0), normal(2, 3, seed=1)
    best = optimal_policy(policy, rewards, beta=0.5)
    value = regularized_value(best.logprobs, policy, rewards, beta=0.5)
    with torch.device("meta"):
        again = optimal_policy(policy, rewards, beta=0.5)
        assert torch.equal(again.logprobs, best.logprobs)
        assert torch.equal(regularized_value(again.logprobs, policy, rewards, beta=0.5), value)
        back = implied_rewards(again.logprobs, policy, beta=0.5, log_partition=best.log_partition)
    close(back, rewards)
