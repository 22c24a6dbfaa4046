"""DPO's family and KTO: exact expectations over all pairs of a tiny policy, and what always holds.

The tiny policy writes tokens 0 and 1 and may stop with 2; after two tokens it is cut.  That makes
seven responses, of one or two tokens; all pairs of them are enumerated, with the probabilities that
a labeller prefers the one to the other.
"""

import itertools
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.objectives import (
    LINKS,
    SCORES,
    SMOOTHINGS,
    kto_loss,
    kto_weights,
    optimal_policy,
    preference_loss,
)

settings.register_profile("rlcore", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("rlcore")

FILE = Path(__file__).parents[1] / "data" / "cases.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())}
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
RATIO_SCORES = ("log_ratio_sum", "log_ratio_mean")
every_score = pytest.mark.parametrize("score", SCORES)
every_link = pytest.mark.parametrize("link", LINKS)


def close(ours: Tensor, wanted: Any, atol: float = 1e-12, rtol: float = 1e-11) -> None:
    wanted = torch.as_tensor(wanted, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted.detach(), atol=atol, rtol=rtol)


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf, retain_graph=True)[0]


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


# --- by hand ------------------------------------------------------------------------------------


def score_by_hand(score: str, policy: list[float], reference: list[float]) -> float:
    """One response's score, from its real tokens."""
    total, length = sum(policy), len(policy)
    if score == "log_odds":
        p = math.exp(total / length)
        return math.log(p / (1 - p))
    if score == "logprob_mean":
        return total / length
    ratio = total - sum(reference)
    return ratio if score == "log_ratio_sum" else ratio / length


def link_by_hand(link: str, h: float, beta: float, gamma: float) -> float:
    if link == "square":
        return (h - 1 / (2 * beta)) ** 2
    z = beta * h - gamma
    return math.log1p(math.exp(-z)) if link == "sigmoid" else max(0.0, 1 - z)


def smooth_by_hand(smoothing: str, right: float, flipped: float, wrong: float) -> float:
    if smoothing == "robust":
        return ((1 - wrong) * right - wrong * flipped) / (1 - 2 * wrong)
    return (1 - wrong) * right + wrong * flipped


Batch = dict[str, Tensor]
SIDES = ("chosen", "rejected")


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 4) -> Batch:
    """Log-probs of policy and reference on both sides, and masks with a token in every row."""
    rows = draw(st.integers(1, max_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch = {}
    for side in SIDES:
        lengths = draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
        width = draw(st.integers(max(lengths), 5))
        policy = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2 - 0.05
        noise = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        batch |= {f"{side}": policy, f"ref_{side}": policy - 0.5 * noise, f"{side}_mask": mask}
    return batch


def loss_of(batch: Batch, *, rows: Any = slice(None), **options: Any) -> tuple[Tensor, dict]:
    """preference_loss of (some rows of) a batch, with a reference if the score has one."""
    if options.get("score", "log_ratio_sum") in RATIO_SCORES:
        for side in SIDES:
            options[f"ref_{side}_logprobs"] = batch[f"ref_{side}"][rows]
    names = ("chosen", "rejected", "chosen_mask", "rejected_mask")
    return preference_loss(*(batch[name][rows] for name in names), **options)


def settings_of(draw: Any, link: str) -> dict[str, Any]:
    """A margin, a weight, a smoothing and a likelihood term, where the link takes them."""
    return {
        "link": link,
        "beta": draw(st.sampled_from([0.1, 0.5, 2.0])),
        "gamma": 0.0 if link == "square" else draw(st.sampled_from([0.0, 0.7])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 0.4])),
        "smoothing": draw(st.sampled_from(SMOOTHINGS)),
        "weight": draw(st.sampled_from([1.0, 0.25])),
        "nll_coef": draw(st.sampled_from([0.0, 1.5])),
    }


@every_link
@every_score
@given(batch=batches(), data=st.data())
@settings(max_examples=25)
def test_the_loss_and_its_statistics_by_hand(
    score: str, link: str, batch: Batch, data: st.DataObject
) -> None:
    options = settings_of(data.draw, link)
    beta, wrong = options["beta"], options["label_smoothing"]
    losses, scores, logps, tokens = [], [], [], []
    for row in range(len(batch["chosen"])):
        real = {
            name: batch[name][row][batch[f"{name.removeprefix('ref_')}_mask"][row]].tolist()
            for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")
        }
        each = [score_by_hand(score, real[side], real[f"ref_{side}"]) for side in SIDES]
        h = each[0] - each[1]
        right, flipped = (link_by_hand(link, sign * h, beta, options["gamma"]) for sign in (1, -1))
        losses.append(smooth_by_hand(options["smoothing"], right, flipped, wrong))
        scores.append(each)
        share = [1 if score in RATIO_SCORES else 1 / len(real[side]) for side in SIDES]
        logps.append([sum(real[side]) * share[number] for number, side in enumerate(SIDES)])
        tokens += real["chosen"]

    rows, nll = len(losses), -sum(tokens) / len(tokens)
    loss, stats = loss_of(batch, score=score, **options)
    close(loss, options["weight"] * sum(losses) / rows + options["nll_coef"] * nll)
    gaps = [chosen - rejected for chosen, rejected in scores]
    wanted = {
        "rewards/chosen": beta * sum(pair[0] for pair in scores) / rows,
        "rewards/rejected": beta * sum(pair[1] for pair in scores) / rows,
        "rewards/margins": beta * sum(gaps) / rows,
        "rewards/accuracies": sum(gap > 0 for gap in gaps) / rows,
        "logps/chosen": sum(pair[0] for pair in logps) / rows,
        "logps/rejected": sum(pair[1] for pair in logps) / rows,
        "pairs_skipped": 0,
    }
    if options["nll_coef"]:
        wanted["nll_loss"] = nll
    if score == "log_odds":
        wanted["log_odds_chosen"] = sum(gaps) / rows
        wanted["log_odds_ratio"] = sum(math.log(sigmoid(gap)) for gap in gaps) / rows
    assert stats.keys() == wanted.keys()
    for name, value in wanted.items():
        close(stats[name], value)
        assert stats[name].shape == ()
        assert not stats[name].requires_grad


