"""The critic in the loop: PPO and VAPO by hand, stopped and gone on, and what is refused."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import pytest
import torch

from rlcore.algorithms import GRPO, PPO, VAPO, Algorithm
from rlcore.models import build_scalar_model, response_values
from rlcore.models import token_values as true_values
from rlcore.objectives import entropy, last_token_values, token_logprobs
from rlcore.sampling import response_logits, response_logprobs, sample
from rlcore.tasks import Task
from rlcore.training import NonFiniteError, row, train_policy
from rlcore.training import critic as critic_module
from rlcore.training import loop as loop_module
from rlcore.training import step as step_module

SETTINGS = {
    "steps": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "learning_rate": 1e-2,
    "seed": 0,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}
VERIFIED = replace(PPO, reward="verifier")
STRONG_KL = replace(VERIFIED, beta=0.5)  # the KL per token in the reward is then plain to see
ROWS = {
    "ppo": VERIFIED,
    "ppo-kl": STRONG_KL,
    "vapo": VAPO,
    "vapo-long": replace(VAPO, length_alpha=0.5, epsilon_value=0.1),
    "ppo-entropy": replace(VERIFIED, entropy_coef=0.05, overlong="filter", lam_critic=1.0),
}


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def noisy_critic(model, seed: int = 5):
    """One whose values are not all 0."""
    return build_scalar_model(model, seed=seed, std=0.3)


def by_hand(
    task: Task, algorithm: Algorithm, model, critic, tokenizer, *,
    steps: int, updates: int = 1, bootstrap: bool = False, pretraining: int = 0,
) -> list[dict[str, float]]:  # fmt: skip
    """The whole of it, written out: no function of rlcore's stages, GAE slot by slot."""
    reference = copy.deepcopy(model)
    rng = random.Random(f"{algorithm.title} {task.name}/0")
    generator = torch.Generator().manual_seed(0)
    adam = {"betas": (0.9, 0.99), "weight_decay": 0}
    policy_step = torch.optim.AdamW(model.parameters(), 1e-2, **adam)
    critic_step = torch.optim.AdamW(critic.parameters(), 1e-2, **adam)
    found = []
    for step in range(steps):
        for optimizer in (policy_step, critic_step):
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - 0.9 * step / steps)
        out = sample(
            model, tokenizer, [task.draw(rng) for _ in range(4)], group_size=4,
            max_new_tokens=task.max_new_tokens, generator=generator,
        )  # fmt: skip
        ids, attention, mask = out.input_ids, out.attention_mask, out.response_mask
        width = mask.shape[1]
        reward = [task.verify(p, t) for p, t in zip(out.prompts, out.texts, strict=True)]
        with torch.no_grad():
            old_values = response_values(critic, ids, attention, width)
            after = last_token_values(true_values(critic, ids, attention), attention)
            start = response_logprobs(reference, ids, attention, width)
        advantages, returns = torch.zeros(16, width).double(), torch.zeros(16, width).double()
        for i, length in enumerate(out.lengths.tolist()):
            lam = algorithm.lam
            if algorithm.length_alpha:
                lam = min(max(1 - 1 / (algorithm.length_alpha * length), 0), 1)
            targets = 1.0 if pretraining > step else algorithm.lam_critic
            targets = lam if targets is None else targets
            for table, decay in ((advantages, lam), (returns, targets)):
                following = float(after[i]) if bootstrap and out.truncated[i] else 0.0
                carried = 0.0
                for t in reversed(range(length)):
                    r = reward[i] if t == length - 1 else 0.0
                    if algorithm.kl == "reward":
                        r -= algorithm.beta * float(out.logprobs[i, t] - start[i, t])
                    carried = r + following - float(old_values[i, t]) + decay * carried
                    table[i, t] = carried
                    following = float(old_values[i, t])
            returns[i, :length] += old_values[i, :length]
        counted = mask & ~out.truncated[:, None] if algorithm.overlong == "filter" else mask
        if algorithm.whiten:
            spread = advantages[mask] - advantages[mask].mean()
            advantages[mask] = spread / (spread.square().sum() / (len(spread) - 1) + 1e-8).sqrt()
        right = counted & (torch.tensor(reward) == 1)[:, None]
        old = None
        for _ in range(updates):
            logits = response_logits(model, ids, attention, width)
            logprobs = token_logprobs(logits, ids[:, -logits.shape[1] :])
            old = logprobs.detach() if old is None else old
            ratio = (logprobs - old).exp()
            near = ratio.clamp(1 - algorithm.epsilon_low, 1 + algorithm.epsilon_high)
            loss = -torch.minimum(ratio * advantages, near * advantages)[counted].mean()
            loss = loss - algorithm.nll_coef * logprobs[right].mean()
            loss = loss - algorithm.entropy_coef * entropy(logits[:, :-1])[counted].mean()
            values = response_values(critic, ids, attention, width)
            error = (values - returns).square()
            if algorithm.epsilon_value is not None:
                eps = algorithm.epsilon_value
                held = values.clamp(old_values - eps, old_values + eps)
                error = torch.maximum(error, (held - returns).square())
            value_loss = error[counted].mean() / 2
            norms = {}
            for name, module, optimizer, part in (
                ("grad_norm", model, policy_step, loss),
                ("val/grad_norm", critic, critic_step, algorithm.value_coef * value_loss),
            ):
                if pretraining > step and module is model:
                    continue
                optimizer.zero_grad()
                part.backward()
                norms[name] = float(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0))
                optimizer.step()
            found.append({"loss": loss.item(), "val/loss": value_loss.item(), **norms})
    return found


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("name", list(ROWS))
def test_steps_by_hand(name: str, bootstrap: bool, updates: int, coin, make) -> None:
    """Two steps (from the second one on the KL to the start is not 0), one or three updates each.

    The coin's random model is cut off in many responses, so bootstrapping makes a difference.
    """
    algorithm = ROWS[name]
    model, tokenizer = make(dtype="float64")
    critic = noisy_critic(model)
    hand, hand_critic = make(dtype="float64")[0], noisy_critic(model)
    wanted = by_hand(
        coin, algorithm, hand, hand_critic, tokenizer, steps=2, updates=updates,
        bootstrap=bootstrap, pretraining=0,
    )  # fmt: skip
    run = train_policy(
        model, tokenizer, coin, algorithm, **{**SETTINGS, "steps": 2}, critic=critic,
        updates_per_batch=updates, bootstrap_truncated=bootstrap, value_pretraining_steps=0,
        critic_learning_rate=1e-2,
    )  # fmt: skip
    ours = [u for metrics in run.metrics for u in metrics.get("updates", [metrics])]
    assert len(ours) == len(wanted) == 2 * updates
    for step, (a, b) in enumerate(zip(ours, wanted, strict=True)):
        for key, value in b.items():
            assert a[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, key)
    torch.testing.assert_close(weights(model), weights(hand), rtol=0, atol=2e-4)
    torch.testing.assert_close(weights(critic), weights(hand_critic), rtol=0, atol=2e-4)
    assert any(metrics["truncated"] > 0 for metrics in run.metrics)


