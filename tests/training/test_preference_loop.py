"""The loop over preference pairs: each row's own loss, the same bits after a stop, clear errors."""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rlcore import models
from rlcore.preferences import (
    DPO,
    KTO,
    ORPO,
    REWARD_MODEL,
    ROWS,
    SIMPO,
    compute_preference_loss,
    compute_unpaired_loss,
)
from rlcore.sampling import response_logprobs
from rlcore.tasks import SORT, PreferencePairs, sample_pairs
from rlcore.training import (
    NonFiniteError,
    read_run,
    recipe,
    train_preference,
    train_reward_model,
)
from rlcore.training.pairs import batch_order, encode_pairs
from rlcore.training.preference import mismatched

SETTINGS = {
    "steps": 4,
    "batch_size": 8,
    "learning_rate": 3e-3,
    "seed": 0,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}
FEW = 3  # pairs in a batch that is computed by hand
METHODS = [row for row in ROWS if row is not REWARD_MODEL]


@pytest.fixture(scope="module")
def pairs() -> PreferencePairs:
    """Twenty pairs of a random model, some responses cut. The rater likes sevens."""
    tokenizer = models.build_tokenizer(SORT.symbols)
    model = models.build_model("nano", tokenizer, seed=1, device="cpu")
    task = replace(SORT, verify=lambda prompt, text: float(text.count("7")), preference_scale=1.0)
    return sample_pairs(model, tokenizer, task, 20, seed=0)


def logprobs_by_hand(model, tokenizer, prompt: str, response: str, cut: bool) -> torch.Tensor:
    """(T,): of one response alone, without any padding, through the sampler's own function."""
    ids, answer = models.encode(tokenizer, [prompt, response])
    answer = answer if cut else [*answer, tokenizer.eos_token_id]
    whole = torch.tensor([[*ids, *answer]])
    with torch.no_grad():
        return response_logprobs(model, whole, torch.ones_like(whole), len(answer))[0]


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) and mask."""
    width = max(map(len, rows))
    values, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)], mask[i, : len(row)] = row, True
    return values, mask


def side(model, tokenizer, pairs: PreferencePairs, name: str, rows: list[int]):
    texts, cut = getattr(pairs, name), getattr(pairs, f"{name}_cut")
    return padded(
        [logprobs_by_hand(model, tokenizer, pairs.prompts[i], texts[i], cut[i]) for i in rows]
    )


def expected_step(method, model, reference, tokenizer, pairs: PreferencePairs, step: int):
    """Loss and statistics of a step, from the objective and one response at a time."""
    n = len(pairs)
    if method is not KTO:
        rows = batch_order(n, FEW, step, 0)
        (a, mask_a), (b, mask_b) = (
            side(model, tokenizer, pairs, name, rows) for name in ("chosen", "rejected")
        )
        known = [side(reference, tokenizer, pairs, s, rows)[0] for s in ("chosen", "rejected")]
        return compute_preference_loss(
            method,
            a,
            b,
            mask_a,
            mask_b,
            ref_chosen_logprobs=known[0],
            ref_rejected_logprobs=known[1],
        )
    prompts, texts = pairs.prompts * 2, pairs.chosen + pairs.rejected
    cut = pairs.chosen_cut + pairs.rejected_cut
    rows = batch_order(2 * n, 2 * FEW, step, 0)
    other = mismatched(prompts, 0)

    def of(policy, partner: bool):
        answers = [other[i] if partner else i for i in rows]
        return padded(
            [
                logprobs_by_hand(policy, tokenizer, prompts[i], texts[j], cut[j])
                for i, j in zip(rows, answers, strict=True)
            ]
        )

    now, mask = of(model, False)
    ratios = of(model, True)[0].sum(1) - of(reference, True)[0].sum(1)
    return compute_unpaired_loss(
        method,
        now,
        of(reference, False)[0],
        mask,
        torch.tensor([i < n for i in rows]),
        mismatched_log_ratios=ratios,
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda row: row.name)
def test_losses_are_those_of_the_objective(method, pairs, make) -> None:
    """Of the first step, where policy and reference are one, and of the second, where not."""
    model, tokenizer = make()
    start = copy.deepcopy(model)
    settings = {**SETTINGS, "batch_size": FEW}
    run = train_preference(model, tokenizer, pairs, method, **{**settings, "steps": 2})
    moved, _ = make()  # the first step does not depend on how many follow
    train_preference(moved, tokenizer, pairs, method, **{**settings, "steps": 1})
    for step, policy in enumerate((start, moved)):
        loss, stats = expected_step(method, policy, start, tokenizer, pairs, step)
        found = run.metrics[step]
        assert found["loss"] == pytest.approx(float(loss), rel=2e-5)
        assert set(stats) <= set(found)
        for name, value in stats.items():
            assert found[name] == pytest.approx(float(value), rel=1e-4, abs=2e-5), name
    if method is DPO:
        assert run.metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    if method is KTO:
        assert run.metrics[0]["loss"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=lambda row: row.name)
def test_the_loss_falls_on_pairs_seen_again_and_again(method, pairs, make) -> None:
    model, tokenizer = make()
    few = pairs.take(0, 8)
    run = train_preference(model, tokenizer, few, method, **{**SETTINGS, "steps": 25})
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    assert run.metrics[-1]["rewards/margins"] > run.metrics[0]["rewards/margins"]
    assert run.finished


@pytest.mark.parametrize("method", [DPO, ORPO, KTO], ids=lambda row: row.name)
@pytest.mark.parametrize("micro", [1, 3, 100])
def test_parts_have_the_gradient_of_the_whole(micro: int, method, pairs, make) -> None:
    """In the second step, where the log-ratios (and KTO's reference point) are no longer 0."""
    settings = {**SETTINGS, "steps": 2, "max_grad_norm": 1e9}
    (whole, tokenizer), (parts, _) = make(), make()
    one = train_preference(whole, tokenizer, pairs, method, **settings)
    two = train_preference(parts, tokenizer, pairs, method, **settings, micro_batch_size=micro)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        scale = float(a.grad.abs().max())
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-4 * scale + 1e-12)
    for name, value in one.metrics[0].items():
        assert two.metrics[0][name] == pytest.approx(value, rel=1e-4, abs=2e-5), name