# --- the population: all pairs of the tiny policy ------------------------------------------------

STOP = 2
RESPONSES = [(STOP,), *((first, last) for first in (0, 1) for last in (0, 1, STOP))]
LENGTHS = torch.tensor([len(response) for response in RESPONSES])
MASK = torch.arange(2) < LENGTHS[:, None]
REWARDS = numbers(0.3, 1.0, 0.0, -0.5, 2.0, 0.25, 0.7)
BETA = 0.4
PAIRS = list(itertools.permutations(range(len(RESPONSES)), 2))


def parameters(seed: int) -> Tensor:
    """Logits of the first token, and of the second after 0 and after 1: (3, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, generator=generator, dtype=torch.float64)


def response_logprobs(theta: Tensor) -> Tensor:
    """log pi_theta of both slots of the seven responses, (7, 2); NaN where there is no token."""
    log_policy = theta.log_softmax(-1)
    rows = []
    for response in RESPONSES:
        first = log_policy[0, response[0]]
        second = first.new_tensor(math.nan)
        if len(response) == 2:
            second = log_policy[1 + response[0], response[1]]
        rows.append(torch.stack([first, second]))
    return torch.stack(rows)


def sequence_logprobs(theta: Tensor) -> Tensor:
    return torch.where(MASK, response_logprobs(theta), 0.0).sum(1)


def parameters_of(distribution: Tensor) -> Tensor:
    """The (3, 3) logits of the policy that writes the seven responses with these probabilities."""
    stop, after_0, after_1 = distribution[0], distribution[1:4], distribution[4:7]
    first = torch.stack([after_0.sum(), after_1.sum(), stop])
    return torch.stack([first, after_0, after_1]).log()


REFERENCE = parameters(1)
OPTIMUM = parameters_of(
    optimal_policy(sequence_logprobs(REFERENCE), REWARDS, beta=BETA).logprobs.exp()
)


def prefers(one: int, other: int) -> float:
    """Bradley-Terry on the true rewards."""
    return sigmoid(float(REWARDS[one] - REWARDS[other]))


def expected_loss(theta: Tensor, wrong: float = 0.0, **options: Any) -> Tensor:
    """E over all pairs, drawn alike, labelled by Bradley-Terry, a label wrong with that chance."""
    new, reference = response_logprobs(theta), response_logprobs(REFERENCE)
    total = theta.new_zeros(())
    for one, other in PAIRS:
        if options.get("score", "log_ratio_sum") in RATIO_SCORES:
            options["ref_chosen_logprobs"] = reference[[one]]
            options["ref_rejected_logprobs"] = reference[[other]]
        loss, _ = preference_loss(
            new[[one]], new[[other]], MASK[[one]], MASK[[other]], beta=BETA, **options
        )
        chance = (1 - wrong) * prefers(one, other) + wrong * prefers(other, one)
        total = total + chance * loss
    return total / (len(PAIRS) / 2)


def slope(theta: Tensor, **options: Any) -> float:
    leaf = theta.clone().requires_grad_()
    return gradient(expected_loss(leaf, **options), leaf).abs().max().item()


def test_the_optimum_is_a_policy_of_this_family() -> None:
    wanted = optimal_policy(sequence_logprobs(REFERENCE), REWARDS, beta=BETA).logprobs
    close(sequence_logprobs(OPTIMUM), wanted)
    implied = BETA * (sequence_logprobs(OPTIMUM) - sequence_logprobs(REFERENCE))
    close(implied - implied.mean(), REWARDS - REWARDS.mean())


def test_dpo_is_at_rest_at_the_optimum_of_rlhf() -> None:
    """pi_ref exp(R / beta) / Z: no gradient over Bradley-Terry pairs, and the loss of perfect
    predictions, the entropy of the labels.  Every other policy has a gradient, the optimum for
    another beta too."""
    assert slope(OPTIMUM) < 1e-12
    labels = [prefers(one, other) for one, other in PAIRS]
    entropy = -sum(p * math.log(p) for p in labels) / (len(PAIRS) / 2)
    close(expected_loss(OPTIMUM), entropy)
    for seed in range(3):
        assert slope(parameters(seed)) > 1e-2
        assert expected_loss(parameters(seed)) > entropy + 1e-3
    other_beta = optimal_policy(sequence_logprobs(REFERENCE), REWARDS, beta=2 * BETA)
    assert slope(parameters_of(other_beta.logprobs.exp())) > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"score": "log_ratio_mean"},
        {"link": "hinge"},
        {"link": "square"},
        {"gamma": 0.5},
        {"score": "logprob_mean"},
        {"score": "log_odds"},
        {"label_smoothing": 0.1},
    ],
    ids=str,
)
def test_the_others_rest_elsewhere(options: dict[str, Any]) -> None:
    """Each changed answer changes what is learned, not only how fast."""
    assert slope(OPTIMUM, **options) > 1e-3


@pytest.mark.parametrize("wrong", [0.1, 0.3])
def test_wrong_labels_move_dpo_and_robust_dpo_corrects_it(wrong: float) -> None:
    assert slope(OPTIMUM, wrong=wrong) > 1e-3
    assert slope(OPTIMUM, wrong=wrong, label_smoothing=wrong, smoothing="robust") < 1e-12
    conservative = slope(OPTIMUM, wrong=wrong, label_smoothing=wrong)
    assert conservative > slope(OPTIMUM, wrong=wrong)  # it widens the labels' doubt once more
    for theta in (OPTIMUM, parameters(0)):
        robust = expected_loss(theta, wrong=wrong, label_smoothing=wrong, smoothing="robust")
        close(robust, expected_loss(theta))


@every_link
@every_score
@given(batch=batches(max_rows=2), wrong=st.sampled_from([0.1, 0.25, 0.45]))
@settings(max_examples=20)
def test_robust_smoothing_is_unbiased_for_every_score_and_link(
    score: str, link: str, batch: Batch, wrong: float
) -> None:
    """E over flipped labels = the loss of the right ones, value and gradient, whatever the policy;
    the conservative one is biased."""
    gamma = 0.0 if link == "square" else 0.3
    options = {"score": score, "link": link, "gamma": gamma}
    flipped = {
        **batch,
        **{
            f"{prefix}{side}{suffix}": batch[f"{prefix}{twin}{suffix}"]
            for side, twin in (SIDES, SIDES[::-1])
            for prefix, suffix in (("", ""), ("ref_", ""), ("", "_mask"))
        },
    }
    batch["chosen"].requires_grad_()
    batch["rejected"].requires_grad_()
    clean, _ = loss_of(batch, **options)

    def noisy(smoothing: str) -> Tensor:
        given_ = {**options, "label_smoothing": wrong, "smoothing": smoothing}
        return (1 - wrong) * loss_of(batch, **given_)[0] + wrong * loss_of(flipped, **given_)[0]

    close(noisy("robust"), clean, atol=1e-9)
    for side in SIDES:
        ours, wanted = gradient(noisy("robust"), batch[side]), gradient(clean, batch[side])
        close(ours, wanted, atol=1e-9)
    # the conservative loss IS that mixture of the two ways round, for any labels
    mixture = (1 - wrong) * clean + wrong * loss_of(flipped, **options)[0]
    close(loss_of(batch, **options, label_smoothing=wrong)[0], mixture)


def one_pair(h: float, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss of a pair of one token each whose scores differ by h, and dL/dh."""
    chosen = numbers(h)[None].requires_grad_()
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    loss, _ = preference_loss(
        chosen, zero, one, one, ref_chosen_logprobs=zero, ref_rejected_logprobs=zero, **options
    )
    return loss, gradient(loss, chosen)[0, 0]


