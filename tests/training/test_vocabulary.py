"""A tokenizer that the model has too few embeddings for is named, wherever one is taken."""

from __future__ import annotations

import pytest
import torch

from rlcore.evaluation import evaluate
from rlcore.models import build_model, build_scalar_model, build_tokenizer
from rlcore.preferences import DPO, KTO
from rlcore.sampling import sample
from rlcore.tasks import PreferencePairs, get_task, sample_pairs
from rlcore.training import row, train_policy, train_preference, train_reward_model, train_sft

REVIEWS = get_task("reviews")
STEP = {"steps": 1, "learning_rate": 1e-3, "seed": 0, "progress": False, "device": "cpu"}
PROMPTS = REVIEWS.prompts(n=4)
PAIRS = PreferencePairs(
    prompts=tuple(PROMPTS),
    chosen=tuple(REVIEWS.solution(prompt) for prompt in PROMPTS),
    rejected=("",) * 4,
)


def sampled(model, tokenizer) -> None:
    generator = torch.Generator().manual_seed(0)
    sample(model, tokenizer, PROMPTS, max_new_tokens=4, generator=generator)


def scored(model, tokenizer) -> None:
    judge = build_scalar_model(model, seed=0)
    train_reward_model(judge, tokenizer, PAIRS, **STEP, batch_size=2)


CALLS = {
    "sample": sampled,
    "evaluate": lambda model, tokenizer: evaluate(model, tokenizer, REVIEWS, n=4),
    "sample_pairs": lambda model, tokenizer: sample_pairs(model, tokenizer, REVIEWS, 4, seed=0),
    "train_sft": lambda model, tokenizer: train_sft(
        model, tokenizer, REVIEWS, **STEP, batch_size=4
    ),
    "train_policy": lambda model, tokenizer: train_policy(
        model, tokenizer, REVIEWS, row("grpo"), **STEP, prompts_per_step=2, group_size=2
    ),
    "dpo": lambda model, tokenizer: train_preference(
        model, tokenizer, PAIRS, DPO, **STEP, batch_size=2
    ),
    "kto": lambda model, tokenizer: train_preference(
        model, tokenizer, PAIRS, KTO, **STEP, batch_size=2
    ),
    "train_reward_model": scored,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tokenizer_that_does_not_fit_the_model_is_named(call) -> None:
    tokenizer = build_tokenizer(REVIEWS.vocabulary)
    words = len(tokenizer)
    small = build_tokenizer(REVIEWS.vocabulary[:-1])
    message = f"tokenizer: found ids up to {words - 1}; wanted .* vocabulary, below {words - 1}$"
    with pytest.raises(ValueError, match=message):
        call(build_model("nano", small, seed=0), tokenizer)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_padded_embeddings_are_right(call) -> None:
    tokenizer = build_tokenizer(REVIEWS.vocabulary)
    model = build_model("nano", tokenizer, seed=0)
    model.resize_token_embeddings(64)
    with torch.no_grad():  # as a trained model: the padding is never sampled
        model.get_input_embeddings().weight[len(tokenizer) :] = 0
    call(model, tokenizer)
