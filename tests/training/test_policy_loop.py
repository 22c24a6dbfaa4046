"""One step of the policy loop: what it computes, what it leaves out, what it refuses."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcore.algorithms import (
    DR_GRPO,
    GRPO,
    GRPO_MEAN_ONLY,
    PPO,
    REINFORCE,
    RLOO,
    VAPO,
    by_name,
    compute_advantages,
    compute_loss,
)
from rlcore.algorithms import ROWS as LISTED
from rlcore.sampling import response_logprobs, sample
from rlcore.training import NonFiniteError, read_run, row, train_policy
from rlcore.training import adapters as adapters_module
from rlcore.training import update as update_module

SETTINGS = {
    "steps": 5,
    "prompts_per_step": 8,
    "group_size": 4,
    "learning_rate": 1e-2,
    "seed": 0,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}
EVERY = (*LISTED, GRPO_MEAN_ONLY)
ROWS = {
    "grpo": row("grpo"),
    "rloo": row("rloo"),
    "reinforce": row("reinforce"),
    "dr-grpo": row("dr-grpo"),
    "grpo-mean-only": row("grpo-mean-only"),
    "grpo-paper": GRPO,
    "rloo-paper": RLOO,
}


def coin_flip(problem: str, response: str) -> float:
    return float(sum(map(ord, response)) % 2 == 0)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# A pinned trajectory: these numbers came from this code. They say that nothing has changed, not
# that it is right; that is for the other tests. float64, so that another CPU gives the same.
PINNED = json.loads((Path(__file__).parent / "pinned.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce", "dr-grpo"])
def test_pinned_trajectory(name: str, coin, make) -> None:
    model, tokenizer = make(dtype="float64")
    run = train_policy(model, tokenizer, coin, ROWS[name], **SETTINGS)
    for key, values in PINNED[name].items():
        assert run.curve(key)[1] == pytest.approx(values, rel=0, abs=1e-6), key


# The other rows, as the recipes run them, in a file of their own. transformers' norms and rotary
# embeddings are float32 whatever the model, and AdamW makes whole steps of what they round: at a
# tenth of the learning rate above, another CPU's numbers still agree to 1e-6.
PINNED_ROWS = json.loads((Path(__file__).parent / "pinned_rows.json").read_text(encoding="utf-8"))


def pinned_task(name: str, coin):
    """The coin; for several rewards, two of them."""
    if by_name(name).reward != "several":
        return coin
    names = ("even", "short")
    return replace(
        coin,
        rewards=lambda problem, text: {"even": coin_flip(problem, text), "short": 9 - len(text)},
        reward_names=names,
    )


def pinned_row(name: str):
    return row(name, reward="verifier" if by_name(name).reward == "reward_model" else None)


def test_every_row_is_pinned() -> None:
    """In one file or the other; with a critic, its loss too."""
    assert set(PINNED).isdisjoint(PINNED_ROWS)
    pinned = PINNED | PINNED_ROWS
    assert set(pinned) == {one.name for one in EVERY}
    for name, curves in pinned.items():
        wanted = {"loss", "grad_norm", "reward"}
        if by_name(name).advantage == "gae":
            wanted.add("val/loss")
        assert wanted <= set(curves), name
        for key, values in curves.items():
            assert len(values) == SETTINGS["steps"], (name, key)
            # Nothing is missing but the policy's numbers in VAPO's step of the critic alone.
            alone = name == "vapo" and key in ("loss", "grad_norm")
            assert [v is None for v in values] == [alone] + [False] * 4, (name, key)


@pytest.mark.parametrize("name", sorted(PINNED_ROWS))
def test_pinned_trajectory_of_every_other_row(name: str, coin, make) -> None:
    """Two updates a batch, so that clips and caps are at work."""
    model, tokenizer = make(dtype="float64")
    run = train_policy(
        model, tokenizer, pinned_task(name, coin), pinned_row(name), updates_per_batch=2,
        **{**SETTINGS, "learning_rate": 1e-3},
    )  # fmt: skip
    for key, values in PINNED_ROWS[name].items():
        found = [metrics[key] for metrics in run.metrics]
        assert [v is None for v in found] == [v is None for v in values]  # value pretraining
        rest = [v for v in values if v is not None]
        assert run.curve(key)[1] == pytest.approx(rest, rel=1e-6, abs=1e-6), key


def test_the_loop_is_the_sum_of_its_parts(coin, make) -> None:
    """The first step by hand: sample, verify, advantages, loss, gradient, one AdamW update."""
    import random

    model, tokenizer = make()
    run = train_policy(model, tokenizer, coin, ROWS["grpo"], **{**SETTINGS, "steps": 1})
    hand, _ = make()
    rng = random.Random("GRPO coin/0")
    out = sample(
        hand,
        tokenizer,
        [coin.draw(rng) for _ in range(8)],
        group_size=4,
        max_new_tokens=coin.max_new_tokens,
        generator=torch.Generator().manual_seed(0),
    )
    rewards = [coin.verify(p, t) for p, t in zip(out.prompts, out.texts, strict=True)]
    advantages = compute_advantages(ROWS["grpo"], rewards, out.group_ids).advantages
    mask = out.response_mask
    logprobs = response_logprobs(hand, out.input_ids, out.attention_mask, mask.shape[1])
    loss, _ = compute_loss(ROWS["grpo"], logprobs, logprobs.detach(), advantages, mask)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
    optimizer = torch.optim.AdamW(
        hand.parameters(), SETTINGS["learning_rate"], betas=(0.9, 0.99), weight_decay=0
    )
    optimizer.step()
    (metrics,) = run.metrics
    assert metrics["reward"] == pytest.approx(sum(rewards) / 32)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert metrics["length"] == pytest.approx(float(out.lengths.float().mean()))
    assert metrics["truncated"] == pytest.approx(float(out.truncated.float().mean()))
    assert metrics["entropy"] == pytest.approx(float(out.entropy[mask].mean()), rel=1e-6)
    groups = torch.tensor(rewards).view(8, 4)
    equal = (groups == groups[:, :1]).all(1)
    assert metrics["frac_reward_zero_std"] == pytest.approx(float(equal.float().mean()))
    assert metrics["reward_std"] == pytest.approx(float(groups.std(1, correction=0).mean()))
    assert metrics["rows_used"] == 4 * int((~equal).sum())
    torch.testing.assert_close(weights(model), weights(hand), rtol=0, atol=1e-5)


def test_case_f01_loss_zero_and_gradient_not(coin, make) -> None:
    run = train_policy(*make(), coin, ROWS["grpo"], **{**SETTINGS, "steps": 1})
    assert run.metrics[0]["loss"] == pytest.approx(0, abs=1e-7)
    assert run.metrics[0]["grad_norm"] > 0.01


@pytest.mark.parametrize("updates", [1, 4])
def test_case_f05_when_the_clip_ratio_is_zero(updates: int, coin, make) -> None:
    model, tokenizer = make()
    before = weights(model)
    settings = {**SETTINGS, "learning_rate": 0.05, "steps": 3}
    run = train_policy(model, tokenizer, coin, ROWS["grpo"], **settings, updates_per_batch=updates)
    assert not torch.equal(before, weights(model))
    for metrics in run.metrics:
        rows = metrics.get("updates", [metrics])
        assert len(rows) == updates
        assert rows[0]["ratio_mean"] == 1.0  # exactly: the old log-probs are the new ones
        assert rows[0]["clip_ratio/region_mean"] == 0.0
        assert all(r["clip_ratio/region_mean"] > 0 for r in rows[1:])


@pytest.mark.parametrize("name", list(ROWS))
def test_skipping_rows_keeps_the_gradient(name: str, coin, make) -> None:
    """With and without the rows of advantage 0: the same run, to rounding, for less work."""
    runs, models = [], []
    for skip in (True, False):
        model, tokenizer = make(dtype="float64")
        settings = {**SETTINGS, "skip_zero_advantages": skip, "updates_per_batch": 2}
        runs.append(train_policy(model, tokenizer, coin, ROWS[name], **settings))
        models.append(model)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=0, atol=1e-9)
    for key in ("loss", "grad_norm", "reward"):
        assert runs[0].curve(key)[1] == pytest.approx(runs[1].curve(key)[1], rel=0, abs=1e-9)
    used = [run.curve("rows_used")[1] for run in runs]
    assert used[1] == [32] * 5
    # A KL term in the loss pushes every row, and the batch mean gives none exactly 0 by design.
    fewer = name not in ("grpo-paper", "reinforce", "rloo-paper")
    assert (sum(used[0]) < sum(used[1])) == fewer


def test_a_step_with_nothing_to_learn_still_decays_the_momentum(coin, make) -> None:
    """All rows skipped = all gradients zero: the optimizer's momentum moves the weights alike."""
    seen = {"n": 0}

    def then_never(problem: str, response: str) -> float:
        seen["n"] += 1
        return coin_flip(problem, response) if seen["n"] <= 64 else 0.0

    results = []
    for skip in (True, False):
        seen["n"] = 0
        model, tokenizer = make(dtype="float64")
        task = replace(coin, verify=then_never)
        settings = {**SETTINGS, "skip_zero_advantages": skip}
        run = train_policy(model, tokenizer, task, ROWS["grpo"], **settings)
        assert run.curve("rows_used")[1][2:] == ([0] * 3 if skip else [32] * 3)
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-9)