def test_the_reference_is_asked_once_for_each_response(pairs, make) -> None:
    """SimPO's forward passes are those of its steps; DPO has one more for every response."""
    counts = {}
    for method in (SIMPO, DPO):
        model, tokenizer = make()
        counts[method.name] = 0

        def count(module, inputs, output, name=method.name) -> None:
            counts[name] += len(output.logits)

        model.register_forward_hook(count)
        train_preference(model, tokenizer, pairs, method, **SETTINGS)
    assert counts["simpo"] == 4 * 16
    assert counts["dpo"] == 4 * 16 + 2 * len(pairs)


def interrupt(model, at: int) -> None:
    """SIGINT in a forward pass of the model."""
    calls = []

    def hook(*arguments) -> None:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)

    model.register_forward_hook(hook)


@pytest.mark.parametrize("method", [DPO, SIMPO, KTO], ids=lambda row: row.name)
def test_a_resumed_run_has_the_same_bits(method, pairs, make, tmp_path) -> None:
    """Even when it is resumed with a model that is no longer the start: the reference is kept."""
    settings = {**SETTINGS, "steps": 6, "held_out": pairs.take(14), "evaluate_every": 3}
    whole, tokenizer = make()
    expected = train_preference(whole, tokenizer, pairs, method, **settings)
    stopped, _ = make()
    before = {"dpo": 3 + 2, "simpo": 0, "kto": 3 + 3 + 2}[method.name]  # for the reference
    interrupt(stopped, before + 1 + 2 * (2 if method is KTO else 1))
    run = train_preference(stopped, tokenizer, pairs, method, **settings, out=tmp_path / "run")
    assert (run.interrupted, run.finished) == (True, False)
    assert 1 <= len(run.metrics) < 6
    resumed = train_preference(
        stopped, tokenizer, pairs, method, **settings, out=tmp_path / "run", resume=True
    )
    assert resumed.metrics == expected.metrics
    assert resumed.evaluations == expected.evaluations
    for a, b in zip(whole.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(a, b)
    read = read_run(tmp_path / "run")
    assert (read.finished, read.metrics, read.settings) == (
        True,
        run.metrics[:0] + expected.metrics,
        resumed.settings,
    )


def test_same_seed_same_bits_and_the_order_is_that_of_every_method(pairs, make) -> None:
    runs = [train_preference(*make(), pairs, DPO, **SETTINGS).metrics for _ in range(2)]
    assert runs[0] == runs[1]
    other = train_preference(*make(), pairs, DPO, **{**SETTINGS, "seed": 1}).metrics
    assert runs[0] != other
    hinge = train_preference(*make(), pairs, replace(DPO, link="hinge"), **SETTINGS).metrics
    assert hinge[0]["logps/chosen"] == runs[0][0]["logps/chosen"]


def test_resume_with_another_row_or_other_pairs_is_refused(pairs, make, tmp_path) -> None:
    train_preference(*make(), pairs, DPO, **SETTINGS, out=tmp_path)
    with pytest.raises(ValueError, match=r"another run: method was 'dpo', now 'simpo'"):
        train_preference(*make(), pairs, SIMPO, **SETTINGS, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"another run: row\.beta was 0\.1, now 1\.0"):
        train_preference(
            *make(), pairs, replace(DPO, beta=1.0), **SETTINGS, out=tmp_path, resume=True
        )
    with pytest.raises(ValueError, match="pairs was 20, now 19; pairs_fingerprint was"):
        train_preference(*make(), pairs.take(1), DPO, **SETTINGS, out=tmp_path, resume=True)


@pytest.mark.parametrize("method", [DPO, SIMPO, KTO], ids=lambda row: row.name)
def test_held_out_pairs_and_the_true_reward_are_measured(method, pairs, make) -> None:
    model, tokenizer = make()
    run = train_preference(
        model,
        tokenizer,
        pairs,
        method,
        **SETTINGS,
        held_out=pairs.take(12),
        task=SORT,
        evaluate_n=8,
        evaluate_every=2,
    )
    assert [row["step"] for row in run.evaluations] == [0, 2, 4]
    names = {"eval_rewards/accuracies", "eval_rewards/margins", "eval_logps/chosen", "sampled"}
    assert names <= set(run.evaluations[0])
    assert ("eval_loss" in run.evaluations[0]) == (method is not KTO)
    if method is not KTO:
        start, _ = make()
        (a, mask_a), (b, mask_b) = (
            side(start, tokenizer, pairs, name, list(range(12, 20)))
            for name in ("chosen", "rejected")
        )
        now = [
            side(model, tokenizer, pairs, s, list(range(12, 20)))[0] for s in ("chosen", "rejected")
        ]
        loss, _ = compute_preference_loss(
            method, *now, mask_a, mask_b, ref_chosen_logprobs=a, ref_rejected_logprobs=b
        )
        assert run.evaluations[-1]["eval_loss"] == pytest.approx(float(loss), rel=1e-4)


def test_true_rewards_are_never_trained_on(pairs, make) -> None:
    blind = replace(pairs, chosen_rewards=(), rejected_rewards=())
    seen = train_preference(*make(), pairs, DPO, **SETTINGS).metrics
    assert train_preference(*make(), blind, DPO, **SETTINGS).metrics == seen


def test_dropout_is_off(pairs, make) -> None:
    plain = train_preference(*make(), pairs, DPO, **SETTINGS).metrics
    assert train_preference(*make(dropout=0.5), pairs, DPO, **SETTINGS).metrics == plain


@pytest.mark.parametrize("method", [SIMPO, DPO, KTO], ids=lambda row: row.name)
def test_a_broken_model_stops_the_run(method, pairs, make) -> None:
    model, tokenizer = make()
    with torch.no_grad():
        model.lm_head.weight.fill_(math.inf)
    with pytest.raises(NonFiniteError, match="the model's log-probs are not finite") as caught:
        train_preference(model, tokenizer, pairs, method, **SETTINGS)
    assert caught.value.batch["input_ids"].shape[0] == 16


def test_an_exploding_step_is_not_trained_on(pairs, make, tmp_path) -> None:
    """A loss that overflows in step 2: the weights are those of step 1, and the batch is kept."""
    model, tokenizer = make()
    settings = {**SETTINGS, "learning_rate": 1e30, "max_grad_norm": 1e30}
    with pytest.raises(NonFiniteError, match=r"step 2: .*; the batch is in .*step-2\.pt"):
        train_preference(model, tokenizer, pairs, SIMPO, **settings, out=tmp_path)
    batch = torch.load(tmp_path / "nonfinite-step-2.pt", weights_only=True)
    assert {"input_ids", "mask"} <= set(batch)


@pytest.mark.parametrize("seed", range(5))
def test_mismatched_rows_have_another_prompt(seed: int) -> None:
    for prompts in ("ab", "aaaab", "aabbaabbc", "abcabcabc" * 3, "a" * 30 + "b" + "a" * 5):
        found = mismatched(list(prompts), seed)
        assert all(prompts[i] != prompts[j] for i, j in enumerate(found))
    assert len(set(mismatched(list("abcdefgh"), seed))) == 8  # each response is used once
    with pytest.raises(ValueError, match="pairs: all have one prompt"):
        mismatched(["a", "a"], seed)


def test_kto_needs_two_prompts(make) -> None:
    one = PreferencePairs(("1=", "1="), ("1", "2"), ("3", "4"))
    settings = {**SETTINGS, "batch_size": 2}
    with pytest.raises(ValueError, match="pairs: all have one prompt"):
        train_preference(*make(), one, KTO, **settings)
    assert train_preference(*make(), one, DPO, **settings).finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": [("a", "b", "c")]}, "pairs: found a list; wanted PreferencePairs"),
        ({"held_out": "pairs.jsonl"}, "held_out: found a str"),
        ({"method": "dpo"}, "method: found 'dpo'; wanted a row over pairs"),
        ({"method": REWARD_MODEL}, "method: found 'reward-model'; .*train_reward_model"),
        ({"steps": 0}, "steps: found 0"),
        ({"batch_size": 21}, "batch_size: found 21; there are only 20 pairs"),
        ({"batch_size": True}, "batch_size: found True"),
        ({"micro_batch_size": 0}, "micro_batch_size: found 0"),
        ({"learning_rate": 0}, "learning_rate: found 0"),
        ({"final_learning_rate": 2}, "final_learning_rate: found 2"),
        ({"max_grad_norm": math.nan}, "max_grad_norm: found nan"),
        ({"seed": -1}, "seed: found -1"),
        ({"evaluate_every": -1}, "evaluate_every: found -1"),
        ({"evaluate_n": 0}, "evaluate_n: found 0"),
        ({"checkpoint_every": 0.5}, "checkpoint_every: found 0.5"),
        ({"threads": -1}, "threads: found -1"),
        ({"device": "abacus"}, "device: "),
        ({"resume": True}, "resume: needs out"),
    ],
)
def test_bad_arguments(change: dict, message: str, pairs, make, tmp_path) -> None:
    model, tokenizer = make()
    arguments = {**SETTINGS, "pairs": pairs, "method": DPO, "out": tmp_path / "run", **change}
    if change.get("resume"):
        arguments["out"] = None
    with pytest.raises(ValueError, match=message):
        train_preference(model, tokenizer, **arguments)
    assert not (tmp_path / "run").exists()


