"""Held-out accuracy and its standard error."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from rlcore.evaluation import evaluate


def test_means_and_standard_errors(coin, make) -> None:
    model, tokenizer = make()
    seen: list[tuple[str, float]] = []

    def verify(problem: str, response: str) -> float:
        reward = coin.verify(problem, response)
        seen.append((problem, reward))
        return reward

    task = replace(coin, verify=verify)
    result = evaluate(model, tokenizer, task, n=40, samples_per_prompt=3, prompts_per_batch=7)
    greedy = torch.tensor([reward for _, reward in seen[:40]])
    sampled = torch.tensor([reward for _, reward in seen[40:]]).view(40, 3).mean(1)
    assert [problem for problem, _ in seen[:40]] == task.prompts("held-out", 40)
    assert result["greedy"] == pytest.approx(float(greedy.mean()))
    assert result["sampled"] == pytest.approx(float(sampled.mean()))
    assert result["greedy_se"] == pytest.approx(float(greedy.std() / 40**0.5), rel=1e-5)
    assert result["sampled_se"] == pytest.approx(float(sampled.std() / 40**0.5), rel=1e-5)
    assert 1 <= result["mean_length"] <= task.max_new_tokens
    assert 0 <= result["truncated"] <= 1
    assert result["missing"] == 0
    assert result["n"] == 40


def test_different_right_answers_are_counted(coin, make) -> None:
    """Of a problem's samples, by hand; a response that comes twice is one."""
    seen: list[tuple[str, str, float]] = []

    def verify(problem: str, response: str) -> float:
        seen.append((problem, response, coin.verify(problem, response[:2])))
        return seen[-1][2]

    task = replace(coin, verify=verify, max_new_tokens=2)
    result = evaluate(*make(), task, n=6, samples_per_prompt=40, prompts_per_batch=4)
    sampled = seen[6:]
    right = {(problem, response) for problem, response, reward in sampled if reward == 1}
    assert result["distinct_right"] == len(right) / 6
    assert len(right) < sum(reward == 1 for _, _, reward in sampled)
    assert "distinct_right" not in evaluate(*make(), task, n=6)


def test_same_seed_same_result_and_nothing_is_changed(coin, make) -> None:
    model, tokenizer = make()
    model.train()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = evaluate(model, tokenizer, coin, n=30)
    assert first == evaluate(model, tokenizer, coin, n=30)
    assert first != evaluate(model, tokenizer, coin, n=30, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_missing_rewards_are_left_out_and_counted(coin, make) -> None:
    calls = itertools.count()
    task = replace(coin, verify=lambda p, r: None if next(calls) % 4 == 0 else 1.0)
    result = evaluate(*make(), task, n=50)
    assert result["sampled"] == result["greedy"] == 1.0
    assert result["missing"] == 25
    with pytest.raises(ValueError, match="the verifier of 'coin' rated no response"):
        evaluate(*make(), replace(coin, verify=lambda p, r: None), n=5)


@pytest.mark.parametrize(
    "bad",
    [lambda: 1 / 0, lambda: math.nan, lambda: math.inf, lambda: 1e308, lambda: "1", lambda: [1.0]],
    ids=["raises", "nan", "inf", "1e308", "text", "list"],
)
def test_a_bad_verifier_is_missing_as_in_training(bad, coin, make) -> None:
    calls = itertools.count()
    task = replace(coin, verify=lambda p, r: bad() if next(calls) % 4 == 0 else 1.0)
    result = evaluate(*make(), task, n=50)
    assert (result["sampled"], result["greedy"], result["missing"]) == (1.0, 1.0, 25)
    with pytest.raises(ValueError, match="rated no response"):
        evaluate(*make(), replace(coin, verify=lambda p, r: bad()), n=5)


@pytest.mark.parametrize("one", [True, torch.tensor(1.0)], ids=["bool", "tensor"])
def test_what_training_takes_for_a_number_evaluation_takes_too(one, coin, make) -> None:
    result = evaluate(*make(), replace(coin, verify=lambda p, r: one), n=5)
    assert all(type(value) is float for value in result.values())
    assert (result["sampled"], result["greedy"], result["missing"]) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "test"}, "split: found 'test'"),
        ({"n": 0}, "n: found 0"),
        ({"samples_per_prompt": 0}, "samples_per_prompt: found 0"),
        ({"prompts_per_batch": 0}, "prompts_per_batch: found 0"),
        ({"prompts_per_batch": -1}, "prompts_per_batch: found -1"),
        ({"seed": None}, "seed: found None"),
        ({"seed": 2**70}, r"seed: found 1180591620717411303424; wanted .* below 2\*\*63"),
        ({"temperature": 0}, "temperature: found 0"),
    ],
)
def test_bad_input(change: dict, message: str, coin, make) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(*make(), coin, **{"n": 4, **change})


def test_a_model_without_finite_weights_is_an_error(coin, make) -> None:
    model, tokenizer = make()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="model: found log-probs that are not finite"):
        evaluate(model, tokenizer, coin, n=8)
