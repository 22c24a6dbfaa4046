"""Every surrogate and every place of the KL term, over all that a tiny policy can do.

The policy of test_enumeration: seven responses, their probabilities written down.  Samples come
from an old policy, each response with its probability, so the mean of a loss is exact.  What it
should be comes from those probabilities and from d log pi alone, without the functions under test.
"""

import math
from typing import Any

import pytest
import torch
from test_enumeration import (
    GRADED,
    MASK,
    RESPONSES,
    TOKENS,
    close,
    cosine,
    gradient,
    parameters,
    probabilities,
    response_logprobs,
    token_kl,
    true_gradient,
)
from torch import Tensor

from rlcore.objectives import (
    RATIO_LEVELS,
    SURROGATES,
    aggregate,
    dynamic_clip_range,
    entropy,
    policy_loss,
)

LENGTHS = MASK.sum(1)
CENTRED = GRADED - 0.4  # both signs
REAL = MASK == 1


@pytest.fixture
def theta() -> Tensor:
    return parameters(0).requires_grad_()


@pytest.fixture
def old_theta() -> Tensor:
    return parameters(3)


def scores(theta: Tensor) -> Tensor:
    """d log pi(y_t) / d theta of both slots of the seven responses, (7, 2, 3, 3), by hand:
    1[v = y_t] - pi(v) at the logits that y_t was drawn from, 0 elsewhere and in padding."""
    policy = theta.detach().softmax(-1)
    result = torch.zeros(7, 2, 3, 3, dtype=torch.float64)
    for row, response in enumerate(RESPONSES):
        for slot, token in enumerate(response):
            prefix = 0 if slot == 0 else 1 + response[0]
            result[row, slot, prefix] = -policy[prefix]
            result[row, slot, prefix, token] += 1
    return result


def token_ratios(theta: Tensor, old_theta: Tensor) -> Tensor:
    """rho of both slots, 1 in padding, from the tables of the two policies."""
    new, old = theta.detach().softmax(-1), old_theta.softmax(-1)
    result = torch.ones(7, 2, dtype=torch.float64)
    for row, response in enumerate(RESPONSES):
        for slot, token in enumerate(response):
            prefix = 0 if slot == 0 else 1 + response[0]
            result[row, slot] = new[prefix, token] / old[prefix, token]
    return result


def mean_loss(
    theta: Tensor, old_theta: Tensor, advantages: Tensor = CENTRED, **arguments: Any
) -> Tensor:
    """E over responses of pi_old of each response's own loss, with the sum over its tokens."""
    new, old = response_logprobs(theta), response_logprobs(old_theta)
    chances, each = probabilities(old_theta).detach(), []
    arguments = {"aggregation": "sequence_sum", **arguments}
    for row in range(7):
        only = slice(row, row + 1)
        loss, _ = policy_loss(new[only], old[only], advantages[only], MASK[only], **arguments)
        each.append(chances[row] * loss)
    return torch.stack(each).sum()


def by_hand(weights: Tensor, theta: Tensor, old_theta: Tensor) -> Tensor:
    """-E_old sum_t w_t d log pi(y_t): the gradient of a loss whose tokens push with weights w."""
    chances = probabilities(old_theta)[:, None] * REAL
    return -torch.einsum("gt,gt,gtij->ij", chances, weights, scores(theta))


def one_side(ratio: Tensor, advantages: Tensor, low: Any, high: Any) -> Tensor:
    """1 where the clip of PPO leaves the gradient."""
    stopped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return (~stopped).double()


def test_the_scores_by_hand(theta: Tensor) -> None:
    for row, slot in ((0, 0), (2, 1), (6, 0)):
        ours = gradient(response_logprobs(theta)[row, slot], theta)
        close(ours, scores(theta)[row, slot])


