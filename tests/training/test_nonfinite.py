"""A NaN or an infinity stops every loop before it is trained on, and says where it comes from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore import models
from rlcore.preferences import DPO, KTO
from rlcore.tasks import SORT, PreferencePairs
from rlcore.training import (
    NonFiniteError,
    row,
    train_policy,
    train_preference,
    train_reward_model,
    train_sft,
)
from rlcore.training.nonfinite import diagnose

COMMON = {"steps": 4, "seed": 0, "progress": False, "threads": 1, "device": "cpu"}
LOOPS = ("sft", "grpo", "ppo", "dpo", "kto", "reward")
HEAD = {"reward": "score.weight"}


def pairs(n: int = 8) -> PreferencePairs:
    rng = random.Random(0)
    prompts = tuple(SORT.draw(rng) for _ in range(n))
    right = tuple(SORT.solution(prompt) for prompt in prompts)
    return PreferencePairs(prompts, right, tuple(text[::-1] + "0" for text in right))


@pytest.fixture
def loop(coin, make) -> Callable[..., tuple[Any, Callable[..., Any]]]:
    """loop(kind) -> (what it trains, a function that trains it)."""

    def build(kind: str) -> tuple[Any, Callable[..., Any]]:
        model, tokenizer = make()
        policy = {**COMMON, "prompts_per_step": 4, "group_size": 4}
        if kind == "sft":
            return model, lambda **s: train_sft(
                model, tokenizer, coin, **{**COMMON, "learning_rate": 1e-2, "batch_size": 4, **s}
            )
        if kind == "reward":
            scalar = models.build_scalar_model(model, seed=0)
            return scalar, lambda **s: train_reward_model(
                scalar,
                tokenizer,
                pairs(),
                **{**COMMON, "learning_rate": 1e-2, "batch_size": 4, **s},
            )
        if kind in ("dpo", "kto"):
            method = {"dpo": DPO, "kto": KTO}[kind]
            return model, lambda **s: train_preference(
                model, tokenizer, pairs(), method,
                **{**COMMON, "learning_rate": 1e-2, "batch_size": 4, **s},
            )  # fmt: skip
        algorithm = row(kind, reward="verifier" if kind == "ppo" else None)
        return model, lambda **s: train_policy(
            model, tokenizer, coin, algorithm, **{**policy, "learning_rate": 1e-2, **s}
        )

    return build


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", LOOPS)
def test_a_weight_that_is_nan_from_the_start_is_named(kind, loop, tmp_path: Path) -> None:
    model, train = loop(kind)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = math.nan
    if kind in ("dpo", "kto"):  # before the first step: the reference has no log-probs
        with pytest.raises(NonFiniteError, match="the model's log-probs are not finite"):
            train(out=tmp_path / "run")
        return
    with pytest.raises(NonFiniteError, match=r"^step 1: .*; nothing was trained on it; ") as caught:
        train(out=tmp_path / "run")
    names = [f"{name}.model.norm.weight" for name in ("model", "critic")]
    names = names if kind == "ppo" else names[:1]  # the critic is a copy
    said = (
        f"likely cause: before any update there were infinite or NaN weights in {', '.join(names)}"
    )
    assert f"{said}; learning rate 0.01" in str(caught.value)
    assert caught.value.found["weights"] == dict.fromkeys(names, 1)
    saved = torch.load(tmp_path / "run" / "nonfinite-step-1.pt", weights_only=True)
    assert saved["found"] == caught.value.found
    assert saved["found"]["rows"]
    assert saved["input_ids"].dim() == 2
    assert caught.value.run.metrics == []


@pytest.mark.parametrize("kind", LOOPS)
def test_a_gradient_that_is_nan_is_named_and_nothing_moves(kind, loop, tmp_path: Path) -> None:
    """In the backward pass of step 3 alone; then the weights are those of step 2."""
    model, train = loop(kind)
    name, seen = "model.layers.0.mlp.up_proj.weight", []
    after = {}

    def spoils(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if len(seen) == 2:
            after["one"] = weights(model)
        if len(seen) == 3:
            after["two"] = weights(model)
            gradient = gradient.clone()
            gradient[0, :2] = math.inf
        return gradient

    model.get_parameter(name).register_hook(spoils)
    with pytest.raises(NonFiniteError, match=r"^step 3: the gradient norm is inf; ") as caught:
        train(out=tmp_path / "run", checkpoint_every=2)
    assert torch.equal(weights(model), after["two"])
    assert not torch.equal(after["one"], after["two"])
    assert caught.value.found["gradients"] == {f"model.{name}": 2}
    assert f"a finite loss, and its gradient overflowed in model.{name}; learning rate" in str(
        caught.value
    )
    assert len(caught.value.found["grad_norms"]) == 2
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 2
    assert torch.equal(state["model"][name], model.get_parameter(name).detach())


@pytest.mark.parametrize("kind", LOOPS)
def test_weights_that_an_update_breaks_come_into_no_checkpoint(kind, loop, tmp_path: Path) -> None:
    """The last step too: a run that is finished has finite weights."""
    _, train = loop(kind)
    optimizers, true_step = [], torch.optim.AdamW.step

    def step(self: Any, *arguments: Any) -> Any:
        optimizers.append(self)
        result = true_step(self, *arguments)
        if len(optimizers) >= (8 if kind == "ppo" else 4):
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] = math.inf
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(NonFiniteError, match=r"^step 4: the update made .*weights that") as e:
            train(out=tmp_path / "run", checkpoint_every=1)
    whose = "critic" if kind == "ppo" else "model"
    assert next(iter(e.value.found["weights"])).startswith(f"{whose}.")
    assert f"the update made infinite or NaN weights in {whose}." in str(e.value)
    assert "nothing was trained" not in str(e.value)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 3
    assert all(w.isfinite().all() for w in state["model"].values())
    assert not (tmp_path / "run" / "model").exists()


def test_the_rows_of_a_batch_are_named() -> None:
    layer = torch.nn.Linear(2, 1)
    batch = {
        "logprobs": torch.tensor([[0.0, -1.0], [math.nan, 0.0], [0.0, -math.inf]]),
        "reward": torch.tensor([math.nan, 1.0, 1.0]),  # missing is not broken
        "input_ids": torch.zeros(3, 2, dtype=torch.long),
        "texts": ["a", "b", "c"],
    }
    found = diagnose({"model": layer}, batch, [], 1e-3, False)
    assert found["rows"] == {"logprobs": [1, 2]}
    assert found["cause"] == (
        "the trained weights are finite, logprobs is not in row 1, 2 of the batch; learning rate "
        "0.001"
    )


def test_an_overflowing_ratio_is_named() -> None:
    statistics = {"loss": math.nan, "ratio_max": math.inf, "kl": 0.5}
    found = diagnose({}, {"statistics": statistics}, [], 1.0, False)
    assert (
        "a term of the loss overflowed: loss nan, ratio_max inf; learning rate 1" in found["cause"]
    )


def test_a_growing_gradient_is_told() -> None:
    layer = torch.nn.Linear(2, 1)
    layer.weight.grad = torch.full((1, 2), 3e38)
    metrics = [{"grad_norm": norm} for norm in (0.5, 0.4, None, 0.6, 1e9)]
    found = diagnose({"model": layer}, {}, metrics, 0.1, False)
    assert found["cause"] == (
        "every gradient is finite, the sum of their squares is not; the largest is 3e+38, of "
        "model.weight; learning rate 0.1, gradient norms before 0.5, 0.4, 0.6, 1e+09 and growing: "
        "a smaller learning rate may do"
    )


def test_the_clipped_gradient_is_torchs(make) -> None:
    """Checked before it is clipped, and clipped to the same bits."""
    from rlcore.training.loop import clip_gradient

    model, _ = make()
    other, _ = make()
    for one in (model, other):
        torch.manual_seed(0)
        for p in one.parameters():
            p.grad = torch.randn_like(p)
    norm = clip_gradient(model, 0.0, 0.1, {})
    assert norm == float(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