def test_no_reward_ever_moves_no_bit(coin, make) -> None:
    model, tokenizer = make()
    before = weights(model)
    task = replace(coin, verify=lambda problem, response: 0.0)
    run = train_policy(model, tokenizer, task, ROWS["grpo"], **SETTINGS)
    assert torch.equal(weights(model), before)
    assert run.curve("frac_reward_zero_std")[1] == [1.0] * 5
    assert run.curve("grad_norm")[1] == [0.0] * 5


@pytest.mark.parametrize("name", list(ROWS))
def test_micro_batches_add_up(name: str, coin, make) -> None:
    results = []
    for size in (None, 5):
        model, tokenizer = make(dtype="float64")
        run = train_policy(
            model, tokenizer, coin, ROWS[name], **SETTINGS, updates_per_batch=2,
            micro_batch_size=size,
        )  # fmt: skip
        results.append((weights(model), run.curve("loss")[1], run.curve("ratio_mean")[1]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-9)
    assert results[0][1] == pytest.approx(results[1][1], rel=0, abs=1e-9)
    assert results[0][2] == pytest.approx(results[1][2], rel=0, abs=1e-9)


def broken(problem: str, response: str) -> float:
    raise TypeError("no such\nmethod")


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize(
    ("verify", "why"),
    [
        (
            broken,
            "the last of 32 errors of the verifier: TypeError: no such (Run.errors, errors.jsonl)",
        ),
        (lambda problem, response: None, "the verifier abstained"),
    ],
    ids=["raises", "abstains"],
)
def test_a_step_without_any_reward_is_told_once(verify, why, progress, coin, make, capsys) -> None:
    """On a line of its own, also where a bar is shown, and at the first such step alone."""
    seen = {"n": 0}

    def later(problem: str, response: str) -> float | None:
        seen["n"] += 1
        return coin.verify(problem, response) if seen["n"] <= 63 else verify(problem, response)

    model, tokenizer = make()
    train_policy(
        model, tokenizer, replace(coin, verify=later), row("grpo"), steps=4, prompts_per_step=4,
        group_size=8, learning_rate=1e-3, seed=0, progress=progress, threads=1, device="cpu",
    )  # fmt: skip
    lines = re.split(r"[\r\n]+", capsys.readouterr().err)
    told = [line.strip() for line in lines if "has a reward" in line]
    assert told == [f"step 3: none of 32 responses has a reward; {why}"]


def test_missing_rewards_are_left_out_and_counted(coin, make) -> None:
    def abstains(problem: str, response: str) -> float | None:
        return None if len(response) == 8 else coin_flip(problem, response)

    model, tokenizer = make()
    run = train_policy(
        model, tokenizer, replace(coin, verify=abstains), ROWS["grpo"], **SETTINGS,
        skip_zero_advantages=False,
    )  # fmt: skip
    for metrics in run.metrics:
        assert 0 < metrics["missing_rewards"] < 32
        assert metrics["rows_used"] == 32 - metrics["missing_rewards"]
        assert metrics["verifier_errors"] == 0
        assert 0 <= metrics["reward"] <= 1
    assert len(run.errors) == sum(metrics["missing_rewards"] for metrics in run.metrics)
    assert {(error["error"], len(error["response"])) for error in run.errors} == {("abstained", 8)}
    assert math.isfinite(float(weights(model).sum()))


def test_all_rewards_missing(coin, make) -> None:
    model, tokenizer = make()
    before = weights(model)
    task = replace(coin, verify=lambda problem, response: None)
    run = train_policy(model, tokenizer, task, ROWS["grpo"], **SETTINGS)
    assert torch.equal(weights(model), before)
    assert run.metrics[0]["reward"] is None
    assert run.metrics[0]["missing_rewards"] == 32


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit("no more"), "SystemExit: no more"),
        (lambda: float("inf"), "ValueError: the verifier returned inf"),
        (lambda: "right", "ValueError: the verifier returned 'right'; wanted a number, or None"),
        (lambda: "1", "ValueError: the verifier returned '1'; wanted a number"),
        (lambda: {}, "ValueError: the verifier returned {}; wanted a number"),
        (lambda: torch.ones(2), "ValueError: the verifier returned a tensor of shape (2,)"),
        (lambda: 10**400, "ValueError: the verifier returned 1"),
        (lambda: -1e308, "ValueError: the verifier returned -1e+308"),
    ],
)
def test_a_verifier_that_fails_is_counted_and_named(bad, said: str, coin, make, tmp_path) -> None:
    def verify(problem: str, response: str) -> object:
        return bad() if len(response) == 8 else coin_flip(problem, response)

    task = replace(coin, verify=verify)
    settings = {**SETTINGS, "evaluate_every": 1, "evaluate_n": 32}
    run = train_policy(*make(), task, ROWS["grpo"], **settings, out=tmp_path / "run")
    assert run.finished
    assert len(run.evaluations) == len(run.metrics) + 1
    errors = [metrics["verifier_errors"] for metrics in run.metrics]
    assert min(errors) > 0
    assert errors == [metrics["missing_rewards"] for metrics in run.metrics]
    assert len(run.errors) == sum(errors)
    assert run.errors[0]["error"].startswith(said)
    assert len(run.errors[0]["response"]) == 8
    assert read_run(tmp_path / "run").errors == run.errors