# --- where the policy has not moved ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("surrogate", "level"),
    [
        (surrogate, level)
        for surrogate in SURROGATES
        for level in RATIO_LEVELS
        if surrogate != "gamma" or level == "sequence_sum"
    ],
)
def test_at_ratio_one_every_surrogate_is_the_policy_gradient(
    theta: Tensor, surrogate: str, level: str
) -> None:
    """The gradient of -J, exactly: soft since f'(1) = 1, gamma since phi(1) = 1, clip since
    nothing is clipped.  The un-rooted ratio of a response needs 1/|y| for it."""
    repeats = level == "sequence_sum" and surrogate in ("clip", "soft")
    advantages = CENTRED / LENGTHS if repeats else CENTRED
    loss = mean_loss(theta, theta, advantages, surrogate=surrogate, ratio_level=level)
    close(gradient(loss, theta), -true_gradient(theta, GRADED))


def test_at_ratio_one_the_dynamic_range_is_the_policy_gradient(theta: Tensor) -> None:
    loss = mean_loss(theta, theta, clip_range="dynamic")
    close(gradient(loss, theta), -true_gradient(theta, GRADED))


# --- where it has: samples from an old policy -----------------------------------------------------


@pytest.mark.parametrize("epsilons", [(0.2, 0.2), (0.1, 0.4), (1.0, 9.0)])
def test_clip_pushes_with_the_ratio_until_the_end_of_its_side(
    theta: Tensor, old_theta: Tensor, epsilons: tuple[float, float]
) -> None:
    low, high = 1 - epsilons[0], 1 + epsilons[1]
    loss = mean_loss(theta, old_theta, epsilon_low=epsilons[0], epsilon_high=epsilons[1])
    ratio, advantages = token_ratios(theta, old_theta), CENTRED[:, None]
    free = one_side(ratio, advantages, low, high)
    close(gradient(loss, theta), by_hand(free * ratio * advantages, theta, old_theta))
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    close(loss, -(probabilities(old_theta)[:, None] * REAL * gain).sum())
    assert (free[REAL] == 0).any() == (epsilons[1] < 1)  # the case is there


@pytest.mark.parametrize("ratio_max", [1.2, 1.3, 1.5])
def test_the_cap_stops_what_grew_too_likely_and_was_bad(
    theta: Tensor, old_theta: Tensor, ratio_max: float
) -> None:
    loss = mean_loss(theta, old_theta, ratio_max=ratio_max)
    ratio, advantages = token_ratios(theta, old_theta), CENTRED[:, None]
    beyond = (advantages < 0) & (ratio > ratio_max)
    free = one_side(ratio, advantages, 0.8, 1.2) * ~beyond
    close(gradient(loss, theta), by_hand(free * ratio * advantages, theta, old_theta))
    assert beyond[REAL].any()
    plain = mean_loss(theta, old_theta)
    assert (gradient(loss, theta) - gradient(plain, theta)).abs().max() > 1e-3
    assert loss < plain  # the cap bounds what a bad token costs


def test_the_dynamic_range_clips_each_token_by_its_own_probability(
    theta: Tensor, old_theta: Tensor
) -> None:
    """DCPO, from |(rho - 1) rho q| <= eps itself."""
    arguments: dict[str, Any] = {"epsilon_low": 0.04, "epsilon_high": 0.05, "ratio_max": 1.6}
    loss = mean_loss(theta, old_theta, clip_range="dynamic", **arguments)
    ratio, advantages = token_ratios(theta, old_theta), CENTRED[:, None]
    q = response_logprobs(old_theta).exp()
    moved = (ratio - 1) * ratio * q
    above = (advantages > 0) & ((moved > 0.05) | (ratio > 1.6))
    below = (advantages < 0) & ((moved < -0.04) | (ratio < 0.5))
    beyond = (advantages < 0) & (ratio > 1.6)  # r_max holds for both signs
    for group in (above, below, beyond):
        assert group[REAL].any()
    weights = ratio * advantages * ~(above | below | beyond)
    close(gradient(loss, theta), by_hand(weights, theta, old_theta))
    low, high = dynamic_clip_range(response_logprobs(old_theta), MASK, **arguments)
    limited = torch.where(advantages > 0, torch.minimum(ratio, high), torch.maximum(ratio, low))
    limited = limited.clamp(max=1.6)
    close(loss, -(probabilities(old_theta)[:, None] * REAL * limited * advantages).sum())


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("cap", [(1.0, 0.28), (0.3, 0.1), (1.0, 1e9)])
def test_capped_pushes_every_token_with_a_weight_that_is_cut(
    theta: Tensor, old_theta: Tensor, cap: tuple[float, float], level: str
) -> None:
    """CISPO: weight clip(rho), no token without a gradient; uncut it is clip's, uncut."""
    loss = mean_loss(
        theta,
        old_theta,
        surrogate="capped",
        ratio_level=level,
        epsilon_low=cap[0],
        epsilon_high=cap[1],
    )
    ratio = token_ratios(theta, old_theta)
    if level != "token":
        power = 1 if level == "sequence_sum" else 1 / LENGTHS[:, None]
        ratio = (ratio.prod(1, keepdim=True) ** power).expand(7, 2)
    weights = ratio.clamp(1 - cap[0], 1 + cap[1]) * CENTRED[:, None]
    close(gradient(loss, theta), by_hand(weights, theta, old_theta))
    if cap[1] > 1 and level == "token":
        unclipped = mean_loss(theta, old_theta, epsilon_low=1.0, epsilon_high=1e9)
        close(gradient(loss, theta), gradient(unclipped, theta))


