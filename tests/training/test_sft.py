"""SFT: what is learned from a demonstration, and that it is learned."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlcore.evaluation import evaluate
from rlcore.tasks import ROBOT, SORT
from rlcore.training import NonFiniteError, train_sft
from rlcore.training.sft import demonstrations

SETTINGS = {
    "steps": 4,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "seed": 0,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}


@pytest.mark.parametrize("task", [SORT, ROBOT], ids=lambda task: task.name)
def test_every_response_token_and_the_end_are_learned_and_nothing_else(task) -> None:
    from rlcore import models

    tokenizer = models.build_tokenizer(task.symbols)
    ids, mask = demonstrations(tokenizer, task, 64, random.Random(0))
    assert mask.shape == (64, ids.shape[1] - 1)
    rng = random.Random(0)
    prompts = [task.draw(rng) for _ in range(64)]
    responses = [task.demonstration(prompt, rng) for prompt in prompts]
    for row, learned, prompt, response in zip(ids, mask, prompts, responses, strict=True):
        targets = row[1:][learned]
        assert tokenizer.decode(targets[:-1]) == response
        assert targets[-1] == tokenizer.eos_token_id  # case A24: the end is learned
        assert tokenizer.decode(row[: len(prompt)]) == prompt
        assert (row[len(prompt) + len(response) + 1 :] == tokenizer.pad_token_id).all()


def test_the_first_loss_is_the_likelihood_of_the_demonstrations(make) -> None:
    model, tokenizer = make()
    ids, mask = demonstrations(tokenizer, SORT, 8, random.Random("SFT sort/0"))
    with torch.no_grad():
        logp = model(ids).logits[:, :-1].double().log_softmax(-1)
    expected = -logp.gather(-1, ids[:, 1:, None])[..., 0][mask].mean()
    run = train_sft(model, tokenizer, SORT, **SETTINGS)
    assert run.metrics[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert run.metrics[0]["loss"] == pytest.approx(math.log(13), abs=0.2)  # knows nothing yet
    assert run.metrics[0]["tokens"] == int(mask.sum())
    assert [row["learning_rate"] for row in run.metrics] == pytest.approx(
        [1e-2 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    )


def test_sft_learns_to_copy_the_mixture_and_to_stop(make) -> None:
    """150 steps of the nano model: from ln 13 to near the mixture's own uncertainty."""
    model, tokenizer = make()
    run = train_sft(model, tokenizer, SORT, **{**SETTINGS, "steps": 150, "batch_size": 64})
    assert run.metrics[-1]["loss"] < 1.5
    result = evaluate(model, tokenizer, SORT, n=128)
    assert result["truncated"] < 0.2
    assert result["mean_length"] == pytest.approx(7, abs=0.5)


def test_a_broken_model_stops_the_run(make) -> None:
    model, tokenizer = make()
    with torch.no_grad():
        model.lm_head.weight.fill_(math.inf)
    with pytest.raises(NonFiniteError, match="step 1: the loss is not finite") as caught:
        train_sft(model, tokenizer, SORT, **SETTINGS)
    assert caught.value.batch["input_ids"].shape[0] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: found 0"),
        ({"batch_size": -1}, "batch_size: found -1"),
        ({"learning_rate": 0}, "learning_rate: found 0"),
        ({"final_learning_rate": 2}, "final_learning_rate: found 2; wanted 0 to 1"),
        ({"max_grad_norm": math.inf}, "max_grad_norm: found inf"),
        ({"seed": 0.5}, "seed: found 0.5"),
        ({"evaluate_every": None}, "evaluate_every: found None"),
        ({"checkpoint_every": -1}, "checkpoint_every: found -1"),
        ({"device": "abacus"}, "device: "),
        ({"threads": -2}, "threads: found -2"),
        ({"resume": True}, "resume: needs out"),
    ],
)
def test_bad_input(change: dict, message: str, make) -> None:
    with pytest.raises(ValueError, match=message):
        train_sft(*make(), SORT, **{**SETTINGS, **change})


def test_demonstrations_longer_than_the_model_are_an_error(coin, make) -> None:
    with pytest.raises(ValueError, match="14 tokens together; the model has 9 positions"):
        train_sft(*make(max_length=9), coin, steps=1, seed=0, progress=False)