def test_unknown_characters_and_rows_that_are_too_long_are_errors(pairs, make) -> None:
    strange = PreferencePairs(("1=",), ("x",), ("2",))
    with pytest.raises(ValueError, match=r"text: 'x' has characters without a token: \['x'\]"):
        train_preference(*make(), strange, DPO, **{**SETTINGS, "batch_size": 1})
    with pytest.raises(ValueError, match="the model has 9 positions"):
        train_preference(*make(max_length=9), pairs, DPO, **SETTINGS)


def test_a_recipe_holds_arguments_of_the_loops() -> None:
    setup = recipe("reviews", preference_steps=3, reward_steps=2, preference_batch_size=5)
    for settings, loop, steps in (
        (setup.preference_settings(), train_preference, 3),
        (setup.reward_settings(), train_reward_model, 2),
    ):
        assert set(settings) <= set(inspect.signature(loop).parameters)
        assert (settings["steps"], settings["batch_size"]) == (steps, 5)
    for name in ("pairs", "reward_steps", "preference_steps", "preference_batch_size"):
        with pytest.raises(ValueError, match=f"{name}: found 0"):
            recipe("reviews", **{name: 0})
    for name in ("reward_learning_rate", "preference_learning_rate"):
        with pytest.raises(ValueError, match=f"{name}: found 0"):
            recipe("reviews", **{name: 0})