def test_the_cap_as_a_ratio_is_another_loss(theta: Tensor, old_theta: Tensor) -> None:
    """TRL's reading: epsilon_high is the cap itself.  An offset of 0.28 is its 1.28; its 0.28
    would cut every weight of this batch that is above it, and none of ours is below 0.28."""
    ours = mean_loss(theta, old_theta, surrogate="capped", epsilon_low=1.0, epsilon_high=0.28)
    ratio, advantages = token_ratios(theta, old_theta), CENTRED[:, None]
    right = by_hand(ratio.clamp(max=1.28) * advantages, theta, old_theta)
    trap = by_hand(ratio.clamp(max=0.28) * advantages, theta, old_theta)
    close(gradient(ours, theta), right)
    assert (right - trap).abs().max() > 1e-2


@pytest.mark.parametrize("taus", [(1.0, 1.05), (2.0, 5.0)])
def test_soft_pushes_with_the_slope_of_its_gate(
    theta: Tensor, old_theta: Tensor, taus: tuple[float, float]
) -> None:
    """SAPO: f'(rho) rho with f' = 4 sigma (1 - sigma), tau by the sign of A."""
    loss = mean_loss(theta, old_theta, surrogate="soft", tau_positive=taus[0], tau_negative=taus[1])
    ratio, advantages = token_ratios(theta, old_theta), CENTRED[:, None]
    tau = torch.where(advantages > 0, *(torch.tensor(t, dtype=torch.float64) for t in taus))
    gate = 1 / (1 + torch.exp(-tau * (ratio - 1)))
    slope = 4 * gate * (1 - gate)
    close(gradient(loss, theta), by_hand(slope * ratio * advantages, theta, old_theta))
    value = (4 / tau * gate * advantages * REAL).sum(1)
    close(loss, -(probabilities(old_theta) * value).sum())


def test_gamma_pushes_whole_responses_with_its_weight(theta: Tensor, old_theta: Tensor) -> None:
    """VESPO: phi(W) of the response's ratio, k and lambda by the sign of A."""
    loss = mean_loss(theta, old_theta, surrogate="gamma", ratio_level="sequence_sum")
    whole = (probabilities(theta) / probabilities(old_theta)).detach()[:, None]
    phi = torch.where(
        CENTRED[:, None] >= 0,
        whole**2 * (3 * (1 - whole)).exp(),
        whole**3 * (2 * (1 - whole)).exp(),
    )
    weights = (phi * CENTRED[:, None]).expand(7, 2)
    close(gradient(loss, theta), by_hand(weights, theta, old_theta))


def test_reinforce_knows_no_old_policy(theta: Tensor, old_theta: Tensor) -> None:
    """On old samples it follows the old policy's mean of A grad log pi: not the gradient of J."""
    loss = mean_loss(theta, old_theta, surrogate="reinforce")
    weights = CENTRED[:, None].expand(7, 2)
    close(gradient(loss, theta), by_hand(weights, theta, old_theta))
    assert (gradient(loss, theta) + true_gradient(theta, CENTRED)).abs().max() > 1e-2


