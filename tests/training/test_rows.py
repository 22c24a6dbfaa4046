"""The rows that need more of the loop than a verifier: each step by hand, stopped and gone on."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from rlcore.algorithms import DAPO, DCPO, GRPO, ROWS, SCST, Algorithm, compute_advantages
from rlcore.objectives import RewardHistory, entropy, smoothed_advantages, token_logprobs
from rlcore.sampling import Samples, response_logits, response_logprobs, sample
from rlcore.tasks import Task
from rlcore.training import train_policy
from rlcore.training.draw import draw, merge
from rlcore.training.judge import Judge
from rlcore.training.loop import Place
from rlcore.training.rollout import prompt_ids

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
PLAINLY = [one for one in ROWS if one.reward == "verifier" and one.advantage != "gae"]


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def few(coin) -> Task:
    """Three problems only, so that each comes again and again."""
    return replace(
        coin,
        problem=lambda rng: rng.choice(["352041=", "120000=", "987654="]),
        key=lambda problem: "one key, in the training split",
    )


def test_the_rows_with_a_test_of_their_own() -> None:
    assert {one.name for one in ROWS} - {one.name for one in PLAINLY} == {"ppo", "vapo", "gdpo"}


@pytest.mark.parametrize("algorithm", PLAINLY, ids=lambda one: one.name)
def test_every_other_row_trains_and_its_parts_add_up(algorithm: Algorithm, coin, make) -> None:
    """Two updates a batch, in one piece and in parts of 5 rows: the same weights, and they move."""
    results = []
    for size in (None, 5):
        model, tokenizer = make(dtype="float64")
        before = weights(model)
        run = train_policy(
            model, tokenizer, coin, algorithm, **SETTINGS, updates_per_batch=2,
            micro_batch_size=size,
        )  # fmt: skip
        assert run.finished
        assert not torch.equal(weights(model), before)
        results.append((weights(model), run.curve("loss")[1]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-9)
    assert results[0][1] == pytest.approx(results[1][1], rel=0, abs=1e-9)


# SCST: the greedy answer is the baseline.


def test_scst_by_hand(coin, make) -> None:
    model, tokenizer = make(dtype="float64")
    run = train_policy(model, tokenizer, coin, SCST, **{**SETTINGS, "steps": 1})
    hand, _ = make(dtype="float64")
    rng = random.Random("SCST coin/0")
    prompts = [coin.draw(rng) for _ in range(4)]
    limits = {"max_new_tokens": coin.max_new_tokens}
    out = sample(
        hand, tokenizer, prompts, group_size=4, **limits, generator=torch.Generator().manual_seed(0)
    )
    greedy = sample(hand, tokenizer, prompts, greedy=True, **limits)
    base = [coin.verify(p, t) for p, t in zip(greedy.prompts, greedy.texts, strict=True)]
    rewards = [coin.verify(p, t) for p, t in zip(out.prompts, out.texts, strict=True)]
    advantages = torch.tensor(rewards) - torch.tensor(base).repeat_interleave(4)
    mask = out.response_mask
    logprobs = response_logprobs(hand, out.input_ids, out.attention_mask, mask.shape[1])
    loss = -(torch.where(mask, logprobs, 0.0).sum(1) * advantages).mean()
    assert run.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert run.metrics[0]["greedy_reward"] == pytest.approx(sum(base) / 4)
    assert run.metrics[0]["advantage_min"] == advantages.min()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
    assert run.metrics[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-9)


def test_a_greedy_answer_without_a_reward_pushes_nobody(coin, make) -> None:
    """The verifier abstains on every greedy answer: those are the calls after each 16 samples."""
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float | None:
        seen["n"] += 1
        return None if (seen["n"] - 1) % 20 >= 16 else coin.verify(problem, response)

    model, tokenizer = make()
    before = weights(model)
    run = train_policy(model, tokenizer, replace(coin, verify=verify), SCST, **SETTINGS)
    assert torch.equal(weights(model), before)
    assert run.metrics[0]["greedy_reward"] is None
    assert run.curve("rows_used")[1] == [0] * 4
    assert run.curve("missing_rewards")[1] == [0] * 4


def test_a_verifier_that_fails_on_a_greedy_answer_is_named(coin, make) -> None:
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float:
        seen["n"] += 1
        return 1 / 0 if seen["n"] == 17 else coin.verify(problem, response)

    task = replace(coin, verify=verify)
    run = train_policy(*make(), task, SCST, **{**SETTINGS, "steps": 1})
    assert run.metrics[0]["verifier_errors"] == 1
    assert run.errors[0]["error"] == "ZeroDivisionError: division by zero"


# DCPO: what a prompt has earned before.


def test_dcpo_remembers_prompts_by_their_text(few, make) -> None:
    """The advantages of every step are those of the history, kept by hand beside the run."""
    model, tokenizer = make()
    seen = []

    def verify(problem: str, response: str) -> float:
        seen.append((problem, few.verify(problem, response)))
        return seen[-1][1]

    run = train_policy(
        model, tokenizer, replace(few, verify=verify), DCPO, **SETTINGS, samples_every=1
    )
    history: RewardHistory | None = None
    plain = 0
    for step in range(4):
        prompts, rewards = zip(*seen[16 * step : 16 * (step + 1)], strict=True)
        names = torch.tensor([sorted(set(dict(seen))).index(prompt) for prompt in prompts])
        advantages, history = smoothed_advantages(list(rewards), names, history)
        assert run.metrics[step]["advantage_max"] == pytest.approx(float(advantages.max()))
        assert run.metrics[step]["advantage_min"] == pytest.approx(float(advantages.min()))
        assert run.metrics[step]["rows_used"] == int((advantages != 0).sum())
        alone = smoothed_advantages(list(rewards), names).advantages
        plain += int(torch.equal(alone, advantages))
    assert plain == 1  # only the first step is what it would be without a history
    assert history is not None
    assert int(history.visits.min()) > 1


def test_prompt_ids_are_the_texts_and_nothing_else() -> None:
    ids = prompt_ids(["a", "b", "a", "ä"])
    assert ids.dtype == torch.int64
    assert (ids >= 0).all()
    assert ids[0] == ids[2]
    assert len(set(ids.tolist())) == 3
    assert prompt_ids(["b", "a"]).tolist() == [ids[1], ids[0]]
    digest = int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest())
    assert ids[0] == digest // 2  # of the text alone: the same in another process


@pytest.mark.parametrize("forgotten", [False, True])
def test_dcpo_goes_on_with_the_same_history(
    forgotten: bool, few, make, tmp_path, monkeypatch
) -> None:
    """Stopped in step 3 and gone on: the same bits; without the history they would differ."""
    settings = {**SETTINGS, "steps": 6, "checkpoint_every": 1}
    whole_model, tokenizer = make()
    whole = train_policy(whole_model, tokenizer, few, DCPO, **settings)
    prompts = []

    def verify(problem: str, response: str) -> float:
        prompts.append(problem)
        if len(prompts) > 2 * 16 + 5:
            raise KeyboardInterrupt
        return few.verify(problem, response)

    stopped = replace(few, verify=verify)
    run = train_policy(*make(), stopped, DCPO, **settings, out=tmp_path)
    assert (run.interrupted, len(run.metrics)) == (True, 2)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["history"]
    visits = Counter(prompt for step in (0, 16) for prompt in {*prompts[step : step + 16]})
    names = prompt_ids(list(visits)).tolist()
    wanted = dict(zip(names, visits.values(), strict=True))
    assert dict(zip(saved["group_ids"].tolist(), saved["visits"].tolist(), strict=True)) == wanted
    if forgotten:
        true_restore = Place.restore
        monkeypatch.setattr(
            Place, "restore", lambda place, state: true_restore(place, {**state, "history": None})
        )
    model, _ = make()
    rest = train_policy(model, tokenizer, few, DCPO, **settings, out=tmp_path, resume=True)
    assert (rest.metrics == whole.metrics) == (not forgotten)
    assert torch.equal(weights(model), weights(whole_model)) == (not forgotten)


def test_a_row_without_memory_keeps_none(coin, make, tmp_path) -> None:
    train_policy(*make(), coin, PLAIN, **SETTINGS, out=tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["history"] is None


# DAPO: sampling on, and a price on length.


def drawn_by_hand(task, model, tokenizer, rounds: int) -> list[Samples]:
    rng, generator = random.Random("DAPO coin/0"), torch.Generator().manual_seed(0)
    return [
        sample(
            model,
            tokenizer,
            [task.draw(rng) for _ in range(4)],
            group_size=4,
            max_new_tokens=task.max_new_tokens,
            generator=generator,
        )
        for _ in range(rounds)
    ]


def rare(problem: str, response: str) -> float:
    """A reward that one response in eight gets: many groups have none."""
    return float(sum(map(ord, response)) % 8 == 0)


def test_dapo_by_hand(coin, make) -> None:
    """Rounds until four prompts teach something; penalty, advantages, loss over those alone."""
    task = replace(coin, verify=rare)
    model, tokenizer = make(dtype="float64")
    run = train_policy(model, tokenizer, task, DAPO, **{**SETTINGS, "steps": 1})
    rounds = run.metrics[0]["sampling_rounds"]
    assert rounds > 1
    assert run.metrics[0]["prompts_kept"] == 4
    hand, _ = make(dtype="float64")
    parts = drawn_by_hand(task, hand, tokenizer, rounds)
    groups = []  # of the informative prompts: advantages and samples, row by row
    for part in parts:
        rewards = torch.tensor(list(map(rare, part.prompts, part.texts)), dtype=torch.float64)
        for first in range(0, 16, 4):
            rows = slice(first, first + 4)
            if len(set(rewards[rows].tolist())) > 1:
                # the last fifth of 8 tokens: a penalty that rises over lengths 7 and 8
                shaped = rewards[rows] + ((6 - part.lengths[rows].double()) / 2).clamp(max=0)
                spread = shaped - shaped.mean()
                groups.append((part, rows, spread / spread.square().mean().sqrt()))
    assert len(groups) >= 4 > len([g for g in groups if g[0] is not parts[-1]])
    total = sum(int(part.response_mask[rows].sum()) for part, rows, _ in groups[:4])
    losses = []
    for part, rows, advantages in groups[:4]:
        mask = part.response_mask[rows]
        logprobs = response_logprobs(
            hand, part.input_ids[rows], part.attention_mask[rows], mask.shape[1]
        )
        ratio = (logprobs - logprobs.detach()).exp()
        losses.append(-torch.where(mask, ratio * advantages[:, None], 0.0).sum() / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
    assert run.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    assert run.metrics[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
    assert run.metrics[0]["rows_used"] <= 16
    assert run.metrics[0]["length"] == pytest.approx(
        float(torch.cat([part.lengths for part in parts]).double().mean())
    )


@pytest.mark.parametrize("limit", [1, 3])
def test_dynamic_sampling_stops_after_its_rounds(limit: int, coin, make) -> None:
    """A task that is never solved: so many rounds, nothing kept, and the weights stay."""
    model, tokenizer = make()
    before = weights(model)
    seen = []
    task = replace(coin, verify=lambda problem, response: seen.append(problem) or 0.0)
    run = train_policy(
        model, tokenizer, task, DAPO, **{**SETTINGS, "steps": 2}, max_sampling_rounds=limit
    )
    assert run.curve("sampling_rounds")[1] == [limit] * 2
    assert run.curve("prompts_kept")[1] == [0] * 2
    assert len(seen) == 2 * limit * 16
    assert torch.equal(weights(model), before)


def test_after_the_last_round_a_step_trains_on_what_it_has(coin, make) -> None:
    model, tokenizer = make()
    before = weights(model)
    task = replace(coin, verify=rare)
    run = train_policy(model, tokenizer, task, DAPO, **SETTINGS, max_sampling_rounds=1)
    kept = run.curve("prompts_kept")[1]
    assert 0 < min(kept) < 4
    assert all(used <= 4 * k for used, k in zip(run.curve("rows_used")[1], kept, strict=True))
    assert not torch.equal(weights(model), before)


def test_dapo_goes_on_with_the_same_bits(coin, make, tmp_path) -> None:
    """Stopped in the second round of a step's sampling: that round is drawn again, alike."""
    task = replace(coin, verify=rare)
    settings = {**SETTINGS, "checkpoint_every": 1}
    whole_model, tokenizer = make()
    whole = train_policy(whole_model, tokenizer, task, DAPO, **settings)
    first, second = whole.curve("sampling_rounds")[1][:2]
    assert second > 1
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float:
        seen["n"] += 1
        if seen["n"] > (first + 1) * 16 + 5:
            raise KeyboardInterrupt
        return rare(problem, response)

    run = train_policy(*make(), replace(task, verify=verify), DAPO, **settings, out=tmp_path)
    assert (run.interrupted, len(run.metrics)) == (True, 1)
    model, _ = make()
    rest = train_policy(model, tokenizer, task, DAPO, **settings, out=tmp_path, resume=True)
    assert rest.metrics == whole.metrics
    assert torch.equal(weights(model), weights(whole_model))


