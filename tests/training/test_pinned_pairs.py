"""The first five steps of SFT and of every method over pairs, to 1e-6.

The numbers came from this code: they say that nothing has changed, not that it is right; that is
for the other tests. float64 and a small learning rate, so that another CPU gives the same
(transformers' norms are float32 whatever the model, and AdamW makes whole steps of what they
round).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rlcore import models
from rlcore.preferences import REWARD_MODEL, ROWS
from rlcore.tasks import REVIEWS, PreferencePairs
from rlcore.training import train_preference, train_reward_model, train_sft

PINNED = json.loads((Path(__file__).parent / "pinned_pairs.json").read_text(encoding="utf-8"))
SETTINGS = {
    "steps": 5,
    "batch_size": 8,
    "learning_rate": 1e-3,
    "seed": 0,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}


def pairs_of_demonstrations(n: int) -> PreferencePairs:
    """Two demonstrations each, the truly better one chosen."""
    rng, rows = random.Random("pinned"), []
    while len(rows) < n:
        prompt = REVIEWS.draw(rng)
        sides = [REVIEWS.demonstration(prompt, rng) for _ in range(2)]
        sides.sort(key=lambda side: REVIEWS.verify(prompt, side))
        if sides[0] != sides[1]:
            rows.append((prompt, sides[1], sides[0]))
    return PreferencePairs(*zip(*rows, strict=True))


def first_steps(name: str):
    """The run of a row, or of SFT, from the same random weights."""
    tokenizer = models.build_tokenizer(REVIEWS.vocabulary)
    model = models.build_model("nano", tokenizer, seed=0, dtype="float64", device="cpu")
    if name == "sft":
        return train_sft(model, tokenizer, REVIEWS, **SETTINGS)
    method = {row.name: row for row in ROWS}[name]
    pairs = pairs_of_demonstrations(20)
    if method is REWARD_MODEL:
        scalar = models.build_scalar_model(model, seed=0)
        return train_reward_model(scalar, tokenizer, pairs, **SETTINGS)
    return train_preference(model, tokenizer, pairs, method, **SETTINGS)


def test_every_row_is_pinned() -> None:
    assert set(PINNED) == {"sft", *(row.name for row in ROWS)}
    assert all({"loss", "grad_norm"} < set(pinned) for pinned in PINNED.values())


@pytest.mark.parametrize("name", sorted(PINNED))
def test_pinned_trajectory_over_pairs(name: str) -> None:
    run = first_steps(name)
    for key, values in PINNED[name].items():
        assert len(values) == 5
        assert run.curve(key)[1] == pytest.approx(values, rel=1e-6, abs=1e-6), key