# --- GSPO -----------------------------------------------------------------------------------------


def all_at_once(
    theta: Tensor, old_theta: Tensor, advantages: Tensor, **arguments: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """One call with all seven responses, each as likely as any other."""
    new, old = response_logprobs(theta), response_logprobs(old_theta)
    return policy_loss(new, old, advantages, MASK, **arguments)


@pytest.mark.parametrize("how", ["sequence_mean", "only_token_mean"])
@pytest.mark.parametrize("epsilons", [(1.0, 1e9), (0.1, 0.1)])
def test_gspo_and_its_token_form_are_one_with_one_advantage(
    theta: Tensor, old_theta: Tensor, how: str, epsilons: tuple[float, float]
) -> None:
    """Value, gradient, statistics; and the formula of eq. 5, from the probabilities."""
    arguments = {"aggregation": how, "epsilon_low": epsilons[0], "epsilon_high": epsilons[1]}
    results = [
        all_at_once(theta, old_theta, CENTRED, ratio_level=level, **arguments)
        for level in ("sequence", "sequence_token")
    ]
    close(results[0][0], results[1][0])
    close(gradient(results[0][0], theta), gradient(results[1][0], theta))
    for key, value in results[0][1].items():
        close(value, results[1][1][key])
    s = (probabilities(theta) / probabilities(old_theta)) ** (1 / LENGTHS)
    limited = s.clamp(1 - epsilons[0], 1 + epsilons[1])
    wanted = -torch.minimum(s * CENTRED, limited * CENTRED).sum()
    wanted = wanted / 7 if how == "sequence_mean" else wanted
    close(results[0][0], wanted)
    close(gradient(results[0][0], theta), gradient(wanted, theta))
    assert (results[0][1]["clip_ratio/region_mean"] > 0) == (epsilons[0] < 1)


def test_the_token_form_lets_advantages_differ(theta: Tensor, old_theta: Tensor) -> None:
    """Each token pushes with s_g times its own A; at the level of the response all of its tokens
    push with the mean of A."""
    advantages = torch.stack([CENTRED, CENTRED.flip(0)], dim=1)
    wide = {"epsilon_low": 1.0, "epsilon_high": 1e9, "aggregation": "sequence_sum"}
    s = ((probabilities(theta) / probabilities(old_theta)) ** (1 / LENGTHS)).detach()[:, None]
    mean = ((advantages * REAL).sum(1) / LENGTHS)[:, None].expand(7, 2)
    for level, used in (("sequence_token", advantages), ("sequence", mean)):
        loss, _ = all_at_once(theta, old_theta, advantages, ratio_level=level, **wide)
        wanted = -torch.einsum("gt,gtij->ij", s * used * REAL, scores(theta)) / 7
        close(gradient(loss, theta), wanted)


def test_gspo_with_the_mean_over_tokens_is_not_gspo(theta: Tensor, old_theta: Tensor) -> None:
    """It weighs each response by its length: the short one, here the good one, counts for half."""
    advantages = torch.tensor([3.0, *CENTRED[1:]], dtype=torch.float64)
    arguments = {"ratio_level": "sequence", "epsilon_low": 1.0, "epsilon_high": 1e9}
    right, _ = all_at_once(theta, old_theta, advantages, **arguments)
    wrong, _ = all_at_once(theta, old_theta, advantages, aggregation="token_mean", **arguments)
    weighed, _ = all_at_once(
        theta, old_theta, advantages * LENGTHS * 7 / LENGTHS.sum(), **arguments
    )
    close(wrong, weighed)
    close(gradient(wrong, theta), gradient(weighed, theta))
    assert (wrong - right).abs() > 1e-3
    assert cosine(gradient(wrong, theta), gradient(right, theta)) < 0.995


# --- three meanings of the only-token-mean --------------------------------------------------------


def test_the_only_token_mean_of_the_paper_of_its_readme_and_of_its_code(
    theta: Tensor, old_theta: Tensor
) -> None:
    """Eq. 8: G times the mean over responses, no 1/G.  The README's is the mean of sums, the
    code's the token mean over a micro-batch: equal to eq. 8 only if each micro-batch holds one
    response and their losses are summed."""
    arguments: dict[str, Any] = {"clip_range": "dynamic"}
    paper, _ = all_at_once(theta, old_theta, CENTRED, aggregation="only_token_mean", **arguments)
    mean, _ = all_at_once(theta, old_theta, CENTRED, aggregation="sequence_mean", **arguments)
    readme, _ = all_at_once(theta, old_theta, CENTRED, aggregation="sequence_sum", **arguments)
    code, _ = all_at_once(theta, old_theta, CENTRED, aggregation="token_mean", **arguments)
    close(paper, 7 * mean)
    close(gradient(paper, theta), 7 * gradient(mean, theta))
    new, old = response_logprobs(theta), response_logprobs(old_theta)
    singly = [
        policy_loss(
            new[row : row + 1],
            old[row : row + 1],
            CENTRED[row : row + 1],
            MASK[row : row + 1],
            aggregation="token_mean",
            **arguments,
        )[0]
        for row in range(7)
    ]
    close(torch.stack(singly).sum(), paper)
    for one, other in ((paper, readme), (paper, code), (readme, code)):
        assert (one - other).abs() > 1e-2


# --- the KL term ----------------------------------------------------------------------------------

REVERSE, FORWARD, ZERO, OTHER = "KL(theta || ref)", "KL(ref || theta)", "nothing", "something else"
MEANING = [
    ("k1", False, ZERO),
    ("k2", False, REVERSE),
    ("k3", False, FORWARD),
    ("k1", True, REVERSE),
    ("k2", True, OTHER),
    ("k3", True, REVERSE),
]


@pytest.mark.parametrize(("estimator", "weighted", "meaning"), MEANING)
@pytest.mark.parametrize("surrogate", ["clip", "reinforce", "soft", "capped"])
def test_what_each_kl_term_teaches(
    theta: Tensor, surrogate: str, estimator: str, weighted: bool, meaning: str
) -> None:
    """Through policy_loss with advantage 0, over the policy's own samples: the mean gradient of
    the term is beta times that of the KL it stands for, next token by next token."""
    reference, beta = parameters(1), 0.5
    new, ref, chances = (
        response_logprobs(theta),
        response_logprobs(reference),
        probabilities(theta).detach(),
    )
    each = [
        policy_loss(
            new[row : row + 1],
            new[row : row + 1],
            torch.zeros(1),
            MASK[row : row + 1],
            surrogate=surrogate,
            aggregation="sequence_sum",
            ref_logprobs=ref[row : row + 1],
            beta=beta,
            kl_estimator=estimator,
            kl_importance_weighted=weighted,
        )[0]
        for row in range(7)
    ]
    ours = gradient((chances * torch.stack(each)).sum(), theta) / beta
    reverse = gradient(token_kl(theta, reference), theta)
    forward = gradient(token_kl(theta, reference, forward=True), theta)
    meanings = {REVERSE: reverse, FORWARD: forward, ZERO: torch.zeros_like(reverse)}
    for name, wanted in meanings.items():
        if name == meaning:
            close(ours, wanted)
        else:
            assert (ours - wanted).abs().max() > 1e-2, name


def one_token_kl(theta: Tensor, reference: Tensor) -> Tensor:
    """KL of the first token."""
    policy, ref = theta[0].log_softmax(-1), reference[0].log_softmax(-1)
    return (policy.exp() * (policy - ref)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_on_old_samples_only_the_weighted_term_is_the_kl(
    theta: Tensor, old_theta: Tensor, estimator: str, weighted: bool
) -> None:
    """One token, drawn from the old policy: rho k1 and rho k3 have value and gradient of
    KL(theta || ref); without rho nothing has either."""
    reference = parameters(1)
    new, old, ref = (policy[0].log_softmax(-1)[:, None] for policy in (theta, old_theta, reference))
    chances = old.detach().exp()[:, 0]
    each = [
        policy_loss(
            new[v : v + 1],
            old[v : v + 1],
            torch.zeros(1),
            torch.ones(1, 1),
            ref_logprobs=ref[v : v + 1],
            beta=1.0,
            kl_estimator=estimator,
            kl_importance_weighted=weighted,
        )[0]
        for v in range(3)
    ]
    ours, truth = (chances * torch.stack(each)).sum(), one_token_kl(theta, reference)
    exact = weighted and estimator != "k2"
    value_gap = (ours - truth).abs()
    gradient_gap = (gradient(ours, theta) - gradient(truth, theta)).abs().max()
    assert (value_gap < 1e-12) == exact
    assert (gradient_gap < 1e-12) == exact


def test_the_objective_with_its_kl_on_the_policys_own_samples(theta: Tensor) -> None:
    """GRPO's gradient in full: that of -J + beta KL for rho k3, both terms in one loss."""
    reference, beta = parameters(1), 0.3
    new, ref = response_logprobs(theta), response_logprobs(reference)
    weight = probabilities(theta).detach()
    each = [
        weight[row]
        * policy_loss(
            new[row : row + 1],
            new[row : row + 1],
            CENTRED[row : row + 1],
            MASK[row : row + 1],
            aggregation="sequence_sum",
            ref_logprobs=ref[row : row + 1],
            beta=beta,
            kl_importance_weighted=True,
        )[0]
        for row in range(7)
    ]
    wanted = -true_gradient(theta, GRADED) + beta * gradient(token_kl(theta, reference), theta)
    close(gradient(torch.stack(each).sum(), theta), wanted)


# --- the entropy term -----------------------------------------------------------------------------


def test_the_entropy_term_is_the_gradient_of_the_entropy(theta: Tensor) -> None:
    """Of the first token's distribution: the loss falls where it is wide, at the weight given."""
    logits = theta[:1].expand(3, 3)  # three answers of one token, whichever was drawn
    new = theta[0].log_softmax(-1)[:, None]
    loss, stats = policy_loss(
        new,
        new,
        torch.zeros(3),
        torch.ones(3, 1),
        entropies=entropy(logits)[:, None],
        entropy_coef=0.7,
    )
    policy = theta[0].log_softmax(-1)
    wanted = -(policy.exp() * policy).sum()
    close(stats["entropy"], wanted.detach())
    close(gradient(loss, theta), -0.7 * gradient(wanted, theta))


def test_the_entropy_term_over_responses_of_two_lengths(theta: Tensor) -> None:
    """A mean over the real tokens of the batch, while the gain is a mean over responses."""
    context = theta[1:][TOKENS[:, 0].clamp(max=1)]
    entropies = entropy(torch.stack([theta[0].expand(7, 3), context], dim=1))
    entropies = entropies.masked_fill(~REAL, math.nan)
    new = response_logprobs(theta)
    loss, _ = policy_loss(new, new, torch.zeros(7), MASK, entropies=entropies, entropy_coef=1.0)
    log_policy = theta.log_softmax(-1)
    table = -(log_policy.exp() * log_policy).sum(-1)
    twice = [response[0] for response in RESPONSES if len(response) == 2]
    wanted = (7 * table[0] + sum(table[1 + first] for first in twice)) / 13
    close(loss, -wanted)
    close(gradient(loss, theta), -gradient(wanted, theta))


def test_the_aggregations_of_ones(theta: Tensor) -> None:
    """What the weights of the 13 tokens sum to, by name: the size of a learning rate hides here."""
    ones = torch.ones(7, 2, dtype=torch.float64)
    sums = {
        how: aggregate(ones, MASK, how=how, constant=2 if how == "constant" else None).item()
        for how in ("sequence_mean", "token_mean", "constant", "sequence_sum", "only_token_mean")
    }
    assert sums == pytest.approx(
        {
            "sequence_mean": 1,
            "token_mean": 1,
            "constant": 13 / 14,
            "sequence_sum": 13 / 7,
            "only_token_mean": 7,
        }
    )