def test_rounds_of_other_widths_are_put_together(make) -> None:
    """Prompts and responses of other lengths: the same tokens, and the same log-probs."""
    model, tokenizer = make(dtype="float64")
    parts = [
        sample(
            model,
            tokenizer,
            prompts,
            group_size=2,
            max_new_tokens=length,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed, (prompts, length) in enumerate(
            [(["352041="], 2), (["12=", "9876543="], 6), (["1="], 3)]
        )
    ]
    whole = merge(parts, tokenizer.pad_token_id)
    assert whole.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert whole.texts == [text for part in parts for text in part.texts]
    assert whole.prompts == [prompt for part in parts for prompt in part.prompts]
    width = whole.response_mask.shape[1]
    assert width == max(part.response_mask.shape[1] for part in parts)
    together = response_logprobs(model, whole.input_ids, whole.attention_mask, width)
    row_ = 0
    for part in parts:
        mask = part.response_mask
        alone = response_logprobs(model, part.input_ids, part.attention_mask, mask.shape[1])
        for i in range(len(part)):
            kept = whole.response_mask[row_]
            assert whole.lengths[row_] == part.lengths[i] == kept.sum()
            assert whole.truncated[row_] == part.truncated[i]
            torch.testing.assert_close(together[row_][kept], alone[i][mask[i]], rtol=0, atol=1e-12)
            for name in ("logprobs", "entropy"):
                ours = getattr(whole, name)[row_]
                assert torch.equal(ours[kept], getattr(part, name)[i][mask[i]])
                assert not ours[~kept].any()
            real = whole.attention_mask[row_] == 1
            own = part.attention_mask[i] == 1
            assert torch.equal(whole.input_ids[row_][real], part.input_ids[i][own])
            assert (whole.input_ids[row_][~real] == tokenizer.pad_token_id).all()
            row_ += 1
    assert merge(parts[:1], tokenizer.pad_token_id) is parts[0]


def test_a_round_without_dynamic_sampling_keeps_all(coin, make) -> None:
    place = Place(0, random.Random("x"), torch.Generator().manual_seed(0))
    options = {"prompts_per_step": 3, "group_size": 4, "temperature": 1.0, "max_rounds": 5}
    drawn = draw(*make(), coin, PLAIN, Judge(PLAIN, coin), place, **options)
    assert drawn.kept.all()
    assert len(drawn.samples) == 12
    assert drawn.metrics == {}


# Terms and filters of the loss.


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize(
    "change",
    [{"overlong": "filter"}, {"entropy_coef": 0.5}, {"nll_coef": 0.5}],
    ids=["filter", "entropy", "likelihood"],
)
def test_a_step_with_another_term_by_hand(change: dict, aggregation: str, coin, make) -> None:
    """In one piece and in parts of 3 rows: loss and gradient of the whole batch at once."""
    algorithm = replace(PLAIN, aggregation=aggregation, **change)
    hand, tokenizer = make(dtype="float64")
    rng = random.Random("GRPO coin/0")
    out = sample(
        hand,
        tokenizer,
        [coin.draw(rng) for _ in range(4)],
        group_size=4,
        max_new_tokens=coin.max_new_tokens,
        generator=torch.Generator().manual_seed(0),
    )
    reward = torch.tensor(list(map(coin.verify, out.prompts, out.texts)), dtype=torch.float64)
    assert 0 < out.truncated.sum() < 16
    assert 0 < reward.sum() < 16
    advantages = compute_advantages(algorithm, reward, out.group_ids).advantages
    mask = out.response_mask
    if algorithm.overlong == "filter":
        mask = mask & ~out.truncated[:, None]
    logits = response_logits(hand, out.input_ids, out.attention_mask, mask.shape[1])
    logprobs = token_logprobs(logits, out.input_ids[:, -logits.shape[1] :])
    gain = torch.where(mask, (logprobs - logprobs.detach()).exp() * advantages[:, None], 0.0)
    if aggregation == "token_mean":
        loss = -gain.sum() / mask.sum()
    else:
        rows = mask.any(1)
        loss = -(gain.sum(1)[rows] / mask.sum(1)[rows]).mean()
    loss = loss - algorithm.entropy_coef * entropy(logits[:, :-1])[mask].mean()
    likely = logprobs[mask & (reward == 1)[:, None]].mean()
    loss = loss - algorithm.nll_coef * likely
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
    for size in (None, 3):
        model, _ = make(dtype="float64")
        run = train_policy(
            model, tokenizer, coin, algorithm, **{**SETTINGS, "steps": 1}, micro_batch_size=size
        )
        assert run.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
        assert run.metrics[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
        if algorithm.nll_coef:
            assert run.metrics[0]["nll_loss"] == pytest.approx(-likely.item(), rel=1e-9)


def test_settings_hold_the_choices_and_not_the_notes(coin, make, tmp_path) -> None:
    """A record names what was run; a note that is worded anew makes no other run of it."""
    run = train_policy(*make(), coin, DAPO, **{**SETTINGS, "steps": 1}, out=tmp_path)
    recorded = json.loads((tmp_path / "run.json").read_text("utf-8"))["settings"]["algorithm"]
    assert recorded == run.settings["algorithm"]
    assert Algorithm(**recorded) == replace(DAPO, notes=())
    reworded = replace(DAPO, notes=("Said in other words.",))
    again = train_policy(
        *make(), coin, reworded, **{**SETTINGS, "steps": 1}, out=tmp_path, resume=True
    )
    assert again.metrics == run.metrics