def test_a_verifier_that_hangs_is_as_one_that_abstains(coin, make) -> None:
    """Counted and named; it neither stops the run nor poisons it."""
    hung: list[str] = []

    def hangs(problem: str, response: str) -> float | None:
        if not hung or problem + response == hung[0]:
            hung[:] = [problem + response]
            while True:
                pass
        return coin_flip(problem, response)

    def abstains(problem: str, response: str) -> float | None:
        return None if problem + response == hung[0] else coin_flip(problem, response)

    task = replace(coin, verify=hangs, verifier_timeout=0.5)
    run = train_policy(*make(), task, ROWS["grpo"], **SETTINGS)
    assert run.finished
    assert run.metrics[0]["verifier_timeouts"] >= 1
    assert run.metrics[0]["verifier_errors"] == 0
    assert run.metrics[0]["missing_rewards"] == run.metrics[0]["verifier_timeouts"]
    assert run.errors[0]["error"] == "VerifierTimeout: no verdict in 0.5 s"
    assert run.errors[0]["prompt"] + run.errors[0]["response"] == hung[0]
    other = train_policy(*make(), replace(coin, verify=abstains), ROWS["grpo"], **SETTINGS)
    for mine, theirs in zip(run.metrics, other.metrics, strict=True):
        assert {**mine, "verifier_timeouts": 0} == theirs