@pytest.mark.parametrize("wrong", [0.05, 0.2])
def test_cdpo_rests_where_the_policy_is_as_sure_as_the_labels(wrong: float) -> None:
    """sigma(beta h) = 1 - eps; DPO itself never rests, robust DPO neither."""
    beta = 0.1
    target = math.log((1 - wrong) / wrong) / beta
    options = {"beta": beta, "label_smoothing": wrong}
    close(one_pair(target, **options)[1], 0.0)
    assert one_pair(target * 0.9, **options)[1] < -1e-4
    assert one_pair(target * 1.1, **options)[1] > 1e-4
    for h in (target, 10 * target):
        assert one_pair(h, beta=beta)[1] < 0
        assert one_pair(h, **options, smoothing="robust")[1] < 0


@pytest.mark.parametrize("tau", [0.1, 1.0])
@pytest.mark.parametrize("preference", [1.0, 0.8, 0.5])
def test_ipo_rests_at_a_finite_margin(tau: float, preference: float) -> None:
    """(2p - 1) / (2 tau): 1/(2 tau) for a certain preference, where DPO goes on for ever, and 0
    where neither is preferred."""

    def at(h: float) -> float:
        won, lost = (one_pair(sign * h, link="square", beta=tau)[1] for sign in (1, -1))
        return float(preference * won - (1 - preference) * lost)

    target = (2 * preference - 1) / (2 * tau)
    assert at(target) == pytest.approx(0, abs=1e-12)
    assert at(target + 0.1) == pytest.approx(0.2)
    close(one_pair(1 / (2 * tau), link="square", beta=tau)[0], 0.0)
    assert one_pair(target, beta=tau)[1] < 0


# --- gradients, by hand -------------------------------------------------------------------------


