"""Methods over pairs raise the true reward that they never see: three seeds, by a margin.

The nano model learns the language of reviews in 150 steps and writes 600 pairs of its own; a
simulated rater marks them; 60 steps on the marks follow. Measured so, ten seeds, from -0.30 to
-0.21 at the start, the true reward rises by 0.93 to 1.32 with DPO (beta 0.5), by 0.69 to 0.96 with
IPO and by 0.35 to 0.60 with ORPO. A rise has a standard error of about 0.09 (256 prompts before and
after, each answered once); the margins are three of them below the smallest.
SimPO and KTO are not here: at this size one seed in ten writes on without an end, at learning rates
from 2e-4 to 1e-3, and ends below its start.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from rlcore import models
from rlcore.evaluation import evaluate
from rlcore.preferences import DPO, IPO, ORPO
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
    return model, tokenizer, pairs, evaluate(model, tokenizer, REVIEWS, n=256)


@pytest.mark.parametrize(
    ("method", "learning_rate", "margin"),
    [(replace(DPO, beta=0.5), 2e-3, 0.65), (IPO, 1e-3, 0.4), (ORPO, 2e-3, 0.08)],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_true_reward_rises(method, learning_rate: float, margin: float, start: Start) -> None:
    model, tokenizer, pairs, before = start
    policy = copy.deepcopy(model)
    run = train_preference(
        policy,
        tokenizer,
        pairs,
        method,
        steps=60,
        batch_size=32,
        learning_rate=learning_rate,
        seed=0,
        **QUIET,
    )
    after = evaluate(policy, tokenizer, REVIEWS, n=256)
    assert before["sampled"] < 0
    assert after["sampled"] - before["sampled"] > margin
    accuracies = run.curve("rewards/accuracies")[1]
    assert sum(accuracies[-20:]) > sum(accuracies[1:21])  # one batch says little
