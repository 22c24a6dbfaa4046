"""Methods over pairs raise the true reward that they never see: three seeds, by a margin.

The nano model learns the language of reviews in 150 steps and writes 600 pairs of its own; a
simulated rater marks them; 60 steps on the marks follow, or 40. Measured so, ten seeds, from -0.31
to -0.18 at the start, the true reward rises by

- 0.93 to 1.32 with DPO (beta 0.5), 0.69 to 0.96 with IPO, 0.35 to 0.60 with ORPO, in 60 steps;
- 0.51 to 0.72 with cDPO, 0.44 to 0.77 with robust DPO, 0.52 to 0.73 with the hinge (beta 0.5),
  0.29 to 0.75 with length-normalised DPO and 0.32 to 0.76 with IPO per token (beta 1), in 40.

A rise has a standard error of about 0.065 (512 prompts before and after, each answered once; 0.09
for the first three, measured with 256); the margins are three of them below the smallest.
The numbers of steps and learning rates matter: at 2e-3 and 60 steps one seed in ten writes on
without an end with cDPO, robust DPO and the hinge, and gains nothing.
SimPO and KTO have a start of their own: 400 steps of SFT, and 2,000 pairs. In 60 steps of 32 pairs,
so that no pair comes twice, all of ten seeds rise, by 0.40 to 0.56 with SimPO at 5e-4, and by 0.67
to 0.95 with KTO (beta 0.5) at 1e-3; again the margins are three standard errors below the smallest.

- From the start of the others one seed in ten fell, the same one with both: after 40 steps at 5e-4
  four to six responses in a hundred wrote on, without grammar and without an end, each for 10 to 18
  points below 0, while the rest had gained 0.3. With SimPO at 1e-4 it came to the same, only later.
  That start knows the language less well, and neither method holds on to it: SimPO has no
  reference, and KTO's reference point was 0 in nearly every step, all responses having become less
  likely. From the better start no response is cut.
- From the better start on 600 pairs, each three times over, one seed in ten gains 0.3 with SimPO
  and loses some of it again (at 1e-3 all, and more). Its paper has one epoch, as here.

Broken methods stay below these margins on one seed of the three at least. SimPO with its margin
turned round: below its start; its score summed over the tokens: 0.21, -0.12, -0.06. KTO with the
marks turned round: below its start; without a reference: 0.53, 0.43, 0.39; of the desirable
responses alone: 0.48, 0.39, 0.39.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from rlcore import models
from rlcore.evaluation import evaluate
from rlcore.preferences import (
    CDPO,
    DPO,
    DPO_NORM,
    HINGE,
    IPO,
    IPO_AVERAGED,
    KTO,
    ORPO,
    REWARD_MODEL,
    ROBUST_DPO,
    ROWS,
    SIMPO,
)
from rlcore.tasks import REVIEWS, PreferencePairs, sample_pairs
from rlcore.training import Run, train_preference, train_sft

QUIET = {"progress": False, "threads": 1, "device": "cpu"}
Start = tuple[Any, Any, PreferencePairs, dict[str, Any]]
RISES = [  # method, learning rate, steps, margin
    (replace(DPO, beta=0.5), 2e-3, 60, 0.65),
    (IPO, 1e-3, 60, 0.4),
    (ORPO, 2e-3, 60, 0.08),
    (replace(CDPO, beta=0.5), 1e-3, 40, 0.31),
    (replace(ROBUST_DPO, beta=0.5), 1e-3, 40, 0.24),
    (replace(HINGE, beta=0.5), 1e-3, 40, 0.32),
    (DPO_NORM, 1e-3, 40, 0.09),
    (replace(IPO_AVERAGED, beta=1.0), 1e-3, 40, 0.12),
]
RISES_FROM_BETTER = [(SIMPO, 5e-4, 0.2), (replace(KTO, beta=0.5), 1e-3, 0.47)]


def begin(seed: int, steps: int, n: int) -> Start:
    """Model after some steps of SFT, tokenizer, n pairs and the true reward on held-out prompts."""
    tokenizer = models.build_tokenizer(REVIEWS.vocabulary)
    model = models.build_model("nano", tokenizer, seed=seed, device="cpu")
    train_sft(
        model, tokenizer, REVIEWS, steps=steps, batch_size=32, learning_rate=1e-2, seed=seed,
        **QUIET,
    )  # fmt: skip
    pairs = sample_pairs(model, tokenizer, REVIEWS, n, seed=seed)
    return model, tokenizer, pairs, evaluate(model, tokenizer, REVIEWS, n=512)


@pytest.fixture(scope="module", params=[0, 1, 2])
def start(request) -> Start:
    """For one seed."""
    return begin(request.param, 150, 600)


@pytest.fixture(scope="module", params=[0, 1, 2])
def better_start(request) -> Start:
    """For one seed."""
    return begin(request.param, 400, 2000)


def test_every_method_is_here() -> None:
    """A reward model trains no policy: what it learns is tested beside its loop."""
    tried = [method.name for method, *_ in (*RISES, *RISES_FROM_BETTER)]
    assert sorted([*tried, REWARD_MODEL.name]) == sorted(row.name for row in ROWS)


@pytest.mark.parametrize(
    ("method", "learning_rate", "steps", "margin"),
    RISES,
    ids=lambda value: getattr(value, "name", None),
)
def test_the_true_reward_rises(
    method, learning_rate: float, steps: int, margin: float, start: Start
) -> None:
    run, rise = rise_of(method, start, steps, learning_rate)
    assert rise > margin
    accuracies = run.curve("rewards/accuracies")[1]
    assert sum(accuracies[-20:]) > sum(accuracies[1:21])  # one batch says little


@pytest.mark.parametrize(
    ("method", "learning_rate", "margin"),
    RISES_FROM_BETTER,
    ids=lambda value: getattr(value, "name", None),
)
def test_the_true_reward_rises_with_simpo_and_kto(
    method, learning_rate: float, margin: float, better_start: Start
) -> None:
    """And falls where the pairs are turned round, which is the margin's sign."""
    assert rise_of(method, better_start, 60, learning_rate)[1] > margin
    model, tokenizer, pairs, before = better_start
    turned = PreferencePairs(
        pairs.prompts, pairs.rejected, pairs.chosen, pairs.rejected_cut, pairs.chosen_cut
    )
    assert rise_of(method, (model, tokenizer, turned, before), 60, learning_rate)[1] < 0


def rise_of(method: Any, start: Start, steps: int, learning_rate: float) -> tuple[Run, float]:
    """The run from a start, and by how much the true reward of sampled responses rose."""
    model, tokenizer, pairs, before = start
    policy = copy.deepcopy(model)
    run = train_preference(
        policy,
        tokenizer,
        pairs,
        method,
        steps=steps,
        batch_size=32,
        learning_rate=learning_rate,
        seed=0,
        **QUIET,
    )
    after = evaluate(policy, tokenizer, REVIEWS, n=512)
    assert before["sampled"] < 0
    return run, after["sampled"] - before["sampled"]