@given(batch=batches())
def test_the_gradient_weight_of_dpo(batch: Batch) -> None:
    """-beta sigma(-beta h) / B on each chosen token, the opposite on each rejected one: pairs that
    the implicit reward has the wrong way round count most."""
    leaves = [batch[side].requires_grad_() for side in SIDES]
    loss, _ = loss_of(batch, beta=0.3)
    totals = {
        name: torch.where(batch[f"{name.removeprefix('ref_')}_mask"], batch[name], 0).sum(1)
        for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")
    }
    h = totals["chosen"] - totals["ref_chosen"] - totals["rejected"] + totals["ref_rejected"]
    weight = 0.3 * torch.sigmoid(-0.3 * h) / len(h)
    for leaf, side, sign in zip(leaves, SIDES, (-1, 1), strict=True):
        close(gradient(loss, leaf), sign * weight[:, None] * batch[f"{side}_mask"])


@given(batch=batches())
def test_the_gradient_weight_of_simpo(batch: Batch) -> None:
    """-beta / |y| sigma(gamma - beta h) / B per token: a long answer moves each token less, and the
    margin gamma, outside beta, keeps won pairs in play."""
    leaves = [batch[side].requires_grad_() for side in SIDES]
    loss, _ = loss_of(batch, score="logprob_mean", beta=2.0, gamma=1.0)
    lengths = [batch[f"{side}_mask"].sum(1, keepdim=True) for side in SIDES]
    means = [
        torch.where(batch[f"{side}_mask"], leaf, 0).sum(1, keepdim=True) / length
        for side, leaf, length in zip(SIDES, leaves, lengths, strict=True)
    ]
    weight = 2 * torch.sigmoid(1 - 2 * (means[0] - means[1])) / len(means[0])
    for leaf, side, length, sign in zip(leaves, SIDES, lengths, (-1, 1), strict=True):
        close(gradient(loss, leaf), sign * weight / length * batch[f"{side}_mask"])


@given(batch=batches())
def test_the_gradient_of_the_odds(batch: Batch) -> None:
    """d log odds / d log P = 1 / (1 - P): the factor that the paper's eq. 10 has twice."""
    leaves = [batch[side].requires_grad_() for side in SIDES]
    loss, _ = loss_of(batch, score="log_odds", beta=1.0)
    lengths = [batch[f"{side}_mask"].sum(1, keepdim=True) for side in SIDES]
    p = [
        (torch.where(batch[f"{side}_mask"], leaf, 0).sum(1, keepdim=True) / length).exp()
        for side, leaf, length in zip(SIDES, leaves, lengths, strict=True)
    ]
    odds = [each / (1 - each) for each in p]
    weight = 1 / (1 + odds[0] / odds[1]) / len(p[0])
    for place, sign in ((0, -1), (1, 1)):
        wanted = sign * weight / (1 - p[place]) / lengths[place] * batch[f"{SIDES[place]}_mask"]
        close(gradient(loss, leaves[place]), wanted)


@every_link
@every_score
def test_gradients_by_finite_differences(score: str, link: str) -> None:
    generator = torch.Generator().manual_seed(2)
    chosen, rejected, ref_chosen, ref_rejected = (
        -torch.rand(2, 3, generator=generator, dtype=torch.float64) - 0.1 for _ in range(4)
    )
    masks = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 0]])
    options: dict[str, Any] = {"score": score, "link": link, "beta": 0.7, "nll_coef": 0.5}
    if link != "square":
        options["gamma"] = 0.3
    if score in RATIO_SCORES:
        options |= {"ref_chosen_logprobs": ref_chosen, "ref_rejected_logprobs": ref_rejected}
    for smoothing in SMOOTHINGS:

        def loss(one: Tensor, other: Tensor, smoothing: str = smoothing) -> Tensor:
            return preference_loss(
                one, other, *masks, **options, label_smoothing=0.1, smoothing=smoothing
            )[0]

        assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


@every_score
def test_before_the_first_step_no_pair_is_won(score: str) -> None:
    """The policy is the reference, or both answers are as likely: a tie, and no success."""
    same, one = torch.full((3, 2), -0.7), torch.ones(3, 2)
    given_ = {"ref_chosen_logprobs": same, "ref_rejected_logprobs": same}
    loss, stats = preference_loss(
        same, same, one, one, score=score, **(given_ if score in RATIO_SCORES else {})
    )
    assert stats["rewards/accuracies"] == 0
    assert stats["rewards/margins"] == 0
    close(loss, math.log(2), atol=1e-7)


def test_the_gradient_flows_through_the_policy_only() -> None:
    leaves = [torch.full((1, 2), -value, requires_grad=True) for value in (1.0, 1.5, 0.9, 1.2)]
    one = torch.ones(1, 2)
    loss, _ = preference_loss(
        *leaves[:2], one, one, ref_chosen_logprobs=leaves[2], ref_rejected_logprobs=leaves[3]
    )
    loss.backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert leaves[2].grad is leaves[3].grad is None


# --- what holds for every input -----------------------------------------------------------------


