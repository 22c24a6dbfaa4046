"""A compact model trained in TRL by what rlcore.to_trl gives, beside our own step.

TRL's trainer makes two steps.  Of each, the weights that it starts from and the batch are kept, and
the loss and the gradient that TRL computed.  Our loops' own parts (judge, advantages, update; the
losses over pairs) take the same weights and the same tokens, and must come to the same loss and
gradient.  In the second step the policy has left its reference.  Without TRL it is skipped.
"""

import copy
import importlib.util
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore import to_trl
from rlcore.algorithms import DAPO, DR_GRPO, GDPO, GRPO, GSPO, RLOO, Algorithm
from rlcore.models import build_model, build_scalar_model, build_tokenizer, load, save
from rlcore.preferences import DPO, IPO_AVERAGED, REWARD_MODEL, SIMPO, PreferenceMethod
from rlcore.sampling import Samples
from rlcore.tasks import REVIEWS, SORT, SORT_BOX_UNEVEN, PreferencePairs, Task
from rlcore.training.judge import Judge
from rlcore.training.preference import Paired
from rlcore.training.reward import Scored
from rlcore.training.rollout import compare, score
from rlcore.training.update import Batch, update_policy

if importlib.util.find_spec("trl") is None:
    pytest.skip(
        "no training in TRL: it is not installed; `pip install '.[trl]'` in the environment of the "
        "tests brings it",
        allow_module_level=True,
    )

CLOSE = 1e-5  # relative, of float32 sums in another order
PROMPTS, GROUP = 4, 4
NO_LIMIT = 1e9  # for the norm of the gradient: neither side clips it


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def coin(problem: str, response: str) -> float:
    """A reward that comes half the time for a model that knows nothing."""
    return float(sum(map(ord, response)) % 2)


def coin_or_none(problem: str, response: str) -> float | None:
    return None if len(response) % 4 == 3 else coin(problem, response)


def three(problem: str, response: str) -> dict[str, float | None]:
    n = sum(map(ord, response))
    return {"correct": n % 3 / 20, "box": float(n % 2), "short": len(response) / 5}


COIN = replace(SORT, name="coin", verify=coin)
ABSTAINS = replace(SORT, name="abstains", verify=coin_or_none)
THREE = replace(SORT_BOX_UNEVEN, name="three", rewards=three)
TRL_STD = {"ddof": 1, "eps": 1e-4}


def start(task: Task, folder: Path) -> tuple[Any, Any]:
    """A compact model, read from a folder: there TRL finds its reference, too."""
    tokenizer = build_tokenizer(task.vocabulary)
    save(build_model("nano", tokenizer, seed=3, device="cpu"), tokenizer, folder)
    return load(folder, device="cpu")


@dataclass
class Step:
    """What a trainer started from, computed its loss on, and came to."""

    weights: dict[str, Tensor]
    inputs: dict[str, Any]
    loss: float
    gradient: dict[str, Tensor]


