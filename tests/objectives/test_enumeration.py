"""Exact expectations, by going through everything that a tiny policy can do.

The policy writes tokens 0 and 1 and may stop with 2; after two tokens it is cut.  That makes seven
responses, of one or two tokens.  All groups of G of them are enumerated, with their probabilities,
so "unbiased" and "biased" are equalities here, not averages over samples.  Value and gradient come
from the functions under test; the truth comes from the seven probabilities.
"""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    DR_GRPO,
    GRPO,
    GRPO_MEAN_ONLY,
    REINFORCE,
    RLOO,
    Algorithm,
    compute_advantages,
    compute_loss,
)
from rlcore.objectives import group_advantages, kl_per_token, policy_loss, token_logprobs

STOP = 2
RESPONSES = [(STOP,), *((first, last) for first in (0, 1) for last in (0, 1, STOP))]
TOKENS = torch.tensor([[*response, STOP][:2] for response in RESPONSES])  # (7, 2)
MASK = torch.tensor([[1, 1 if len(response) == 2 else 0] for response in RESPONSES])
GRADED = torch.tensor([0.3, 1.0, 0.0, -0.5, 2.0, 0.25, 0.7], dtype=torch.float64)
PASSED = torch.tensor([0, 1, 0, 0, 1, 0, 0], dtype=torch.float64)


