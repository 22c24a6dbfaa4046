"""LoRA: only the matrices move, the start stays what it was, and what is saved is a plain model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from rlcore import training
from rlcore.lora import Lora, add_lora, has_lora, merged_state
from rlcore.models import build_scalar_model, load, response_rewards, save
from rlcore.preferences import DPO
from rlcore.sampling import response_logprobs, sample
from rlcore.tasks import SORT, chat_task, sample_pairs
from rlcore.training import row, train_policy, train_preference, train_reward_model
from rlcore.training.adapters import at_start, start_of

STEP = {"seed": 0, "progress": False, "device": "cpu", "threads": 1}
SMALL = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "learning_rate": 1e-2}


@pytest.fixture
def task(load_small):
    parity = replace(SORT, name="parity", verify=lambda p, text: float(sum(text.encode()) % 2 == 0))
    return chat_task(parity, load_small()[1], instruction="Sort: {}", max_new_tokens=5)


def shaken(model):
    """The matrices as if they had been trained: B is no longer 0."""
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=numbers))
    return model


def logprobs(model, out):
    width = out.response_mask.shape[1]
    with torch.no_grad():
        return response_logprobs(model, out.input_ids, out.attention_mask, width)


def drawn(model, tokenizer, task):
    return sample(
        model, tokenizer, task.prompts("train", 4), group_size=4, max_new_tokens=6,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def test_the_model_starts_as_it_was(load_small, task) -> None:
    plain, tokenizer = load_small()
    lora, _ = load_small(lora=Lora(rank=4))
    assert type(lora) is type(plain)
    out = drawn(plain, tokenizer, task)
    # Not bit by bit: a product of matrices may round otherwise where its result lies elsewhere.
    torch.testing.assert_close(logprobs(plain, out), logprobs(lora, out), rtol=0, atol=1e-5)
    names = {name for name, w in lora.named_parameters() if w.requires_grad}
    linear = ("q", "k", "v", "o", "gate", "up", "down")  # of two layers, two matrices each
    assert len(names) == 2 * len(linear) * 2
    assert all("lora_" in name for name in names)
    again, _ = load_small(lora=Lora(rank=4))
    other, _ = load_small(lora=Lora(rank=4), seed=1)
    states = [model.state_dict() for model in (lora, again, other)]
    a = next(name for name in names if "lora_A" in name)
    assert torch.equal(states[0][a], states[1][a])
    assert not torch.equal(states[0][a], states[2][a])


def test_scale_targets_and_dtype(load_small) -> None:
    model, _ = load_small(dtype="bfloat16", lora=Lora(4, alpha=2, targets=("q_proj",)))
    layer = model.model.layers[0].self_attn
    assert layer.q_proj.scaling["default"] == 0.5
    assert not hasattr(layer.v_proj, "lora_A")
    assert layer.q_proj.base_layer.weight.dtype == torch.bfloat16
    assert layer.q_proj.lora_A["default"].weight.dtype == torch.float32


def test_merged_weights_are_those_of_the_adapted_model(load_small, task, tmp_path) -> None:
    """By the formula, and by what the saved folder says as a plain model."""
    model, tokenizer = load_small(lora=Lora(rank=4))
    shaken(model)
    layer = model.model.layers[1].mlp.down_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = merged_state(model)["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(merged, layer.base_layer.weight + 2 * b @ a, rtol=0, atol=1e-6)
    plain, _ = load(save(model, tokenizer, tmp_path / "m"), device="cpu")
    assert not has_lora(plain)
    assert has_lora(model)
    assert not (tmp_path / "m" / "adapter_config.json").exists()
    assert plain.generation_config.eos_token_id == model.generation_config.eos_token_id
    out = drawn(model, tokenizer, task)
    torch.testing.assert_close(logprobs(plain, out), logprobs(model, out), rtol=0, atol=2e-5)
    assert plain.state_dict().keys() == load_small()[0].state_dict().keys()


def test_the_sampler_goes_through_the_matrices(load_small, task) -> None:
    model, tokenizer = load_small(lora=Lora(rank=4))
    before = logprobs(model, drawn(model, tokenizer, task))
    shaken(model)
    out = drawn(model, tokenizer, task)
    now, mask = logprobs(model, out), out.response_mask
    torch.testing.assert_close(out.logprobs[mask], now[mask], rtol=0, atol=2e-5)
    assert before.shape != now.shape or not torch.allclose(before, now, atol=1e-2)


def test_only_the_matrices_move(load_small, task) -> None:
    model, tokenizer = load_small(lora=Lora(rank=4))
    before = {name: w.clone() for name, w in model.named_parameters()}
    run = train_policy(model, tokenizer, task, row("grpo"), **SMALL, **STEP)
    assert run.settings["parameters"] == sum(w.numel() for n, w in before.items() if "lora_" in n)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) != ("lora_" in name), name


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained before"])
def test_the_reference_is_that_of_a_whole_copy(load_small, task, monkeypatch, trained) -> None:
    """The same metrics, up to rounding; the start is the model with its matrices as they were."""

    def run():
        model, tokenizer = load_small(lora=Lora(rank=4))
        if trained:
            shaken(model)
        return train_policy(model, tokenizer, task, row("grpo", beta=0.5), **SMALL, **STEP)

    swapped = run()
    assert swapped.metrics[-1]["kl"] > 1e-4
    monkeypatch.setattr(
        training.policy, "start_of", lambda m: copy.deepcopy(m).requires_grad_(False)
    )
    for ours, theirs in zip(swapped.metrics, run().metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_the_start_is_put_back_after_an_error(load_small) -> None:
    model, _ = load_small(lora=Lora(rank=4))
    reference = start_of(model)
    shaken(model)
    now = {name: w.clone() for name, w in model.named_parameters()}

    def fail() -> None:
        with at_start(reference) as start:
            assert start is model
            assert any(not torch.equal(w, now[n]) for n, w in model.named_parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert all(torch.equal(w, now[n]) for n, w in model.named_parameters())


def test_dpo_takes_the_start_for_its_reference(load_small, task) -> None:
    """A trained start too: the first loss is log 2, and only the matrices move."""
    model, tokenizer = load_small(lora=Lora(rank=4))
    shaken(model)
    pairs = sample_pairs(model, tokenizer, task, 8, seed=0)
    before = {name: w.clone() for name, w in model.named_parameters()}
    run = train_preference(
        model, tokenizer, pairs, DPO, steps=2, batch_size=8, learning_rate=1e-2, **STEP
    )
    assert run.metrics[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert run.metrics[1]["loss"] < 0.69
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) != ("lora_" in name), name


def test_a_run_resumes_from_the_matrices_alone(load_small, task, tmp_path) -> None:
    """The same bits as without the stop, from a checkpoint without the frozen weights."""
    settings = {**SMALL, **STEP, "checkpoint_every": 1}
    grpo = row("grpo", beta=0.1)

    def start():
        return load_small(lora=Lora(rank=4))

    whole, _ = model_and_run = start()
    straight = train_policy(*model_and_run, task, grpo, **settings)
    stops = {"left": 2}

    def verify(prompt: str, response: str) -> float:
        if stops["left"] == 0:
            raise KeyboardInterrupt
        return task.verify(prompt, response)

    stopping = replace(task, verify=verify)
    first = start()
    original = training.step.update_policy

    def update(*given, **rest):
        done = original(*given, **rest)
        stops["left"] -= 1
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.step, "update_policy", update)
        run = train_policy(*first, stopping, grpo, **settings, out=tmp_path / "r")
    assert run.interrupted
    assert len(run.metrics) == 2
    saved = torch.load(tmp_path / "r" / "checkpoint.pt", weights_only=True)
    assert all("lora_" in name for name in saved["model"])
    assert sum(w.numel() for w in saved["reference"].values()) == straight.settings["parameters"]
    parts = start()
    again = train_policy(*parts, task, grpo, **settings, out=tmp_path / "r", resume=True)
    assert again.metrics == straight.metrics
    for a, b in zip(whole.parameters(), parts[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resume_on_other_weights_is_refused(load_small, task, tmp_path) -> None:
    model, tokenizer = load_small(lora=Lora(rank=4))
    settings = {**SMALL, **STEP, "steps": 1, "out": tmp_path / "r"}
    train_policy(model, tokenizer, task, row("grpo"), **settings)
    other, _ = load_small(lora=Lora(rank=4))
    with torch.no_grad():
        other.model.norm.weight.add_(0.1)
    with pytest.raises(ValueError, match="belongs to another run: frozen was"):
        train_policy(other, tokenizer, task, row("grpo"), **settings, resume=True)


def test_a_reward_model_and_a_critic_of_it(load_small, task) -> None:
    """The head is trained whole; a critic is made of the merged weights."""
    model, tokenizer = load_small(lora=Lora(rank=4))
    shaken(model)
    pairs = sample_pairs(model, tokenizer, task, 8, seed=0)
    judge = build_scalar_model(model, seed=0)
    assert not has_lora(judge)
    out = drawn(model, tokenizer, task)
    hidden = model.model(out.input_ids[:1]).last_hidden_state
    ours = judge.model(out.input_ids[:1]).last_hidden_state
    torch.testing.assert_close(ours, hidden, rtol=0, atol=2e-5)
    add_lora(judge, Lora(rank=2), seed=0)
    before = {name: w.clone() for name, w in judge.named_parameters()}
    train_reward_model(judge, tokenizer, pairs, steps=2, batch_size=8, learning_rate=1e-2, **STEP)
    for name, weight in judge.named_parameters():
        assert torch.equal(weight, before[name]) != ("lora_" in name or name == "score.weight")
    run = train_policy(
        model, tokenizer, task, row("ppo"), **{**SMALL, "steps": 1}, reward_model=judge, **STEP
    )
    assert run.metrics[0]["val/loss"] > 0
    assert response_rewards(judge, out.input_ids, out.attention_mask).shape == (16,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "rank: found 0"),
        ({"alpha": 0}, "alpha: found 0"),
        ({"dropout": 1.0}, "dropout: found 1.0; wanted 0 <= dropout < 1"),
        ({"targets": "q_proj"}, "targets: found 'q_proj'"),
        ({"targets": ()}, r"targets: found \(\)"),
    ],
)
def test_bad_numbers_are_named(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        Lora(**given)


def test_a_model_that_does_not_take_them(load_small) -> None:
    model, _ = load_small(lora=Lora(rank=4))
    with pytest.raises(ValueError, match="it has LoRA matrices already"):
        add_lora(model, seed=0)
    plain, _ = load_small()
    with pytest.raises(ValueError, match="targets: the model takes no such matrices"):
        add_lora(plain, Lora(targets=("nothing",)), seed=0)
    with pytest.raises(ValueError, match="lora: found 4; wanted a Lora"):
        add_lora(plain, 4, seed=0)


@pytest.mark.parametrize(
    ("targets", "largest"), [("all-linear", 64), (("k_proj",), 32), (("q_proj", "k_proj"), 64)]
)
def test_a_rank_beyond_every_matrix_is_refused(targets, largest) -> None:
    """Heads of 16: four for the queries, two for the keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=128, **shape)
    model = LlamaForCausalLM(config)
    message = f"rank: found {largest + 1}; wanted at most {largest}, the smaller side"
    with pytest.raises(ValueError, match=message):
        add_lora(model, Lora(rank=largest + 1, targets=targets), seed=0)
    assert not has_lora(model)
    add_lora(model, Lora(rank=largest, targets=targets), seed=0)
    assert has_lora(model)