def test_bootstrapping_is_a_choice_that_matters(coin, make) -> None:
    results = []
    for bootstrap in (False, True):
        model, tokenizer = make()
        run = train_policy(
            model, tokenizer, coin, VERIFIED, **SETTINGS, critic=noisy_critic(model),
            bootstrap_truncated=bootstrap,
        )  # fmt: skip
        assert run.settings["bootstrap_truncated"] is bootstrap
        results.append(weights(model))
    assert not torch.equal(*results)


@pytest.mark.parametrize("name", list(ROWS))
def test_parts_add_up(name: str, coin, make) -> None:
    """In one piece (the first update from the sampling time's forward pass) and in parts of 5."""
    results = []
    for size in (None, 5):
        model, tokenizer = make(dtype="float64")
        critic = noisy_critic(model)
        run = train_policy(
            model, tokenizer, coin, ROWS[name], **SETTINGS, critic=critic, updates_per_batch=2,
            micro_batch_size=size,
        )  # fmt: skip
        stats = [run.curve(f"val/{key}")[1] for key in ("loss", "grad_norm", "vf_clipfrac",
                 "explained_variance", "vpred_mean", "return_mean")]  # fmt: skip
        results.append((weights(model), weights(critic), stats))
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-4)  # the values are float32
    for a, b in zip(results[0][2], results[1][2], strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("updates", [1, 3])
def test_no_forward_pass_is_repeated(updates: int, coin, make, monkeypatch) -> None:
    calls = []

    def counted(model, ids, mask):
        calls.append(len(ids))
        return true_values(model, ids, mask)

    monkeypatch.setattr(critic_module, "token_values", counted)
    train_policy(*make(), coin, VERIFIED, **SETTINGS, updates_per_batch=updates)
    assert calls == [16] * updates * 4


def test_the_critic_of_the_start(coin, make) -> None:
    """A copy of the policy whose values are all 0: the reward is then the advantage."""
    run = train_policy(*make(), coin, replace(VERIFIED, whiten=False, lam=1.0, beta=0.0, kl="none"),
                       **{**SETTINGS, "steps": 1}, samples_every=1)  # fmt: skip
    assert {value for line in run.samples for value in line["values"]} == {0.0}
    for line in run.samples:
        assert set(line["advantages"]) == {line["reward"]} == {line["advantage"]}
        assert 1 <= len(line["advantages"]) == len(line["values"]) <= coin.max_new_tokens
    assert run.metrics[0]["val/explained_variance"] == 0.0
    assert run.metrics[0]["val/vpred_mean"] == 0.0


def test_a_critic_of_the_caller_is_used_as_is(coin, make) -> None:
    model, tokenizer = make()
    critic = noisy_critic(model)
    before = weights(critic)
    run = train_policy(model, tokenizer, coin, VERIFIED, **SETTINGS, critic=critic)
    assert run.settings["critic"] == "given"
    assert not torch.equal(weights(critic), before)
    shared = {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in critic.parameters()
    }
    assert not shared


def test_the_critics_learning_rate_is_its_own_and_falls(coin, make, monkeypatch) -> None:
    rates = []
    true_step = critic_module.Critic.step

    def step(critic, batch) -> None:
        rates.append(critic.optimizer.param_groups[0]["lr"])
        true_step(critic, batch)

    monkeypatch.setattr(critic_module.Critic, "step", step)
    run = train_policy(*make(), coin, VERIFIED, **SETTINGS, critic_learning_rate=4e-3)
    assert rates == pytest.approx([4e-3 * (1 - 0.9 * step / 4) for step in range(4)])
    assert run.curve("learning_rate")[1] == pytest.approx([2.5 * rate for rate in rates])
    assert run.settings["critic_learning_rate"] == 4e-3


def test_missing_rewards_move_neither(coin, make) -> None:
    def abstains(problem: str, response: str) -> float | None:
        return None if len(response) == 8 else coin.verify(problem, response)

    run = train_policy(*make(), replace(coin, verify=abstains), VERIFIED, **SETTINGS)
    assert all(m["rows_used"] == 16 - m["missing_rewards"] < 16 for m in run.metrics)
    model, tokenizer = make()
    critic = noisy_critic(model)
    before = weights(model), weights(critic)
    nothing = replace(coin, verify=lambda problem, response: None)
    run = train_policy(model, tokenizer, nothing, VERIFIED, **SETTINGS, critic=critic)
    assert run.curve("rows_used")[1] == [0] * 4
    assert torch.equal(weights(model), before[0])
    assert torch.equal(weights(critic), before[1])


# Value pretraining.


@pytest.mark.parametrize("algorithm", [VERIFIED, VAPO], ids=["ppo", "vapo"])
def test_pretraining_fits_the_critic_alone_to_whole_returns(algorithm, coin, make) -> None:
    model, tokenizer = make(dtype="float64")
    critic, before = noisy_critic(model), weights(model)
    plain = replace(algorithm, kl="none", beta=0.0)
    hand, hand_critic = make(dtype="float64")[0], noisy_critic(model)
    wanted = by_hand(coin, plain, hand, hand_critic, tokenizer, steps=3, pretraining=2)

    def at_the_third(problem: str, response: str) -> float:
        seen.append(weights(model))
        return coin.verify(problem, response)

    seen: list[torch.Tensor] = []
    run = train_policy(
        model, tokenizer, replace(coin, verify=at_the_third), plain, **{**SETTINGS, "steps": 3},
        critic=critic, value_pretraining_steps=2, critic_learning_rate=1e-2,
    )  # fmt: skip
    assert len(seen) == 3 * 16
    assert all(torch.equal(one, before) for one in seen)
    assert not torch.equal(weights(model), before)
    assert [metrics["loss"] is None for metrics in run.metrics] == [True, True, False]
    assert [metrics["rows_used"] for metrics in run.metrics] == [0, 0, 16]
    for metrics, step in zip(run.metrics, wanted, strict=True):
        assert metrics["val/loss"] == pytest.approx(step["val/loss"], rel=1e-4)
    torch.testing.assert_close(weights(model), weights(hand), rtol=0, atol=2e-4)


def test_how_many_steps_of_pretraining(coin, make) -> None:
    for algorithm, given, steps in (
        (VAPO, None, 1),
        (VERIFIED, None, 0),
        (VAPO, 0, 0),
        (VAPO, 3, 3),
    ):
        run = train_policy(*make(), coin, algorithm, **SETTINGS, value_pretraining_steps=given)
        assert run.settings["value_pretraining_steps"] == steps
        assert sum(metrics["loss"] is None for metrics in run.metrics) == steps
    assert critic_module.critic_settings(VAPO, 120, 1.0, None, False, None) == {
        "critic_learning_rate": 2.0, "bootstrap_truncated": False, "value_pretraining_steps": 12,
    }  # fmt: skip


# Learning.


def test_the_critic_learns_what_there_is_to_know(coin, make) -> None:
    """A reward that the prompt decides: the policy cannot change it, the critic can know it."""
    task = replace(coin, verify=lambda problem, _: float(sum(map(int, problem[:6])) >= 27))
    settings = {**SETTINGS, "steps": 60, "prompts_per_step": 16, "learning_rate": 1e-6}
    run = train_policy(*make(), task, VERIFIED, **settings, critic_learning_rate=1e-2)
    explained = run.curve("val/explained_variance")[1]
    assert explained[0] == 0.0
    assert sum(explained[-10:]) / 10 > 0.5
    assert run.metrics[-1]["val/loss"] < 0.3 * run.metrics[0]["val/loss"]


@pytest.mark.parametrize("name", ["ppo", "vapo-long"])
def test_the_policy_learns(name: str, coin, make) -> None:
    """A toy: begin with 0. A random model does so one time in a dozen."""
    task = replace(coin, verify=lambda problem, response: float(response[:1] == "0"))
    settings = {**SETTINGS, "steps": 40, "prompts_per_step": 8}
    run = train_policy(*make(), task, ROWS[name], **settings, updates_per_batch=2)
    rewards = run.curve("reward")[1]
    assert sum(rewards[:4]) / 4 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.8


# Stopped and gone on.


def stopping_after(task: Task, rewards: int) -> Task:
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float:
        seen["n"] += 1
        if seen["n"] > rewards:
            raise KeyboardInterrupt
        return task.verify(problem, response)

    return replace(task, verify=verify)


@pytest.mark.parametrize("stop", [1, 3])  # in the step after: of pretraining, and of the policy
@pytest.mark.parametrize("forgotten", ["nothing", "critic", "critic_optimizer"])
def test_resuming_needs_the_critic_and_its_optimizer(
    forgotten: str, stop: int, coin, make, tmp_path, monkeypatch
) -> None:
    settings = {**SETTINGS, "steps": 6, "checkpoint_every": 1, "value_pretraining_steps": 2,
                "updates_per_batch": 2}  # fmt: skip
    algorithm = replace(STRONG_KL, value_coef=1.0)
    model, tokenizer = make()
    whole = train_policy(model, tokenizer, coin, algorithm, **settings, out=tmp_path / "whole")
    stopped = stopping_after(coin, stop * 16 + 5)
    run = train_policy(*make(), stopped, algorithm, **settings, out=tmp_path / "parts")
    assert (run.interrupted, len(run.metrics)) == (True, stop)
    true_read = loop_module.read_checkpoint

    def read(path, given):
        state = true_read(path, given)
        if forgotten == "critic":
            state["critic"] = build_scalar_model(make()[0], seed=0, std=0.0).state_dict()
        if forgotten == "critic_optimizer":
            state["critic_optimizer"]["state"] = {}
        return state

    monkeypatch.setattr(loop_module, "read_checkpoint", read)
    other, _ = make()
    rest = train_policy(
        other, tokenizer, coin, algorithm, **settings, out=tmp_path / "parts", resume=True
    )
    same = forgotten == "nothing"
    assert (rest.metrics == whole.metrics) == same
    assert torch.equal(weights(other), weights(model)) == same
    if same:
        states = [torch.load(tmp_path / n / "checkpoint.pt", weights_only=True)
                  for n in ("whole", "parts")]  # fmt: skip
        for name in ("critic", "model", "reference"):
            for key, value in states[0][name].items():
                assert torch.equal(value, states[1][name][key]), (name, key)


def test_a_given_critic_may_be_the_trained_one_or_a_new_one(coin, make, tmp_path) -> None:
    """On resuming the checkpoint's weights are put into whatever critic is given."""
    model, tokenizer = make()
    settings = {**SETTINGS, "checkpoint_every": 1}
    critic = noisy_critic(model)
    whole = train_policy(model, tokenizer, coin, VERIFIED, **settings, critic=critic)
    for used_again in (True, False):
        other, _ = make()
        own, out = noisy_critic(other), tmp_path / str(used_again)
        stopped = stopping_after(coin, 2 * 16 + 5)
        train_policy(other, tokenizer, stopped, VERIFIED, **settings, critic=own, out=out)
        given = own if used_again else noisy_critic(make()[0])
        rest = train_policy(
            make()[0], tokenizer, coin, VERIFIED, **settings, critic=given, out=out, resume=True
        )
        assert rest.metrics == whole.metrics
        assert torch.equal(weights(given), weights(critic))


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_between_the_two_updates_keeps_the_last_checkpoint(
    when: str, coin, make, tmp_path, monkeypatch
) -> None:
    """The policy has moved and the critic has not (or both, and the step is not done)."""
    settings = {**SETTINGS, "checkpoint_every": 1}
    whole = train_policy(*make(), coin, VERIFIED, **settings)
    true_step = critic_module.Critic.step
    calls = {"n": 0}

    def step(critic, batch) -> None:
        calls["n"] += 1
        if when == "after":
            true_step(critic, batch)
        if calls["n"] == 3:
            raise KeyboardInterrupt
        if when == "before":
            true_step(critic, batch)

    monkeypatch.setattr(critic_module.Critic, "step", step)
    run = train_policy(*make(), coin, VERIFIED, **settings, out=tmp_path)
    assert (run.interrupted, len(run.metrics)) == (True, 2)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2
    monkeypatch.undo()
    rest = train_policy(*make(), coin, VERIFIED, **settings, out=tmp_path, resume=True)
    assert rest.metrics == whole.metrics


def test_an_interrupt_in_pretraining_keeps_the_last_checkpoint(
    coin, make, tmp_path, monkeypatch
) -> None:
    """Only the critic has moved: that is enough for the boundary to be gone."""
    settings = {**SETTINGS, "checkpoint_every": 1, "updates_per_batch": 2,
                "value_pretraining_steps": 3}  # fmt: skip
    whole = train_policy(*make(), coin, VAPO, **settings)
    true_gradient = critic_module.Critic.gradient
    calls = {"n": 0}

    def gradient(critic, batch):
        calls["n"] += 1
        if calls["n"] == 4:  # the second update of step 2
            raise KeyboardInterrupt
        return true_gradient(critic, batch)

    monkeypatch.setattr(critic_module.Critic, "gradient", gradient)
    run = train_policy(*make(), coin, VAPO, **settings, out=tmp_path)
    assert (run.interrupted, len(run.metrics)) == (True, 1)
    monkeypatch.undo()
    rest = train_policy(*make(), coin, VAPO, **settings, out=tmp_path, resume=True)
    assert rest.metrics == whole.metrics


# What is refused, and what stops a run.


def test_a_broken_critic_stops_the_run_before_anything_moves(coin, make, tmp_path) -> None:
    model, tokenizer = make()
    before, critic = weights(model), noisy_critic(model)
    with torch.no_grad():
        critic.score.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="step 1: the critic's values are not finite"):
        train_policy(
            model, tokenizer, coin, VERIFIED, **SETTINGS, critic=critic, out=tmp_path / "run"
        )
    assert torch.equal(weights(model), before)
    saved = torch.load(tmp_path / "run" / "nonfinite-step-1.pt", weights_only=True)
    assert len(saved["texts"]) == 16