@every_score
@given(batch=batches(), data=st.data(), garbage=st.sampled_from(GARBAGE))
@settings(max_examples=30)
def test_garbage_in_padding_changes_neither_value_nor_gradient(
    score: str, batch: Batch, data: st.DataObject, garbage: float
) -> None:
    options = settings_of(data.draw, data.draw(st.sampled_from(LINKS)))
    results = []
    for fill in (0.0, garbage):
        filled = {
            name: values
            if name.endswith("_mask")
            else values.masked_fill(~batch[f"{name.removeprefix('ref_')}_mask"], fill)
            for name, values in batch.items()
        }
        leaves = [filled[side].requires_grad_() for side in SIDES]
        loss, stats = loss_of(filled, score=score, **options)
        slopes = [gradient(loss, leaf) for leaf in leaves]
        for side, one in zip(SIDES, slopes, strict=True):
            assert (one[~batch[f"{side}_mask"]] == 0).all()
            assert one.isfinite().all()
        results.append([loss.detach(), *slopes, *stats.values()])
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)


@every_score
@given(batch=batches(max_rows=6), data=st.data(), order=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_order_and_parts(score: str, batch: Batch, data: st.DataObject, order: Any) -> None:
    """Shuffled pairs give the same; parts of a step add up, the likelihood term included, which is
    a mean over tokens and so needs the tokens of the whole step."""
    options = {"score": score, **settings_of(data.draw, data.draw(st.sampled_from(LINKS)))}
    leaf, size = batch["chosen"].requires_grad_(), len(batch["chosen"])
    whole, stats = loss_of(batch, **options)
    rows = list(range(size))
    order.shuffle(rows)
    shuffled, shuffled_stats = loss_of(batch, rows=rows, **options)
    close(shuffled, whole)
    for name, value in stats.items():
        close(shuffled_stats[name], value)
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3))), size]
    totals = {"total": size, "token_total": int(batch["chosen_mask"].sum())}
    parts = [
        loss_of(batch, rows=slice(a, b), **options, **totals)[0]
        for a, b in pairwise(edges)
        if b > a
    ]
    summed = torch.stack(parts).sum()
    close(summed, whole)
    close(gradient(summed, leaf), gradient(whole, leaf))


@every_score
@given(batch=batches(), data=st.data())
@settings(max_examples=30)
def test_pairs_with_an_empty_answer_are_as_if_they_were_not_there(
    score: str, batch: Batch, data: st.DataObject
) -> None:
    options = {"score": score, **settings_of(data.draw, data.draw(st.sampled_from(LINKS)))}
    size = len(batch["chosen"])
    draw_rows = st.lists(st.booleans(), min_size=size, max_size=size)
    empty = {side: torch.tensor(data.draw(draw_rows, label=side)) for side in SIDES}
    skipped = empty["chosen"] | empty["rejected"]
    holes = {f"{side}_mask": batch[f"{side}_mask"] & ~empty[side][:, None] for side in SIDES}
    spoilt = {
        name: values if name.endswith("_mask") else values.masked_fill(skipped[:, None], math.nan)
        for name, values in batch.items()
    }
    leaf = spoilt["chosen"].requires_grad_()
    loss, stats = loss_of({**spoilt, **holes}, allow_empty=True, **options)
    assert stats["pairs_skipped"] == skipped.sum()
    slopes = gradient(loss, leaf)
    assert (slopes[skipped] == 0).all()
    if skipped.all():
        assert loss == 0
        assert all(value == 0 for name, value in stats.items() if name != "pairs_skipped")
        return
    kept = (~skipped).nonzero()[:, 0]
    alone = batch["chosen"].requires_grad_()
    wanted, wanted_stats = loss_of(batch, rows=kept, **options)
    close(loss, wanted)
    close(slopes[kept], gradient(wanted, alone)[kept])
    for name, value in wanted_stats.items():
        if name != "pairs_skipped":
            close(stats[name], value)


@every_link
@given(batch=batches(), shift=st.floats(-3, 3), data=st.data())
def test_only_the_difference_counts(
    link: str, batch: Batch, shift: float, data: st.DataObject
) -> None:
    """A number that both answers of a pair gain changes nothing: for sums, on one token; for means,
    on every token.  The odds are no difference of log-probs: there it matters."""
    options = {**settings_of(data.draw, link), "nll_coef": 0.0}

    def moved(each_token: bool) -> Batch:
        added = {
            side: batch[side] + shift if each_token else batch[side] + shift * first
            for side in SIDES
        }
        return {**batch, **added}

    first = torch.zeros(1, 5, dtype=torch.float64)
    first[0, 0] = 1
    wide = {
        name: torch.nn.functional.pad(values, (0, 5 - values.shape[1]))
        for name, values in batch.items()
    }
    batch = wide
    for score, each_token in (
        ("log_ratio_sum", False),
        ("log_ratio_mean", True),
        ("logprob_mean", True),
    ):
        ours, _ = loss_of(moved(each_token), score=score, **options)
        close(ours, loss_of(batch, score=score, **options)[0], atol=1e-9, rtol=1e-9)


def test_the_odds_see_the_level() -> None:
    one = torch.ones(1, 1)
    low, high = (
        preference_loss(numbers(a)[None], numbers(b)[None], one, one, score="log_odds", beta=1.0)[0]
        for a, b in ((-2.0, -3.0), (-0.5, -1.5))
    )
    assert abs(low - high) > 0.1