def test_a_reference_only_where_it_is_needed(coin, make, monkeypatch) -> None:
    copies = []

    class Copier:
        def deepcopy(self, model):
            copies.append(model)
            return copy.deepcopy(model)

    monkeypatch.setattr(adapters_module, "copy", Copier())
    for name in ("grpo", "rloo", "reinforce", "dr-grpo"):
        run = train_policy(*make(), coin, ROWS[name], **SETTINGS)
        assert "kl" not in run.metrics[0]
    assert not copies
    train_policy(*make(), coin, replace(GRPO, beta=0.0), **SETTINGS)
    assert not copies  # a KL term of weight 0 needs no reference
    for algorithm in (GRPO, RLOO):
        run = train_policy(*make(), coin, algorithm, **SETTINGS)
        assert run.metrics[0]["kl"] == pytest.approx(0, abs=1e-7)
        assert run.metrics[-1]["kl"] > 0
    assert len(copies) == 2


def test_measuring_the_kl_changes_nothing(coin, make) -> None:
    results = []
    for measure in (False, True):
        model, tokenizer = make()
        run = train_policy(model, tokenizer, coin, ROWS["grpo"], **SETTINGS, measure_kl=measure)
        results.append(weights(model))
    assert torch.equal(*results)
    assert run.metrics[-1]["kl"] > 0


