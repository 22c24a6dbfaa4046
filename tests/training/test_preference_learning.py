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
SimPO and KTO are not here. With 40 steps at 5e-4 nine seeds in ten rise, by 0.30 to 0.44 with SimPO
and by 0.26 to 0.52 with KTO (beta 0.5), and the tenth, the same one for both, ends 0.21 and 0.31
below its start: some of its responses are cut by the limit.
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
    ORPO,
    ROBUST_DPO,
)
from rlcore.tasks import REVIEWS, PreferencePairs, sample_pairs
from rlcore.training import train_preference, train_sft

QUIET = {"progress": False, "threads": 1, "device": "cpu"}
Start = tuple[Any, Any, PreferencePairs, dict[str, Any]]


@pytest.fixture(scope="module", params=[0, 1, 2])
def start(request) -> Start:
    """Model, tokenizer, pairs and the true reward on held-out prompts, for one seed."""
    seed = request.param
    tokenizer = models.build_tokenizer(REVIEWS.vocabulary)
    model = models.build_model("nano", tokenizer, seed=seed, device="cpu")
    train_sft(
        model, tokenizer, REVIEWS, steps=150, batch_size=32, learning_rate=1e-2, seed=seed, **QUIET
    )
    pairs = sample_pairs(model, tokenizer, REVIEWS, 600, seed=seed)
    return model, tokenizer, pairs, evaluate(model, tokenizer, REVIEWS, n=512)


@pytest.mark.parametrize(
    ("method", "learning_rate", "steps", "margin"),
    [
        (replace(DPO, beta=0.5), 2e-3, 60, 0.65),
        (IPO, 1e-3, 60, 0.4),
        (ORPO, 2e-3, 60, 0.08),
        (replace(CDPO, beta=0.5), 1e-3, 40, 0.31),
        (replace(ROBUST_DPO, beta=0.5), 1e-3, 40, 0.24),
        (replace(HINGE, beta=0.5), 1e-3, 40, 0.32),
        (DPO_NORM, 1e-3, 40, 0.09),
        (replace(IPO_AVERAGED, beta=1.0), 1e-3, 40, 0.12),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_true_reward_rises(
    method, learning_rate: float, steps: int, margin: float, start: Start
) -> None:
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
    assert after["sampled"] - before["sampled"] > margin
    accuracies = run.curve("rewards/accuracies")[1]
    assert sum(accuracies[-20:]) > sum(accuracies[1:21])  # one batch says little