def gradient_of(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(trainer: Any) -> list[Step]:
    """Two steps in TRL, as they went."""
    from transformers import TrainerCallback

    steps: list[Step] = []
    compute = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        weights = copy.deepcopy(model.state_dict())
        loss = compute(model, inputs, *args, **more)
        steps.append(Step(weights, dict(inputs), float(loss), {}))
        return loss

    class Gradient(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            steps[-1].gradient = gradient_of(model)

    trainer.compute_loss = compute_loss
    trainer.add_callback(Gradient())
    trainer.train()
    assert trainer.state.global_step == len(steps) == 2
    assert any((steps[1].weights[n] != w).any() for n, w in steps[0].weights.items())
    return steps


def settings(folder: Path, rows: int, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": rows,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": NO_LIMIT,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 7,
        **more,
    }


def samples_of(inputs: dict[str, Tensor], tokenizer: Any) -> Samples:
    """TRL's batch in our words."""
    ids, mask = inputs["completion_ids"], inputs["completion_mask"].bool()
    prompts = [
        tokenizer.decode(row[real.bool()])
        for row, real in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
    ]
    first = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    lengths = mask.sum(1)
    ended = (ids == tokenizer.eos_token_id) & mask
    texts = [
        tokenizer.decode(row[real], skip_special_tokens=True)
        for row, real in zip(ids, mask, strict=True)
    ]
    return Samples(
        prompts=prompts,
        texts=texts,
        input_ids=torch.cat([inputs["prompt_ids"], ids], 1),
        attention_mask=torch.cat([inputs["prompt_mask"], mask], 1).long(),
        response_mask=mask,
        logprobs=torch.zeros(mask.shape),  # filled in below, from the model
        entropy=torch.zeros(mask.shape),
        group_ids=torch.tensor([first[prompt] for prompt in prompts]),
        lengths=lengths,
        truncated=~ended.any(1),
    )


def our_step(
    row: Algorithm,
    task: Task,
    model: Any,
    samples: Samples,
    weights: dict[str, float] | None,
    reference: Any,
) -> tuple[float, Batch]:
    """Our judge, advantages and update on these samples: the loss; the gradient is in the model."""
    judge = Judge(row, task, reward_weights=weights)
    judged = judge(samples, 0)
    samples.logprobs = score(model, samples, 1.0, None).detach()
    ref = None if reference is None else score(reference, samples, 1.0, None).detach()
    estimates = compare(row, task, samples, judged, ref_logprobs=ref, reward_weights=judge.weights)
    counted = ~judged.reward.isnan()
    if row.overlong == "filter":
        counted = counted & ~samples.truncated
    batch = Batch(samples, judged, estimates.advantages, ref, counted, counted)
    result = update_policy(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        row,
        batch,
        temperature=1.0,
        constant=task.max_new_tokens,
        micro_batch_size=None,
        max_grad_norm=NO_LIMIT,
    )
    return result["loss"], batch


def compare_step(model: Any, loss: float, step: Step, factor: float = 1.0) -> None:
    """TRL's loss and gradient are ours multiplied by a factor."""
    assert factor * loss == pytest.approx(step.loss, rel=CLOSE, abs=CLOSE)
    ours = gradient_of(model)
    assert ours.keys() == step.gradient.keys()
    whole = torch.stack([g.norm() for g in step.gradient.values()]).norm()
    assert whole > 1e-3  # there is something to compare
    apart = torch.stack([(factor * ours[n] - g).norm() for n, g in step.gradient.items()]).norm()
    assert apart <= CLOSE * whole, f"relative {float(apart / whole):.2g}"


ROWS: dict[str, tuple[Algorithm, Task, dict[str, Any]]] = {
    "Dr. GRPO": (DR_GRPO, COIN, {}),
    "GRPO with a KL term": (replace(GRPO, **TRL_STD), COIN, {}),
    "GSPO": (replace(GSPO, **TRL_STD), COIN, {}),
    "DAPO with the overlong penalty": (
        replace(DAPO, dynamic_sampling=False, **TRL_STD),
        COIN,
        {},
    ),
    "GDPO on three rewards": (
        replace(GDPO, **TRL_STD),
        THREE,
        {"reward_weights": {"short": 3.0, "correct": 1.0, "box": 0.5}},
    ),
    "RLOO": (
        replace(RLOO, surrogate="clip", ratio_level="sequence_sum", aggregation="sequence_mean"),
        COIN,
        {},
    ),
    "a verifier that abstains": (DR_GRPO, ABSTAINS, {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_two_steps_of_a_policy(name: str, tmp_path: Path) -> None:
    row, task, more = ROWS[name]
    model, tokenizer = start(task, tmp_path / "start")
    ours, reference = copy.deepcopy(model), copy.deepcopy(model)
    training = to_trl(
        row,
        task=task,
        problems=50,
        **settings(tmp_path / "out", PROMPTS * GROUP, num_generations=GROUP, **more),
    )
    assert set(training.train_dataset["prompt"]) == set(task.prompts("train", 50, seed=7))
    for step in train(training.build(model, tokenizer)):
        samples = samples_of(step.inputs, tokenizer)
        assert samples.group_ids.bincount().tolist() == [GROUP] * PROMPTS
        ours.load_state_dict(step.weights)
        with_kl = reference if row.kl != "none" and row.beta > 0 else None
        loss, batch = our_step(row, task, ours, samples, more.get("reward_weights"), with_kl)
        torch.testing.assert_close(
            batch.advantages.float(), step.inputs["advantages"], rtol=CLOSE, atol=CLOSE
        )
        missing = int(batch.judged.reward.isnan().sum())
        assert bool(missing) == (task is ABSTAINS)
        # TRL divides by all responses, our loop by those that have a reward.
        compare_step(ours, loss, step, 1 - missing / len(samples))


def test_a_reference_that_trl_would_not_find_is_refused(tmp_path: Path) -> None:
    """It reads the folder again: a model trained since would be held to another one, unsaid."""
    row = replace(GRPO, **TRL_STD)
    training = to_trl(row, task=COIN, **settings(tmp_path / "out", GROUP, num_generations=GROUP))
    model, tokenizer = start(COIN, tmp_path / "start")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="model: found other weights than in its folder"):
        training.build(model, tokenizer)
    fresh = build_model("nano", tokenizer, seed=3, device="cpu")
    with pytest.raises(ValueError, match="model: found one without a folder"):
        training.build(fresh, tokenizer)


def pairs_of(task: Task) -> PreferencePairs:
    """Six pairs of unlike lengths."""
    rng = random.Random(5)
    prompts = task.prompts("train", 6)
    chosen = [task.solution(p) for p in prompts]
    rejected = [task.demonstration(p, rng) for p in prompts]
    short = [text[:3] if task.symbols else text for text in rejected]
    assert len({len(text) for text in [*chosen, *short]}) > 1
    return PreferencePairs(
        tuple(prompts), tuple(chosen), tuple(short), margins=(0.5, 0.0, 1.0, 0.25, 0.0, 2.0)
    )


@pytest.mark.parametrize("task", [SORT, REVIEWS], ids=lambda task: task.name)
@pytest.mark.parametrize("row", [DPO, IPO_AVERAGED, SIMPO], ids=lambda row: row.name)
def test_two_steps_over_pairs(row: PreferenceMethod, task: Task, tmp_path: Path) -> None:
    """From a model that is in no folder: the reference is a copy of it."""
    tokenizer = build_tokenizer(task.vocabulary)
    model = build_model("nano", tokenizer, seed=4, device="cpu")
    pairs = pairs_of(task)
    ours = copy.deepcopy(model)
    data = Paired(row, ours, tokenizer, pairs, at_once=6)  # the reference is the start
    training = to_trl(row, pairs=pairs, task=task, **settings(tmp_path / "out", len(pairs)))
    every = torch.arange(len(pairs))
    for step in train(training.build(model, tokenizer)):
        ours.load_state_dict(step.weights)
        ours.zero_grad()
        data.begin(ours, every, 6)
        loss, _ = data.loss(every, data.forward(ours, every))
        loss.backward()
        compare_step(ours, float(loss), step)


def test_two_steps_of_a_reward_model(tmp_path: Path) -> None:
    base, tokenizer = start(SORT, tmp_path / "start")
    model = build_scalar_model(base, seed=1)
    ours, pairs = copy.deepcopy(model), pairs_of(SORT)
    data = Scored(tokenizer, pairs, ours, REWARD_MODEL)
    training = to_trl(REWARD_MODEL, pairs=pairs, **settings(tmp_path / "out", len(pairs)))
    every = torch.arange(len(pairs))
    for step in train(training.build(model, tokenizer)):
        ours.load_state_dict(step.weights)
        ours.zero_grad()
        loss, _ = data.loss(every, data.forward(ours, every), len(pairs))
        loss.backward()
        compare_step(ours, float(loss), step)