@given(batch=batches(), times=st.integers(2, 3), extra=st.integers(0, 3))
def test_lengths(batch: Batch, times: int, extra: int) -> None:
    """A mean does not see how often a response repeats itself, a sum counts every time; nothing
    sees the width of the padding."""
    repeated = {name: values.repeat(1, times) for name, values in batch.items()}
    wider = {
        name: torch.nn.functional.pad(values, (extra, extra)) for name, values in batch.items()
    }
    for score in SCORES:
        plain, stats = loss_of(batch, score=score)
        close(loss_of(wider, score=score)[0], plain)
        longer, longer_stats = loss_of(repeated, score=score)
        if score == "log_ratio_sum":
            close(longer_stats["rewards/margins"], times * stats["rewards/margins"])
        else:
            close(longer, plain)


@every_link
@every_score
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-3, 100.0, 1e4, 1e11])
def test_extreme_logprobs_stay_finite(score: str, link: str, size: float) -> None:
    """P rounds to 1, or to 0; the better answer is certain or impossible, or the other is."""
    levels = torch.tensor([[-size], [-1.0], [-size], [0.0], [-1.0], [0.0]])
    chosen, rejected = levels.clone().requires_grad_(), levels.flip(0).clone().requires_grad_()
    one = torch.ones(6, 1)
    reference = {}
    if score in RATIO_SCORES:
        reference = {"ref_chosen_logprobs": -one, "ref_rejected_logprobs": -2 * one}
    for smoothing in SMOOTHINGS:
        loss, stats = preference_loss(
            chosen,
            rejected,
            one,
            one,
            score=score,
            link=link,
            label_smoothing=0.1,
            smoothing=smoothing,
            nll_coef=1.0,
            **reference,
        )
        assert loss.isfinite()
        for leaf in (chosen, rejected):
            assert gradient(loss, leaf).isfinite().all()
        assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("log_p", [-1e-6, -1e-4, -0.01, -0.6, -0.7, -5.0, -30.0, -700.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_odds_keep_their_digits_near_certainty(log_p: float, dtype: torch.dtype) -> None:
    """log P - log(1 - P), where 1 - exp(log P) would lose all of them in float32."""
    given_ = torch.tensor([[log_p]], dtype=dtype)
    rival = torch.tensor([[-math.log(2)]], dtype=dtype)  # odds of 1
    _, stats = preference_loss(
        given_, rival, torch.ones(1, 1), torch.ones(1, 1), score="log_odds", beta=1.0
    )
    exact = given_.item() - math.log(-math.expm1(given_.item()))
    eps = torch.finfo(dtype).eps
    assert stats["log_odds_chosen"].item() == pytest.approx(exact, rel=8 * eps, abs=8 * eps)


def test_a_certain_answer_still_learns() -> None:
    """P = 1 exactly, as a log-prob in float32 may round to: finite, and not without a gradient,
    where it is the REJECTED answer that is certain."""
    chosen, rejected = torch.tensor([[-1.0]]), torch.zeros(1, 1, requires_grad=True)
    one = torch.ones(1, 1)
    loss, _ = preference_loss(chosen, rejected, one, one, score="log_odds", beta=1.0)
    assert loss.isfinite()
    assert gradient(loss, rejected) > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@every_score
def test_the_dtype(score: str, dtype: torch.dtype) -> None:
    """Half precision is widened before the first sum."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = [-torch.rand(3, 40, generator=generator).to(dtype) for _ in range(4)]
    mask = torch.ones(3, 40)

    def loss(kind: torch.dtype) -> tuple[Tensor, dict]:
        chosen, rejected, ref_chosen, ref_rejected = (value.to(kind) for value in values)
        reference = {"ref_chosen_logprobs": ref_chosen, "ref_rejected_logprobs": ref_rejected}
        given_ = reference if score in RATIO_SCORES else {}
        return preference_loss(chosen, rejected, mask, mask, score=score, nll_coef=1.0, **given_)

    ours, stats = loss(dtype)
    assert torch.equal(ours, loss(wide)[0])
    assert ours.dtype == wide
    assert all(stats[name].dtype == wide for name in stats if name != "pairs_skipped")


# --- reports from practice ----------------------------------------------------------------------


def test_a33_an_empty_answer_is_an_error_or_a_skipped_pair_never_nan() -> None:
    given_, expected = CASES["A33"]["input"], CASES["A33"]["expected"]
    control = given_["control"]

    def side(which: str) -> tuple[Tensor, Tensor]:
        length = control[f"len_{which}"]
        logprobs = torch.full((1, 4), math.nan, dtype=torch.float64)
        logprobs[0, :length] = control[f"sum_logp_{which}"] / length
        return logprobs, torch.arange(4)[None] < length

    (chosen, chosen_mask), (rejected, rejected_mask) = side("chosen"), side("rejected")
    options: dict[str, Any] = {
        "score": "logprob_mean",
        "beta": control["beta"],
        "gamma": control["gamma"],
    }
    loss, stats = preference_loss(chosen, rejected, chosen_mask, rejected_mask, **options)
    close(loss, expected["control_loss"], atol=1e-5)
    close(stats["rewards/margins"] - control["gamma"], expected["control_margin"])

    empty = torch.zeros_like(chosen_mask)  # the prompt filled the whole budget
    two_rows = [
        torch.cat([chosen, chosen]).requires_grad_(),
        torch.cat([rejected, rejected]),
        torch.cat([empty, chosen_mask]),
        torch.cat([rejected_mask, rejected_mask]),
    ]
    with pytest.raises(ValueError, match="chosen_mask row 0 is empty: a response needs at least"):
        preference_loss(*two_rows, **options)
    kept, stats = preference_loss(*two_rows, **options, allow_empty=True)
    close(kept, loss)
    assert stats["pairs_skipped"] == 1
    assert gradient(kept, two_rows[0]).isfinite().all()


def test_f03_only_the_margin_enters_the_loss() -> None:
    """The chosen log-prob may fall while the loss improves, and rise while it gets worse."""
    given_, expected = CASES["F03"]["input"], CASES["F03"]["expected"]
    one = torch.ones(1, 1)

    def at(stage: str) -> tuple[Tensor, dict]:
        (chosen, rejected), reference = (
            [numbers(value)[None] for value in given_[name]] for name in (stage, "ref")
        )
        return preference_loss(
            chosen,
            rejected,
            one,
            one,
            beta=given_["beta"],
            ref_chosen_logprobs=reference[0],
            ref_rejected_logprobs=reference[1],
        )

    for stage in ("start", "later", "worse"):
        close(at(stage)[0], expected[f"loss_{stage}"], atol=1e-5)
    implied = expected["implicit_reward_later"]
    stats = at("later")[1]
    close(stats["rewards/chosen"], implied["chosen"])
    close(stats["rewards/rejected"], implied["rejected"])
    close(stats["rewards/margins"], implied["margin"])
    assert at("later")[1]["logps/chosen"] < at("start")[1]["logps/chosen"]
    assert at("later")[0] < at("start")[0]
    assert at("worse")[1]["logps/chosen"] > at("start")[1]["logps/chosen"]
    assert at("worse")[0] > at("start")[0]


# --- KTO ----------------------------------------------------------------------------------------


@st.composite
def marked(draw: st.DrawFn) -> Batch:
    """Single responses with marks, and log-ratios of mismatched pairs."""
    batch = draw(batches())
    size = len(batch["chosen"])
    marks = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    ratios = draw(st.lists(st.floats(-3, 3, allow_nan=False), min_size=1, max_size=3))
    return {
        "logprobs": batch["chosen"],
        "ref_logprobs": batch["ref_chosen"],
        "response_mask": batch["chosen_mask"],
        "desirable": torch.tensor(marks),
        "mismatched_log_ratios": numbers(*ratios),
    }


def rows_of(batch: Batch, rows: Any) -> Batch:
    """The given rows; the mismatched log-ratios are those of the whole step."""
    return {
        name: values if name.startswith("mismatched") else values[rows]
        for name, values in batch.items()
    }


KTO_OPTIONS = {"beta": 0.3, "weight_desirable": 1.5, "weight_undesirable": 0.75}


@given(batch=marked())
def test_kto_by_hand(batch: Batch) -> None:
    z0 = max(0.0, batch["mismatched_log_ratios"].mean().item())
    losses, rewards, logps = [], {True: [], False: []}, {True: [], False: []}
    for row, good in enumerate(batch["desirable"].tolist()):
        real = batch["response_mask"][row]
        policy = batch["logprobs"][row][real].sum().item()
        ratio = policy - batch["ref_logprobs"][row][real].sum().item()
        value = sigmoid(0.3 * (ratio - z0)) if good else sigmoid(0.3 * (z0 - ratio))
        losses.append((1.5 if good else 0.75) * (1 - value))
        rewards[good].append(0.3 * ratio)
        logps[good].append(policy)
    loss, stats = kto_loss(**batch, **KTO_OPTIONS)
    close(loss, sum(losses) / len(losses))
    wanted = {"kl": z0}
    for name, good in (("chosen", True), ("rejected", False)):
        if rewards[good]:
            wanted[f"rewards/{name}"] = sum(rewards[good]) / len(rewards[good])
            wanted[f"logps/{name}"] = sum(logps[good]) / len(logps[good])
    if rewards[True] and rewards[False]:
        wanted["rewards/margins"] = wanted["rewards/chosen"] - wanted["rewards/rejected"]
    assert stats.keys() == wanted.keys()
    for name, value in wanted.items():
        close(stats[name], value)
        assert not stats[name].requires_grad


@given(batch=marked())
def test_kto_raises_the_desirable_and_lowers_the_rest(batch: Batch) -> None:
    """-lambda beta v (1 - v) / B on each desirable token, the opposite sign on the others; z_0 and
    the reference have none."""
    leaves = {
        name: batch[name].requires_grad_()
        for name in ("logprobs", "ref_logprobs", "mismatched_log_ratios")
    }
    loss, stats = kto_loss(**batch, **KTO_OPTIONS)
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    assert slopes[1:] == (None, None)
    mask, good = batch["response_mask"], batch["desirable"]
    ratio = torch.where(mask, leaves["logprobs"] - leaves["ref_logprobs"], 0).sum(1)
    value = torch.sigmoid(0.3 * (ratio - stats["kl"]))
    weight = torch.where(good, -1.5, 0.75).double() * 0.3 * value * (1 - value) / len(good)
    close(slopes[0], weight[:, None] * mask)


@pytest.mark.parametrize("mean", [-2.0, 0.0, 2.0])
def test_the_reference_point_is_never_below_zero(mean: float) -> None:
    """An answer at the reference point has v = 1/2 on either side."""
    z0 = max(0.0, mean)
    one = torch.ones(2, 1)
    loss, stats = kto_loss(
        numbers(z0 - 1, z0 - 1)[:, None],
        -one.double(),
        one,
        torch.tensor([1, 0]),
        mismatched_log_ratios=numbers(mean - 1, mean + 1),
    )
    assert stats["kl"] == z0
    close(loss, 0.5)


def test_weights_balance_a_rare_kind() -> None:
    """At the start (policy = reference) the pull on either kind is lambda n beta / 4: equal with
    kto_weights, in the ratio asked for."""
    marks = torch.tensor([True] * 9 + [False] * 3)
    assert kto_weights(marks) == (1.0, 3.0)
    assert kto_weights(~marks) == (3.0, 1.0)
    assert kto_weights(marks.long(), ratio=1.5) == (1.0, 2.0)
    assert kto_weights(torch.tensor([1, 0]), ratio=1.5) == (1.5, 1.0)
    good, bad = kto_weights(marks, ratio=4 / 3)
    assert good * 9 / (bad * 3) == pytest.approx(4 / 3)
    logprobs = torch.full((12, 1), -1.0, dtype=torch.float64, requires_grad=True)
    for ratio in (1.0, 1.5):
        good, bad = kto_weights(marks, ratio=ratio)
        loss, _ = kto_loss(
            logprobs,
            logprobs,
            torch.ones(12, 1),
            marks,
            mismatched_log_ratios=numbers(0.0),
            weight_desirable=good,
            weight_undesirable=bad,
        )
        slopes = gradient(loss, logprobs)[:, 0]
        pull = [slopes[marks].sum(), slopes[~marks].sum()]
        close(-pull[0], ratio * pull[1])
        close(pull[1], bad * 3 * 0.1 / 4 / 12)


@given(batch=marked(), garbage=st.sampled_from(GARBAGE), order=st.randoms(use_true_random=False))
def test_kto_garbage_order_parts_and_empty_rows(batch: Batch, garbage: float, order: Any) -> None:
    mask, size = batch["response_mask"], len(batch["desirable"])
    leaf = batch["logprobs"].requires_grad_()
    whole, stats = kto_loss(**batch)
    spoilt = {
        **batch,
        **{name: batch[name].masked_fill(~mask, garbage) for name in ("logprobs", "ref_logprobs")},
    }
    loss, spoilt_stats = kto_loss(**spoilt)
    assert torch.equal(loss, whole)
    assert all(torch.equal(spoilt_stats[name], value) for name, value in stats.items())
    assert torch.equal(gradient(loss, leaf), gradient(whole, leaf))
    rows = list(range(size))
    order.shuffle(rows)
    close(kto_loss(**rows_of(batch, rows))[0], whole)
    parts = [kto_loss(**rows_of(batch, [row]), total=size)[0] for row in range(size)]
    close(torch.stack(parts).sum(), whole)
    wider = {
        **batch,
        **{
            name: torch.cat([batch[name], batch[name][:1]])
            for name in ("logprobs", "ref_logprobs", "desirable")
        },
        "response_mask": torch.cat([mask, torch.zeros_like(mask[:1])]),
    }
    with_hole, hole_stats = kto_loss(**wider, allow_empty=True)
    close(with_hole, whole)
    for name, value in stats.items():
        close(hole_stats[name], value)


def test_kto_by_finite_differences_and_at_the_extremes() -> None:
    marks, mask = torch.tensor([1, 0]), torch.tensor([[1, 1], [1, 0]])
    ratios = numbers(0.4)
    reference = torch.tensor([[-0.5, 0.2], [-1.5, -8.5]], dtype=torch.float64)
    leaf = torch.tensor([[-1.0, -0.3], [-2.0, -9.0]], dtype=torch.float64, requires_grad=True)

    def loss_of_kto(values: Tensor) -> Tensor:
        return kto_loss(values, reference, mask, marks, mismatched_log_ratios=ratios)[0]

    assert torch.autograd.gradcheck(loss_of_kto, (leaf,))
    for size in (1e4, 1e11):
        far = torch.tensor([[-size, 0.0], [size, 0.0]], requires_grad=True)
        loss, stats = kto_loss(far, far * 0, mask, marks, mismatched_log_ratios=torch.ones(1))
        assert loss == 1.0  # both as wrong as can be
        assert gradient(loss, far).isfinite().all()
        assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_kto(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values, reference = (-torch.rand(3, 40, generator=generator).to(dtype) for _ in range(2))
    mask, marks = torch.ones(3, 40), torch.tensor([1, 0, 1])
    ratios = torch.tensor([0.1, 0.2], dtype=dtype)
    ours, stats = kto_loss(values, reference, mask, marks, mismatched_log_ratios=ratios)
    again, _ = kto_loss(
        values.to(wide), reference.to(wide), mask, marks, mismatched_log_ratios=ratios.to(wide)
    )
    assert torch.equal(ours, again)
    assert all(value.dtype == wide for value in (ours, *stats.values()))