def parameters(seed: int) -> Tensor:
    """Logits of the first token, and of the second after 0 and after 1: (3, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, generator=generator, dtype=torch.float64)


def response_logprobs(theta: Tensor) -> Tensor:
    """log pi_theta of both slots of the seven responses, (7, 2), through token_logprobs.
    The slot that a stopped response does not have holds NaN."""
    begin = torch.zeros(len(RESPONSES), 1, dtype=torch.int64)
    context = theta[1:][TOKENS[:, 0].clamp(max=1)]  # (7, 3): logits of the second token
    logits = torch.stack([theta[0].expand(7, 3), context, context], dim=1)
    scores = token_logprobs(logits, torch.cat([begin, TOKENS], dim=1))
    return scores.masked_fill(MASK == 0, math.nan)


def probabilities(theta: Tensor) -> Tensor:
    """pi_theta(y) of the seven responses, written down without the functions under test."""
    log_policy = theta.log_softmax(-1)
    return torch.stack(
        [
            log_policy[0, response[0]].exp()
            * (log_policy[1 + response[0], response[1]].exp() if len(response) == 2 else 1)
            for response in RESPONSES
        ]
    )


def gradient(value: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(value, theta, retain_graph=True)[0]


def true_gradient(theta: Tensor, rewards: Tensor) -> Tensor:
    """of J = E R(y)."""
    return gradient((probabilities(theta) * rewards).sum(), theta)


def expected_gradient(
    algorithm: Algorithm,
    theta: Tensor,
    rewards: Tensor,
    group_size: int,
    reference: Tensor | None = None,
) -> Tensor:
    """E[gradient of the loss] over all 7^G groups.  Every group is a prompt of its own, and its
    advantages carry its probability (the losses used here are linear in A while nothing is clipped,
    so one call takes many groups)."""
    total = torch.zeros_like(theta)
    groups = torch.tensor(list(itertools.product(range(7), repeat=group_size)))  # (7^G, G)
    for part in groups.split(343):
        total += gradient(_expected_loss(algorithm, theta, rewards, part, reference), theta)
    return total


def _expected_loss(
    algorithm: Algorithm, theta: Tensor, rewards: Tensor, groups: Tensor, reference: Tensor | None
) -> Tensor:
    new, size = response_logprobs(theta), groups.shape[1]
    rows, ids = groups.flatten(), torch.arange(len(groups)).repeat_interleave(size)
    extra = {}
    if reference is not None:
        extra = {
            "old_logprobs": new[rows],
            "ref_logprobs": response_logprobs(reference)[rows],
            "response_mask": MASK[rows],
        }
    if algorithm.advantage == "batch_mean":  # the batch is the group
        each = [compute_advantages(algorithm, rewards[group], ids[:size]) for group in groups]
        advantages = torch.cat([estimates.advantages for estimates in each])
    else:
        advantages = compute_advantages(algorithm, rewards[rows], ids, **extra).advantages
    chance = probabilities(theta).detach()[groups].prod(dim=1) * len(groups)
    weighted = advantages * chance.repeat_interleave(size)
    loss, stats = compute_loss(algorithm, new[rows], new[rows], weighted, MASK[rows], constant=1)
    assert stats["clip_ratio/region_mean"] == 0
    return loss


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()


def close(ours: Tensor, wanted: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=atol)


@pytest.fixture
def theta() -> Tensor:
    return parameters(0).requires_grad_()


def test_the_tiny_policy_is_a_policy(theta: Tensor) -> None:
    close(probabilities(theta).sum(), torch.tensor(1.0, dtype=torch.float64))
    log_response = torch.where(MASK == 1, response_logprobs(theta), 0.0).sum(1)
    close(log_response.exp(), probabilities(theta))


@pytest.mark.parametrize("baseline", [0.0, 0.4, -3.0])
def test_a_baseline_that_ignores_the_response_changes_nothing(
    theta: Tensor, baseline: float
) -> None:
    """REINFORCE, sum over tokens: the mean gradient is that of -J for any constant b."""
    new, weight = response_logprobs(theta), probabilities(theta).detach() * 7
    loss, _ = compute_loss(REINFORCE, new, new, (GRADED - baseline) * weight, MASK)
    close(gradient(loss, theta), -true_gradient(theta, GRADED))


@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_out_is_unbiased(theta: Tensor, group_size: int) -> None:
    row = replace(RLOO, kl="none", beta=0.0)
    close(expected_gradient(row, theta, GRADED, group_size), -true_gradient(theta, GRADED))


@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_out_with_kl_in_the_reward(theta: Tensor, group_size: int) -> None:
    """RLOO's row as it stands: the gradient of J - beta KL(pi_theta(y) || pi_ref(y)), KL of whole
    responses, exactly."""
    reference = parameters(1)
    kl = sequence_kl(theta, reference)
    wanted = -true_gradient(theta, GRADED) + RLOO.beta * gradient(kl, theta)
    close(expected_gradient(RLOO, theta, GRADED, group_size, reference=reference), wanted)
    assert RLOO.beta * gradient(kl, theta).abs().max() > 1e-3  # the term is there


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(
    "row",
    [REINFORCE, DR_GRPO, replace(GRPO_MEAN_ONLY, aggregation="sequence_sum", kl="none", beta=0.0)],
    ids=["batch mean", "Dr. GRPO", "mean only"],
)
def test_a_mean_that_contains_the_own_reward_scales_the_gradient(
    theta: Tensor, row: Algorithm, group_size: int
) -> None:
    """By (G-1)/G, and does nothing else: not "biased" in direction, as some write.
    (Dr. GRPO with L = 1: its constant would divide the gradient by L.)"""
    factor = (group_size - 1) / group_size
    wanted = -factor * true_gradient(theta, GRADED)
    close(expected_gradient(row, theta, GRADED, group_size), wanted)


Z_SCORE = replace(GRPO, aggregation="sequence_sum", kl="none", beta=0.0)


def z(rewards: tuple[float, ...]) -> list[float]:
    """Textbook z-score with the population std, without the functions under test."""
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / std if std else 0.0 for reward in rewards]


def mean_z_given_own(own: float, values: Tensor, chances: Tensor, others: int) -> float:
    """E[A^(1) | R^(1) = own] when `others` more rewards are drawn."""
    total = 0.0
    for drawn in itertools.product(range(len(values)), repeat=others):
        rewards = (own, *(values[index].item() for index in drawn))
        total += math.prod(chances[index].item() for index in drawn) * z(rewards)[0]
    return total


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_group_std_changes_the_objective_and_how(theta: Tensor, group_size: int) -> None:
    """E gradient = -sum_y grad pi(y) E[A | y]: each reward R(y) is replaced by the mean z-score of
    a response with that reward.  For graded rewards this is another direction than the true one."""
    chances = probabilities(theta).detach()
    effective = [mean_z_given_own(r, GRADED, chances, group_size - 1) for r in GRADED.tolist()]
    ours = expected_gradient(Z_SCORE, theta, GRADED, group_size)
    close(ours, -true_gradient(theta, torch.tensor(effective, dtype=torch.float64)))
    assert cosine(ours, -true_gradient(theta, GRADED)) < 0.99


def prompt_weight(p: float, group_size: int) -> float:
    """What a prompt with success rate p weighs under the z-score: E[A | right] - E[A | wrong]."""
    values = torch.tensor([0.0, 1.0], dtype=torch.float64)
    chances = torch.tensor([1 - p, p], dtype=torch.float64)
    right, wrong = (mean_z_given_own(own, values, chances, group_size - 1) for own in (1.0, 0.0))
    return right - wrong


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_with_rewards_0_and_1_the_group_std_weighs_prompts(group_size: int) -> None:
    """Right or wrong: within a prompt the direction is the true one, its length is w(p) times the
    true one.  For G = 2 and G = 3, w is 1 and sqrt(2) whatever p is; from G = 4 on it depends on p,
    so prompts are traded off otherwise than E R says, and rare successes count more."""
    weights = {}
    for seed in range(3):
        theta = parameters(seed).requires_grad_()
        p = (probabilities(theta) * PASSED).sum().item()
        weights[p] = prompt_weight(p, group_size)
        ours = expected_gradient(Z_SCORE, theta, PASSED, group_size)
        close(ours, -weights[p] * true_gradient(theta, PASSED))
    if group_size < 4:
        assert list(weights.values()) == pytest.approx([math.sqrt(group_size - 1)] * 3, abs=1e-12)
    else:
        by_distance_from_half = sorted(weights, key=lambda p: abs(p - 0.5))
        ordered = [weights[p] for p in by_distance_from_half]
        assert ordered == sorted(ordered)
        assert ordered[-1] - ordered[0] > 0.01


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_for_large_groups_the_weight_is_one_over_the_std(p: float) -> None:
    """w(p) -> 1 / sqrt(p (1 - p)): GRPO then follows 2 arcsin(sqrt(p)) instead of p."""
    size = 256
    weight = 0.0
    for successes in range(size):  # of the size - 1 others
        chance = math.comb(size - 1, successes) * p**successes * (1 - p) ** (size - 1 - successes)
        zeros = torch.zeros(size, dtype=torch.int64)
        if successes < size - 1:  # own answer wrong: successes in all, own is the last
            rewards = (torch.arange(size) < successes).double()
            weight -= chance * group_advantages(rewards, zeros)[-1].item()
        rewards = (torch.arange(size) < successes + 1).double()  # own answer right: the first
        weight += chance * group_advantages(rewards, zeros)[0].item()
    assert weight == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=0.02)


def test_dividing_by_the_length_is_another_reward(theta: Tensor) -> None:
    """A mean per response follows E[(R - b) / |y|]: the baseline no longer drops out, and short
    responses count more.  A constant divisor only scales."""
    new, chances = response_logprobs(theta), probabilities(theta).detach()
    lengths, found = MASK.sum(1), []
    for baseline in (0.0, 0.4):
        advantages = (GRADED - baseline) * chances * 7
        by_mean, _ = policy_loss(new, new, advantages, MASK, aggregation="sequence_mean")
        close(gradient(by_mean, theta), -true_gradient(theta, (GRADED - baseline) / lengths))
        by_constant, _ = policy_loss(new, new, advantages, MASK, aggregation="constant", constant=2)
        close(gradient(by_constant, theta), -true_gradient(theta, GRADED) / 2)
        found.append(gradient(by_mean, theta))
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_the_ratio_of_whole_responses_corrects_old_samples(theta: Tensor) -> None:
    """Sampled from pi_old, weighted by pi_theta(y)/pi_old(y), nothing clipped: value -J(theta) and
    its gradient, exactly.  One ratio per token does not do that."""
    old_theta = parameters(3)
    new, old = response_logprobs(theta), response_logprobs(old_theta)
    advantages = GRADED * probabilities(old_theta) * 7
    wide = {"epsilon_low": 1.0, "epsilon_high": 1e9}
    exact, _ = policy_loss(new, old, advantages, MASK, ratio_level="sequence_sum", **wide)
    close(exact, -(probabilities(theta) * GRADED).sum())
    close(gradient(exact, theta), -true_gradient(theta, GRADED))
    by_token, _ = policy_loss(
        new, old, advantages, MASK, ratio_level="token", aggregation="sequence_sum", **wide
    )
    assert (gradient(by_token, theta) + true_gradient(theta, GRADED)).abs().max() > 1e-2


# --- KL -----------------------------------------------------------------------------------------


def sequence_kl(theta: Tensor, reference: Tensor) -> Tensor:
    """KL of the distributions of whole responses, from their probabilities."""
    policy, ref = probabilities(theta), probabilities(reference)
    return (policy * (policy.log() - ref.log())).sum()


def token_kl(theta: Tensor, reference: Tensor, forward: bool = False) -> Tensor:
    """Sum over prefixes of pi(prefix), held fixed, times the KL of the next token."""
    one, other = theta.log_softmax(-1), reference.log_softmax(-1)
    if forward:
        one, other = other, one
    prefixes = torch.cat([torch.ones(1, dtype=torch.float64), theta[0].softmax(0)[:2]]).detach()
    return (prefixes[:, None] * one.exp() * (one - other)).sum()


def mean_kl(theta: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """E over responses, with their probabilities held fixed, of the estimate summed over tokens."""
    each = kl_per_token(
        response_logprobs(theta), response_logprobs(reference), MASK, estimator=estimator
    )
    return (probabilities(theta).detach() * each.sum(1)).sum()


def test_k1_and_k3_are_unbiased_values_of_the_kl_k2_is_not(theta: Tensor) -> None:
    reference = parameters(1)
    truth = sequence_kl(theta, reference)
    close(mean_kl(theta, reference, "k1"), truth)
    close(mean_kl(theta, reference, "k3"), truth)
    assert (mean_kl(theta, reference, "k2") - truth).abs() > 1e-2
    # samples from pi_theta estimate KL(theta || ref), not the other direction
    assert (truth - sequence_kl(reference, theta)).abs() > 1e-2


def test_as_a_loss_k1_teaches_nothing_k2_this_kl_k3_the_other(theta: Tensor) -> None:
    """And all of them see the next token only: how the policy chose the prefix is left out, unlike
    with the KL in the reward."""
    reference = parameters(1)
    this_kl = gradient(token_kl(theta, reference), theta)
    other_kl = gradient(token_kl(theta, reference, forward=True), theta)
    close(gradient(mean_kl(theta, reference, "k1"), theta), torch.zeros_like(this_kl))
    close(gradient(mean_kl(theta, reference, "k2"), theta), this_kl)
    close(gradient(mean_kl(theta, reference, "k3"), theta), other_kl)
    assert (this_kl - other_kl).abs().max() > 1e-2
    assert (this_kl - gradient(sequence_kl(theta, reference), theta)).abs().max() > 1e-2


@pytest.mark.parametrize("weighted", [False, True])
def test_the_kl_term_of_the_loss(theta: Tensor, weighted: bool) -> None:
    """policy_loss with advantage 0: k3 pulls along KL(ref || theta), rho k3 along KL(theta || ref).

    Linear in beta: seven calls, one response each, weighted by its probability."""
    reference, chances = parameters(1), probabilities(theta).detach()
    new, ref = response_logprobs(theta), response_logprobs(reference)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(7):
        only = slice(row, row + 1)
        loss, _ = policy_loss(
            new[only],
            new[only],
            torch.zeros(1),
            MASK[only],
            aggregation="sequence_sum",
            ref_logprobs=ref[only],
            beta=0.5,
            kl_importance_weighted=weighted,
        )
        total = total + chances[row] * loss
    wanted = 0.5 * gradient(token_kl(theta, reference, forward=not weighted), theta)
    close(gradient(total, theta), wanted)
    close(total, 0.5 * sequence_kl(theta, reference))