def test_evaluating_changes_nothing(coin, make) -> None:
    results = []
    for every in (0, 2):
        model, tokenizer = make()
        run = train_policy(
            model, tokenizer, coin, ROWS["grpo"], **SETTINGS, evaluate_every=every, evaluate_n=16
        )
        results.append(weights(model))
    assert torch.equal(*results)
    assert [row["step"] for row in run.evaluations] == [0, 2, 4, 5]


def test_kl_holds_the_policy_back(coin, make) -> None:
    kl = {}
    for beta in (0.0, 5.0):
        run = train_policy(
            *make(), coin, row("grpo", beta=beta), **{**SETTINGS, "steps": 15}, measure_kl=True
        )
        kl[beta] = run.metrics[-1]["kl"]
    assert kl[5.0] < 0.3 * kl[0.0]


def test_nonfinite_stops_the_run_before_the_weights_move(coin, make, tmp_path, monkeypatch) -> None:
    true_loss = update_module.compute_loss
    calls = {"n": 0}

    def breaks(*arguments, **settings):
        calls["n"] += 1
        loss, stats = true_loss(*arguments, **settings)
        return (loss * math.nan if calls["n"] == 3 else loss), stats

    monkeypatch.setattr(update_module, "compute_loss", breaks)
    model, tokenizer = make()
    with pytest.raises(NonFiniteError, match="step 3: the loss is nan; the batch is in ") as caught:
        train_policy(model, tokenizer, coin, ROWS["grpo"], **SETTINGS, out=tmp_path / "run")
    # The same run stopped by hand after two steps has the same weights: the third did nothing.
    monkeypatch.undo()
    two, _ = make()

    def stop(problem: str, response: str) -> float:
        calls["n"] += 1
        if calls["n"] > 3 + 64:
            raise KeyboardInterrupt
        return coin.verify(problem, response) or 0.0

    train_policy(two, tokenizer, replace(coin, verify=stop), ROWS["grpo"], **SETTINGS)
    assert torch.equal(weights(model), weights(two))
    run = read_run(tmp_path / "run")
    assert len(run.metrics) == 2
    assert not run.finished
    assert not run.interrupted
    batch = torch.load(tmp_path / "run" / "nonfinite-step-3.pt", weights_only=True)
    assert batch["input_ids"].shape[0] == 32
    assert len(batch["texts"]) == len(batch["reward"]) == len(batch["advantages"]) == 32
    assert caught.value.batch["texts"] == batch["texts"]
    assert weights(model).isfinite().all()


def test_a_broken_model_is_refused(coin, make) -> None:
    model, tokenizer = make()
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="step 1: the policy's log-probs are not finite"):
        train_policy(model, tokenizer, coin, ROWS["grpo"], **SETTINGS)


def test_the_model_stays_in_eval_mode_and_dropout_off(coin, make) -> None:
    model, tokenizer = make(dropout=0.5)
    run = train_policy(model, tokenizer, coin, ROWS["grpo"], **SETTINGS)
    assert {metrics["ratio_mean"] for metrics in run.metrics} == {1.0}
    assert not model.training


def test_samples_are_recorded_with_reward_and_advantage(coin, make, tmp_path) -> None:
    run = train_policy(
        *make(), coin, ROWS["grpo"], **SETTINGS, samples_every=2, out=tmp_path / "run"
    )
    assert {row["step"] for row in run.samples} == {1, 3, 5}
    assert len(run.samples) == 3 * 2 * 4
    for row_ in run.samples:
        assert row_["reward"] == coin_flip("", row_["response"])
    for first in range(0, 24, 4):
        group = run.samples[first : first + 4]
        assert len({row_["prompt"] for row_ in group}) == 1
        assert sum(row_["advantage"] for row_ in group) == pytest.approx(0, abs=1e-6)
    assert read_run(tmp_path / "run").samples == run.samples