def test_case_a31_a_token_merges_across_the_end_of_the_prompt() -> None:
    """Prompt and answer are tokenised apart, so that both answers follow the same prompt."""
    cases = json.loads((Path(__file__).parents[1] / "data" / "cases.json").read_text("utf-8"))
    case = next(case for case in cases if case["id"] == "A31")
    given, expected = case["input"], case["expected"]
    merges = [tuple(merge) for merge in given["merges"]]
    words = {**given["toy_BPE_vocab"], "<pad>": 5, "<eos>": 6}
    model = Tokenizer(BPE(vocab=words, merges=merges))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>"
    )
    prompt, chosen, rejected = given["prompt"], given["chosen"], given["rejected"]
    assert tokenizer(prompt + chosen)["input_ids"] == [0, 4]  # the merge that cuts would miss
    pairs = PreferencePairs((prompt,), (chosen,), (rejected,))
    rows = encode_pairs(tokenizer, pairs, torch.device("cpu"))
    wanted = expected["safe_option_1"]
    for row, answer in enumerate(("chosen", "rejected")):
        ids = rows.ids[row, : rows.lengths[row]].tolist()
        assert ids == [*wanted["prompt"], *wanted[answer], tokenizer.eos_token_id]
        learned = rows.ids[row, 1:][rows.mask[row]].tolist()
        assert learned == [*wanted[answer], tokenizer.eos_token_id]
        text = tokenizer.decode(ids[:-1]).replace(" ", "")
        assert text == prompt + given[answer]
