"""Where the reward comes from: several rewards (GDPO), and a reward model."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from rlcore.algorithms import DAPO, GDPO, GRPO, PPO, SCST, VAPO
from rlcore.models import (
    build_model,
    build_scalar_model,
    build_tokenizer,
    response_rewards,
    response_values,
)
from rlcore.objectives import decoupled_advantages
from rlcore.sampling import response_logprobs, sample
from rlcore.tasks import Task
from rlcore.training import NonFiniteError, train_policy
from rlcore.training.judge import ScoreScale, fingerprint

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
PLAIN = replace(GRPO, kl="none", beta=0.0)
SUMMED = replace(PLAIN, reward="several")
SCORED = replace(PLAIN, reward="reward_model")
NAMES = ("even", "low", "short")


def parts(problem: str, response: str) -> dict[str, float | None]:
    """Three things that a random model does now and then, on scales of their own."""
    return {
        "even": float(sum(map(ord, response)) % 2 == 0),
        "low": 2.0 * sum(c in "01234" for c in response),
        "short": 0.1 * float(len(response) < 8),
    }


@pytest.fixture
def three(coin) -> Task:
    return replace(coin, rewards=parts, reward_names=NAMES)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def first_batch(task: Task, title: str, model, tokenizer):
    rng = random.Random(f"{title} {task.name}/0")
    return sample(
        model, tokenizer, [task.draw(rng) for _ in range(4)], group_size=4,
        max_new_tokens=task.max_new_tokens, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def judge_model(model, seed: int = 3):
    return build_scalar_model(model, seed=seed)


# Several rewards.


@pytest.mark.parametrize("weigh", [None, {"even": 2.0, "low": 1.0, "short": 0.5}])
def test_gdpo_by_hand(weigh, three, make) -> None:
    model, tokenizer = make(dtype="float64")
    run = train_policy(
        model, tokenizer, three, GDPO, **{**SETTINGS, "steps": 1}, reward_weights=weigh,
        samples_every=1,
    )  # fmt: skip
    hand, _ = make(dtype="float64")
    out = first_batch(three, "GDPO", hand, tokenizer)
    rows = [parts(p, t) for p, t in zip(out.prompts, out.texts, strict=True)]
    table = torch.tensor([[r[name] for name in NAMES] for r in rows], dtype=torch.float64)
    w = torch.tensor([1.0, 1.0, 1.0] if weigh is None else [2.0, 1.0, 0.5], dtype=torch.float64)
    total = torch.zeros(16, dtype=torch.float64)
    for k in range(3):
        for first in range(0, 16, 4):
            group = table[first : first + 4, k]
            if group.std() > 0:
                total[first : first + 4] += w[k] * (group - group.mean()) / group.std()
    advantages = total / (total.std() + 1e-4)
    mask = out.response_mask
    logprobs = response_logprobs(hand, out.input_ids, out.attention_mask, mask.shape[1])
    gain = torch.where(mask, (logprobs - logprobs.detach()).exp() * advantages[:, None], 0.0)
    loss = -(gain.sum(1) / mask.sum(1)).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
    (metrics,) = run.metrics
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-9)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-8)
    assert metrics["advantage_max"] == pytest.approx(float(advantages.max()))
    assert metrics["reward"] == pytest.approx(float((table @ w).mean()))
    right = [three.verify(p, t) for p, t in zip(out.prompts, out.texts, strict=True)]
    assert metrics["accuracy"] == pytest.approx(sum(right) / 16)
    for k, name in enumerate(NAMES):
        assert metrics[f"rewards/{name}/mean"] == pytest.approx(float(table[:, k].mean()))
        assert metrics[f"rewards/{name}/std"] == pytest.approx(float(table[:, k].std(correction=0)))
        assert metrics[f"rewards/{name}/missing"] == 0
    for line, r, a in zip(run.samples, rows, advantages, strict=False):
        assert line["rewards"] == r
        assert line["advantage"] == pytest.approx(float(a))
        assert line["true_reward"] == three.verify("", line["response"])
    assert run.settings["reward_weights"] == weigh


@pytest.mark.parametrize("algorithm", [GDPO, SUMMED], ids=["apart", "sum"])
def test_parts_of_a_batch_add_up(algorithm, three, make) -> None:
    results = []
    for size in (None, 5):
        model, tokenizer = make(dtype="float64")
        run = train_policy(
            model, tokenizer, three, algorithm, **SETTINGS, updates_per_batch=2,
            micro_batch_size=size,
        )  # fmt: skip
        results.append((weights(model), run.curve("loss")[1]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-9)
    assert results[0][1] == pytest.approx(results[1][1], rel=0, abs=1e-9)


def test_a_missing_part_is_left_out_and_counted(three, make) -> None:
    """One part missing: the others still count. All of them: the row takes no part."""

    def rewards(problem: str, response: str) -> dict[str, float | None]:
        found = parts(problem, response)
        if len(response) == 8:
            found["low"] = None
        return dict.fromkeys(NAMES) if len(response) == 6 else found

    task = replace(three, rewards=rewards)
    model, tokenizer = make()
    run = train_policy(model, tokenizer, task, GDPO, **{**SETTINGS, "steps": 1}, samples_every=1)
    hand, _ = make()
    out = first_batch(three, "GDPO", hand, tokenizer)
    rows = [rewards(p, t) for p, t in zip(out.prompts, out.texts, strict=True)]
    lengths = [len(t) for t in out.texts]
    (metrics,) = run.metrics
    assert metrics["missing_rewards"] == lengths.count(6) > 0
    assert metrics["rewards/low/missing"] == lengths.count(6) + lengths.count(8) > lengths.count(6)
    assert metrics["rewards/even/missing"] == lengths.count(6)
    table = [[math.nan if r[name] is None else r[name] for name in NAMES] for r in rows]
    advantages = decoupled_advantages(table, out.group_ids)
    assert metrics["advantage_min"] == pytest.approx(float(advantages.min()))
    sums = [sum(v for v in r.values() if v is not None) for r in rows if r["even"] is not None]
    assert metrics["reward"] == pytest.approx(sum(sums) / len(sums))
    assert metrics["verifier_errors"] == 0


def test_rewards_that_raise_are_named(three, make) -> None:
    def rewards(problem: str, response: str) -> dict[str, float]:
        return {"even": 1 / 0} if len(response) == 8 else parts(problem, response)

    run = train_policy(*make(), replace(three, rewards=rewards), GDPO, **SETTINGS)
    assert run.finished
    for metrics in run.metrics:
        assert metrics["verifier_errors"] == metrics["missing_rewards"]
    assert run.errors[0]["error"] == "ZeroDivisionError: division by zero"


def test_the_sum_of_several_is_a_row_too(three, make) -> None:
    """GRPO on the sum: the same bits as GRPO on a task whose verifier returns the sum."""
    model, tokenizer = make()
    run = train_policy(model, tokenizer, three, SUMMED, **SETTINGS)
    other, _ = make()
    added = replace(three, verify=lambda p, r: sum(parts(p, r).values()), rewards=None,
                    reward_names=())  # fmt: skip
    same = train_policy(other, tokenizer, added, PLAIN, **SETTINGS)
    assert torch.equal(weights(model), weights(other))
    assert run.curve("reward")[1] == pytest.approx(same.curve("reward")[1])
    assert run.curve("accuracy")[1] != run.curve("reward")[1]


@pytest.mark.parametrize("algorithm", [
    replace(DAPO, reward="several"), replace(SCST, reward="several"),
    replace(VAPO, reward="several"),
], ids=lambda one: one.name)  # fmt: skip
def test_other_rows_on_the_sum(algorithm, three, make) -> None:
    """Sampling on, the greedy answer, the likelihood of the correct ones."""
    model, tokenizer = make()
    before = weights(model)
    run = train_policy(model, tokenizer, three, algorithm, **SETTINGS, reward_weights={
        "even": 1.0, "low": 0.5, "short": 1.0})  # fmt: skip
    assert run.finished
    assert not torch.equal(weights(model), before)


def test_an_advantage_function_sees_the_table(three, make) -> None:
    shapes = []

    def function(rewards, group_ids):
        shapes.append(tuple(rewards.shape))
        return rewards[:, 0] - rewards[:, 0].mean()

    train_policy(*make(), three, GDPO, **SETTINGS, advantage_function=function)
    train_policy(*make(), three, SUMMED, **SETTINGS, advantage_function=lambda r, g: r - r.mean())
    assert shapes == [(16, 3)] * 4
    with pytest.raises(ValueError, match=r"shape \(16, 3\); wanted \(16,\), one advantage"):
        train_policy(*make(), three, GDPO, **SETTINGS, advantage_function=lambda r, g: r)


# A reward model.


def test_a_reward_model_by_hand(coin, make) -> None:
    """Its score at the last token is the reward; the verifier is measured; its weights stay."""
    model, tokenizer = make(dtype="float64")
    scorer = judge_model(model)
    before = weights(scorer)
    run = train_policy(
        model, tokenizer, coin, SCORED, **{**SETTINGS, "steps": 1}, reward_model=scorer,
        samples_every=1, micro_batch_size=5,
    )  # fmt: skip
    assert torch.equal(weights(scorer), before)
    assert all(p.grad is None for p in scorer.parameters())
    hand, _ = make(dtype="float64")
    out = first_batch(coin, "GRPO", hand, tokenizer)
    with torch.no_grad():
        scores = response_rewards(scorer, out.input_ids, out.attention_mask).double()
    (metrics,) = run.metrics
    assert metrics["reward"] == pytest.approx(float(scores.mean()), rel=1e-6)
    true = [coin.verify(p, t) for p, t in zip(out.prompts, out.texts, strict=True)]
    assert metrics["true_reward"] == pytest.approx(sum(true) / 16)
    groups = scores.view(4, 4)
    z = (groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True)
    assert metrics["advantage_max"] == pytest.approx(float(z.max()), rel=1e-4)
    assert metrics["rows_used"] == 16
    assert [line["true_reward"] for line in run.samples] == true[:8]
    assert [line["reward"] for line in run.samples] == pytest.approx(scores[:8].tolist(), rel=1e-5)
    assert run.settings["reward_model"] == fingerprint(scorer)


@pytest.mark.parametrize("algorithm", [replace(SCST, reward="reward_model"), PPO,
                                       replace(DAPO, reward="reward_model")],
                         ids=lambda one: one.name)  # fmt: skip
def test_rows_that_ask_a_reward_model(algorithm, coin, make) -> None:
    model, tokenizer = make()
    scorer = judge_model(model)
    before = weights(model), weights(scorer)
    run = train_policy(model, tokenizer, coin, algorithm, **SETTINGS, reward_model=scorer)
    assert run.finished
    assert not torch.equal(weights(model), before[0])
    assert torch.equal(weights(scorer), before[1])


def test_the_critic_of_a_reward_model_starts_as_its_copy(coin, make) -> None:
    model, tokenizer = make()
    scorer = judge_model(model)
    for p in scorer.parameters():
        p.requires_grad_(False)
    run = train_policy(
        model, tokenizer, coin, replace(PPO, kl="none", beta=0.0), **{**SETTINGS, "steps": 1},
        reward_model=scorer, samples_every=1,
    )  # fmt: skip
    hand, _ = make()
    out = first_batch(coin, "PPO", hand, tokenizer)
    with torch.no_grad():
        values = response_values(scorer, out.input_ids, out.attention_mask,
                                 out.response_mask.shape[1])  # fmt: skip
    assert run.samples[0]["values"] == pytest.approx(values[0][out.response_mask[0]].tolist())
    assert run.metrics[0]["val/grad_norm"] > 0
    assert not any(p.requires_grad for p in scorer.parameters())


def test_the_policy_climbs_the_score_and_not_the_truth(coin, make) -> None:
    """The score is what is pushed up: a random one has nothing to do with the verifier."""
    model, tokenizer = make()
    settings = {**SETTINGS, "steps": 40, "prompts_per_step": 8}
    run = train_policy(
        model, tokenizer, coin, SCORED, **settings, reward_model=judge_model(model),
        score_normalization="start",
    )  # fmt: skip
    rewards = run.curve("reward")[1]
    assert rewards[0] == pytest.approx(0, abs=1e-6)
    assert sum(rewards[-5:]) / 5 > 1  # of the std of the start's scores
    assert abs(run.metrics[-1]["true_reward"] - 0.5) < 0.5


def test_scores_in_units_of_the_start() -> None:
    scale = ScoreScale()
    first = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    scaled = scale(first)
    assert float(scaled.mean()) == pytest.approx(0)
    assert float(scaled.std(correction=0)) == pytest.approx(1)
    again = scale(first + 10)  # the first batch's units, whatever comes later
    assert float(again.mean()) == pytest.approx(10 / float(first.std(correction=0)))
    kept = ScoreScale()
    kept.load_state_dict(scale.state_dict())
    assert torch.equal(kept(first), scaled)
    assert ScoreScale()(torch.full((3,), 2.0, dtype=torch.float64)).tolist() == [0.0] * 3


def test_the_scale_of_the_scores_is_in_the_checkpoint(coin, make, tmp_path) -> None:
    """Gone on after step 2: with the scale of step 1's samples, so with the same bits."""
    settings = {**SETTINGS, "checkpoint_every": 1, "score_normalization": "start"}
    algorithm = replace(PPO, beta=0.1)
    model, tokenizer = make()
    scorer = judge_model(model)
    whole = train_policy(model, tokenizer, coin, algorithm, **settings, reward_model=scorer)
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float:
        seen["n"] += 1
        if seen["n"] > 2 * 16 + 5:
            raise KeyboardInterrupt
        return coin.verify(problem, response)

    stopped = replace(coin, verify=verify)
    run = train_policy(*make(), stopped, algorithm, **settings, reward_model=scorer, out=tmp_path)
    assert (run.interrupted, len(run.metrics)) == (True, 2)
    other, _ = make()
    rest = train_policy(
        other, tokenizer, coin, algorithm, **settings, reward_model=scorer, out=tmp_path,
        resume=True,
    )  # fmt: skip
    assert rest.metrics == whole.metrics
    assert torch.equal(weights(other), weights(model))
    with pytest.raises(ValueError, match=r"belongs to another run: reward_model was '\w{16}', now"):
        train_policy(
            make()[0], tokenizer, coin, algorithm, **settings,
            reward_model=judge_model(model, seed=4), out=tmp_path, resume=True,
        )  # fmt: skip