@pytest.mark.parametrize("whose", ["critic", "policy"])
def test_where_one_gradient_is_not_finite_neither_moves(whose, coin, make, monkeypatch) -> None:
    model, tokenizer = make()
    critic = noisy_critic(model)
    before = weights(model), weights(critic)
    if whose == "critic":
        true_loss = critic_module.value_loss

        def broken(*arguments, **settings):
            loss, stats = true_loss(*arguments, **settings)
            return loss * math.nan, stats

        monkeypatch.setattr(critic_module, "value_loss", broken)
        said = "the critic's loss is nan"
    else:

        def stops(*arguments, **settings):
            raise NonFiniteError("the loss is nan", {})

        monkeypatch.setattr(step_module, "update_policy", stops)
        said = "step 1: the loss is nan"
    with pytest.raises(NonFiniteError, match=said):
        train_policy(model, tokenizer, coin, VERIFIED, **SETTINGS, critic=critic)
    assert torch.equal(weights(model), before[0])
    assert torch.equal(weights(critic), before[1])


@pytest.mark.parametrize(
    ("algorithm", "change", "message"),
    [
        (PPO, {}, 'reward_model: ppo asks a reward model, found None; .*reward="verifier"'),
        (VERIFIED, {"critic_learning_rate": 0.0}, "critic_learning_rate: found 0.0"),
        (VERIFIED, {"critic_learning_rate": "fast"}, "critic_learning_rate: found 'fast'"),
        (VERIFIED, {"bootstrap_truncated": 1}, "bootstrap_truncated: found 1; wanted True or"),
        (VERIFIED, {"value_pretraining_steps": -1}, "value_pretraining_steps: found -1"),
        (VERIFIED, {"value_pretraining_steps": 4}, "found 4; wanted fewer than steps, 4"),
        (VERIFIED, {"advantage_function": lambda r, g: r}, "advantage_function: ppo has a critic"),
        (GRPO, {"critic": "one"}, 'critic: grpo has none \\(advantage="group_zscore"\\)'),
        (GRPO, {"critic_learning_rate": 1.0}, "critic_learning_rate: grpo has no critic"),
        (GRPO, {"bootstrap_truncated": True}, "bootstrap_truncated: grpo has no critic"),
        (GRPO, {"value_pretraining_steps": 0}, "value_pretraining_steps: grpo has no critic"),
    ],
)
def test_bad_input(algorithm, change: dict, message: str, coin, make, tmp_path) -> None:
    model, tokenizer = make()
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        train_policy(model, tokenizer, coin, algorithm, **SETTINGS, **change, out=tmp_path / "run")
    assert torch.equal(weights(model), before)
    assert not (tmp_path / "run").exists()


def test_a_critic_without_a_scalar_head_is_refused(coin, make, tmp_path) -> None:
    model, tokenizer = make()
    with pytest.raises(ValueError, match=r"critic: .*wanted one number without bias"):
        train_policy(
            model, tokenizer, coin, VERIFIED, **SETTINGS, critic=make()[0], out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_rows_without_a_critic_record_none(coin, make) -> None:
    run = train_policy(*make(), coin, row("grpo"), **SETTINGS)
    assert not {name for name in run.metrics[0] if name.startswith("val/")}
    assert not {"critic", "critic_learning_rate", "value_pretraining_steps"} & set(run.settings)
