"""bfloat16 products: weights, log-probs and losses stay float32, every forward pass has it."""

from __future__ import annotations

import pytest
import torch

from rlcore.__main__ import main
from rlcore.devices import using_precision
from rlcore.models import build_scalar_model
from rlcore.preferences import DPO
from rlcore.sampling import response_logprobs, sample
from rlcore.tasks import SORT, sample_pairs
from rlcore.training import (
    read_run,
    row,
    train_policy,
    train_preference,
    train_reward_model,
    train_sft,
)

STEP = {"seed": 0, "progress": False, "device": "cpu", "threads": 1}
POLICY = {"steps": 2, "prompts_per_step": 4, "group_size": 4, "learning_rate": 1e-2}


def watched(model, layer):
    """The number types that a layer's output comes in; the watch ends the own decoder's turn."""
    seen = set()
    layer.register_forward_hook(lambda module, given, out: seen.add(out.dtype))
    return seen


def test_the_policy_loop(coin, make) -> None:
    runs = {}
    for precision in ("float32", "bf16"):
        model, tokenizer = make(size="tiny")
        seen = watched(model, model.model.layers[0].mlp.up_proj)
        runs[precision] = train_policy(
            model, tokenizer, coin, row("ppo", reward="verifier"), **POLICY, **STEP,
            updates_per_batch=2, precision=precision,
        )  # fmt: skip
        assert seen == {torch.float32 if precision == "float32" else torch.bfloat16}
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert "precision" not in runs["float32"].settings
    assert runs["bf16"].settings["precision"] == "bf16"
    exact, rounded = (runs[name].metrics[0] for name in ("float32", "bf16"))
    assert rounded["grad_norm"] != exact["grad_norm"]
    assert rounded["entropy"] == pytest.approx(exact["entropy"], rel=0.02)
    # The second update sees the weights that the first one moved.
    first, second = rounded["updates"]
    assert first["ratio_mean"] == 1
    assert second["clip_ratio/region_mean"] > 0


def test_the_other_loops(coin, make) -> None:
    model, tokenizer = make()
    seen = watched(model, model.model.layers[0].mlp.up_proj)
    sft = {"steps": 2, "batch_size": 8, "learning_rate": 1e-2, **STEP, "precision": "bf16"}
    run = train_sft(model, tokenizer, coin, **sft)
    assert run.metrics[1]["loss"] < run.metrics[0]["loss"]
    assert seen == {torch.bfloat16}
    pairs = sample_pairs(model, tokenizer, coin, 8, seed=0)
    judge = build_scalar_model(model, seed=0)
    seen |= watched(judge, judge.model.layers[0].mlp.up_proj)
    seen.clear()
    run = train_preference(model, tokenizer, pairs, DPO, **sft)
    assert run.metrics[0]["loss"] == pytest.approx(0.6931, abs=2e-2)
    assert run.settings["precision"] == "bf16"
    train_reward_model(judge, tokenizer, pairs, **sft)
    assert seen == {torch.bfloat16}


def test_logprobs_are_float32_and_near(make) -> None:
    model, tokenizer = make(size="tiny")
    prompts = SORT.prompts("train", 8)
    with using_precision("bf16"):
        out = sample(
            model, tokenizer, prompts, group_size=4, max_new_tokens=6,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
    width = out.response_mask.shape[1]
    exact = response_logprobs(model, out.input_ids, out.attention_mask, width).detach()
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
    mask = out.response_mask
    assert not torch.equal(exact[mask], out.logprobs[mask])
    torch.testing.assert_close(exact[mask], out.logprobs[mask], rtol=0, atol=0.02)


def test_another_precision_is_another_run(coin, make, tmp_path) -> None:
    settings = {**POLICY, **STEP, "out": tmp_path / "r"}
    train_policy(*make(), coin, row("grpo"), **settings, precision="bf16")
    with pytest.raises(ValueError, match="precision was 'bf16', now None"):
        train_policy(*make(), coin, row("grpo"), **settings, resume=True)


def test_the_command_and_a_wrong_name(tmp_path, capsys) -> None:
    words = ["train", "sft", "--task", "sort", "--sft-steps", "2", "--sft-batch-size", "4"]
    words += ["--size", "nano", "--device", "cpu", "--quiet", "--out"]
    assert main([*words, str(tmp_path / "a"), "--precision", "bf16"]) == 0
    assert read_run(tmp_path / "a").settings["precision"] == "bf16"
    assert main([*words, str(tmp_path / "b"), "--precision", "fp8"]) == 2
    assert "precision: found 'fp8'; wanted one of float32, bf16" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