def test_a_broken_reward_model_stops_the_run(coin, make) -> None:
    model, tokenizer = make()
    before, scorer = weights(model), judge_model(model)
    with torch.no_grad():
        scorer.score.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="step 1: the model's rewards are not finite"):
        train_policy(model, tokenizer, coin, SCORED, **SETTINGS, reward_model=scorer)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize(
    ("algorithm", "change", "message"),
    [
        (GDPO, {}, "task: 'coin' has one reward, gdpo takes several; wanted a task with rewards"),
        (SUMMED, {}, "task: 'coin' has one reward, grpo takes several"),
        (SCORED, {}, 'reward_model: grpo asks a reward model, found None; .*reward="verifier"'),
        (PLAIN, {"reward_model": "x"}, 'reward_model: grpo has reward="verifier"; wanted None, or'),
        (SCORED, {"reward_model": "x"}, "reward_model: found none as the head of a str; wanted"),
        (PLAIN, {"reward_weights": {}}, "reward_weights: grpo has one reward; wanted None"),
        (PLAIN, {"score_normalization": "start"}, "score_normalization: grpo has no score"),
        (PLAIN, {"score_normalization": "z"}, "score_normalization: found 'z'; wanted one of none"),
        (
            replace(VAPO, reward="reward_model"),
            {"reward_model": "x"},
            r"algorithm: vapo raises the likelihood of correct responses \(nll_coef\)",
        ),
    ],
)
def test_bad_input(algorithm, change: dict, message: str, coin, make, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        train_policy(*make(), coin, algorithm, **SETTINGS, **change, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["reward_model", "critic"])
def test_a_scalar_model_must_read_all_tokens_of_the_policy(name: str, coin, make, tmp_path) -> None:
    model, tokenizer = make()
    words = len(tokenizer)
    algorithm = SCORED if name == "reward_model" else replace(PPO, reward="verifier")

    def scalar(size: int):
        small = build_tokenizer("abcdefghijklmnopqrstuvwxyz"[: size - 2])
        return build_scalar_model(build_model("nano", small, seed=0), seed=0)

    message = f"{name}: found a model of {words - 1} tokens; wanted at least the policy's {words}"
    with pytest.raises(ValueError, match=message):
        train_policy(
            model, tokenizer, coin, algorithm, **SETTINGS, out=tmp_path / "run",
            **{name: scalar(words - 1)},
        )  # fmt: skip
    assert not (tmp_path / "run").exists()
    train_policy(model, tokenizer, coin, algorithm, **SETTINGS, **{name: scalar(words + 1)})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"even": 1.0}, "wanted a number for each of even, low, short"),
        ([1.0, 1.0, 1.0], r"reward_weights: found \[1.0, 1.0, 1.0\]; wanted a number for each"),
        ({"even": 1.0, "low": math.nan, "short": 1}, "found nan for low; wanted a finite number"),
        ({"even": 1.0, "low": True, "short": 1}, "found True for low; wanted a finite number"),
    ],
)
def test_bad_weights(found, message: str, three, make) -> None:
    with pytest.raises(ValueError, match=message):
        train_policy(*make(), three, GDPO, **SETTINGS, reward_weights=found)