def test_progress_bar_is_text_on_stderr(coin, make, capfd) -> None:
    train_policy(*make(), coin, ROWS["grpo"], **{**SETTINGS, "progress": True}, measure_kl=True)
    seen = capfd.readouterr()
    assert seen.out == ""
    last = seen.err.split("\r")[-1]
    assert "GRPO coin: 100%" in last
    assert "5/5 [" in last
    for name in ("reward=", "KL=", "entropy="):
        assert name in last


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: found 0; wanted a whole number of at least 1"),
        ({"steps": 2.5}, "steps: found 2.5"),
        ({"prompts_per_step": 0}, "prompts_per_step: found 0"),
        ({"group_size": 1}, "group_size: found 1; wanted a whole number of at least 2"),
        ({"learning_rate": 0}, "learning_rate: found 0; wanted a finite number above 0"),
        ({"learning_rate": 1e38}, r"learning_rate: found 1e\+38; wanted at most 1e30"),
        ({"learning_rate": math.nan}, "learning_rate: found nan"),
        ({"learning_rate": "big"}, "learning_rate: found 'big'"),
        ({"final_learning_rate": -0.1}, "final_learning_rate: found -0.1; wanted 0 to 1"),
        ({"max_grad_norm": -1}, "max_grad_norm: found -1"),
        ({"temperature": 0}, "temperature: found 0"),
        ({"updates_per_batch": 0}, "updates_per_batch: found 0"),
        ({"micro_batch_size": 0}, "micro_batch_size: found 0"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": None}, "seed: found None"),
        ({"seed": 2**70}, r"seed: found \d+; wanted a whole number below 2\*\*63"),
        ({"evaluate_every": -1}, "evaluate_every: found -1"),
        ({"evaluate_n": 0}, "evaluate_n: found 0"),
        ({"checkpoint_every": -1}, "checkpoint_every: found -1"),
        ({"samples_every": 0.5}, "samples_every: found 0.5"),
        ({"threads": 0}, "threads: found 0"),
        ({"threads": 10**5}, "threads: found 100000; wanted at most 1,024"),
        ({"prompts_per_step": 10**20}, "prompts_per_step: found 1.*; wanted at most 2,147,483,647"),
        ({"advantage_function": 3}, "advantage_function: found 3; wanted a function or None"),
        ({"device": "tpu"}, "device: "),
        ({"resume": True}, "resume: needs out"),
    ],
)
def test_bad_input(change: dict, message: str, coin, make) -> None:
    model, tokenizer = make()
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        train_policy(model, tokenizer, coin, ROWS["grpo"], **{**SETTINGS, **change})
    assert torch.equal(weights(model), before)


def test_an_algorithm_is_a_row(coin, make) -> None:
    with pytest.raises(ValueError, match="algorithm: found 'grpo'; wanted an Algorithm"):
        train_policy(*make(), coin, "grpo", **SETTINGS)


def test_longer_than_the_model_is_an_error(coin, make) -> None:
    with pytest.raises(ValueError, match="15 tokens together; the model has 9 positions"):
        train_policy(*make(max_length=9), coin, ROWS["grpo"], **SETTINGS)


def test_a_folder_with_a_run_is_not_overwritten(coin, make, tmp_path) -> None:
    train_policy(*make(), coin, ROWS["grpo"], **SETTINGS, out=tmp_path)
    with pytest.raises(ValueError, match=r"already holds a run; resume=True \(--resume\) goes on"):
        train_policy(*make(), coin, ROWS["grpo"], **SETTINGS, out=tmp_path)


def test_rows_of_the_recipes() -> None:
    assert row("grpo").beta == 0
    assert row("grpo").kl == "none"
    assert row("grpo", beta=None) == GRPO
    assert row(REINFORCE) == REINFORCE
    assert row(DR_GRPO) == DR_GRPO
    assert row("grpo", beta=0.1).beta == 0.1
    with pytest.raises(ValueError, match="beta"):
        row("reinforce", beta=0.1)


def test_rows_of_the_recipes_with_another_reward_or_lambda() -> None:
    """Each choice is in the row, and so in the record."""
    assert row("ppo", beta=None) == PPO
    assert row("ppo", reward="verifier", beta=None) == replace(PPO, reward="verifier")
    assert row("grpo", reward="several", beta=None) == replace(GRPO, reward="several")
    assert row("vapo") == replace(VAPO, length_alpha=0.5)
    assert row("vapo", length_alpha=None) == VAPO
    assert row("vapo", length_alpha=0.1).length_alpha == 0.1
    assert row("ppo", beta=None, length_alpha=0.1) == PPO  # its lambda does not follow the length
    with pytest.raises(ValueError, match="reward must be several"):
        row("gdpo", reward="verifier")
    with pytest.raises(ValueError, match="reward must be one of"):
        row("grpo", reward="praise")
