"""Less work in an update: the same gradient with and without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from rlcore import models
from rlcore import sampling as sampling_module
from rlcore.algorithms import ROWS, Algorithm, by_name, compute_loss
from rlcore.sampling import Samples, response_logprobs, sample
from rlcore.training import update as update_module
from rlcore.training.critic import without_critic
from rlcore.training.judge import Judged
from rlcore.training.update import Batch, update_policy

PROMPTS = ["352041=", "0=", "98=", "5="]
GROUP = 4


@pytest.fixture(scope="module", params=["float64", "float32"])
def sampled(request: pytest.FixtureRequest) -> tuple[Any, Samples, float]:
    """A model, samples of different lengths from it, and how far gradients may differ."""
    tokenizer = models.build_tokenizer("0123456789=")
    model = models.build_model("nano", tokenizer, seed=0, dtype=request.param)
    samples = sample(
        model, tokenizer, PROMPTS, group_size=GROUP, max_new_tokens=24,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return model, samples, 1e-11 if request.param == "float64" else 1e-5


def batch_of(samples: Samples, advantages: torch.Tensor, used: torch.Tensor) -> Batch:
    counted = torch.ones_like(used)
    return Batch(
        samples, Judged(torch.zeros(len(samples)).double()), advantages, None, counted, used
    )


def gradient(
    model: Any, batch: Batch, micro_batch_size: int | None = None, name: str = "grpo"
) -> tuple[dict[str, float], torch.Tensor]:
    stats = update_policy(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        dataclasses.replace(by_name(name), beta=0.0, kl="none"),
        batch,
        temperature=1.0,
        constant=24,
        micro_batch_size=micro_batch_size,
        max_grad_norm=1e9,
    )
    return stats, torch.cat([p.grad.flatten() for p in model.parameters()])


def pushes(samples: Samples) -> torch.Tensor:
    """Advantages (B,): 0 for long responses, which are left out."""
    numbers = torch.randn(len(samples), generator=torch.Generator().manual_seed(1)).double()
    return numbers.masked_fill(samples.lengths > 10, 0.0)


def agree(one: Any, two: Any, tolerance: float) -> None:
    (stats, found), (others, wanted) = one, two
    assert float(wanted.norm()) > 0
    assert float((found - wanted).norm()) <= tolerance * float(wanted.norm())
    assert set(stats) == set(others)
    for name, value in stats.items():
        assert value == pytest.approx(others[name], rel=1e-5, abs=1e-6), name


def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the responses in each forward pass from now on."""
    seen: list[int] = []
    forward = update_module.response_logits

    def noted(model: Any, ids: Any, mask: Any, width: int) -> Any:
        seen.append(width)
        return forward(model, ids, mask, width)

    monkeypatch.setattr(update_module, "response_logits", noted)
    return seen


@pytest.mark.parametrize("per_token", [False, True])
def test_columns_of_padding_are_left_out(
    sampled: Any, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples, tolerance = sampled
    advantages = pushes(samples)
    used = advantages != 0
    if per_token:
        advantages = advantages[:, None] * torch.linspace(1, 2, samples.response_mask.shape[1])
    widest = int(samples.lengths.max())
    whole = dataclasses.replace(samples, lengths=torch.full_like(samples.lengths, widest))
    seen = widths(monkeypatch)
    trimmed = gradient(model, batch_of(samples, advantages, used))
    untrimmed = gradient(model, batch_of(whole, advantages, used))
    assert seen == [int(samples.lengths[used].max()), widest]
    assert seen[0] < widest
    agree(trimmed, untrimmed, tolerance)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_parts_and_rows_of_advantage_zero(sampled: Any, name: str) -> None:
    model, samples, tolerance = sampled
    advantages = pushes(samples)
    everything = gradient(model, batch_of(samples, advantages, advantages == advantages), name=name)
    for size in (1, 3, 5, None):
        _, found = gradient(model, batch_of(samples, advantages, advantages != 0), size, name)
        wanted = everything[1]
        assert float((found - wanted).norm()) <= tolerance * float(wanted.norm())


def test_groups_of_like_length_come_together(sampled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, samples, _ = sampled
    used = samples.lengths > 1
    parts = batch_of(samples, pushes(samples), used).parts(used.nonzero()[:, 0], 3)
    assert sorted(torch.cat(list(parts)).tolist()) == used.nonzero()[:, 0].tolist()
    assert [len(part) for part in parts[:-1]] == [3] * (len(parts) - 1)
    groups = samples.group_ids[torch.cat(list(parts))]
    assert len(groups.unique_consecutive()) == len(groups.unique())
    longest = [int(samples.lengths[samples.group_ids == g].max()) for g in groups.tolist()]
    assert longest == sorted(longest)
    assert len(set(longest)) > 1


def double_norm(self: Any, states: torch.Tensor) -> torch.Tensor:
    """In the dtype of the model: transformers' own computes in float32 whatever that is."""
    mean = states.square().mean(-1, keepdim=True)
    return self.weight * states / (mean + self.variance_epsilon).sqrt()


def test_prompts_are_read_once(sampled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the layers of a float64 model, which only here are computed so."""
    model, samples, tolerance = sampled
    if model.dtype == torch.float64:
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", double_norm)
        monkeypatch.setattr(sampling_module, "is_plain_llama", lambda _: True)
    reads = []
    shared_logits = sampling_module.shared_prompt_logits

    def noted(*arguments: Any) -> torch.Tensor:
        reads.append(1)
        return shared_logits(*arguments)

    monkeypatch.setattr(sampling_module, "shared_prompt_logits", noted)
    batch = batch_of(samples, pushes(samples), pushes(samples) != 0)
    shared = gradient(model, batch)
    monkeypatch.setattr(sampling_module, "is_plain_llama", lambda _: False)
    own = gradient(model, batch_of(samples, pushes(samples), pushes(samples) != 0))
    assert reads == [1]
    agree(shared, own, tolerance)


UPDATES = 3


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize(
    "algorithm",
    [without_critic(row) for row in ROWS if row.surrogate != "reinforce"],
    ids=lambda row: row.name,
)
def test_the_old_log_probs_need_no_pass_of_their_own(
    algorithm: Algorithm, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out with such a pass before the first update: the same gradients and weights."""
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", double_norm)
    tokenizer = models.build_tokenizer("0123456789=")
    model, hand, reference = (
        models.build_model("nano", tokenizer, seed=seed, dtype="float64") for seed in (0, 0, 1)
    )
    samples = sample(
        model, tokenizer, PROMPTS, group_size=GROUP, max_new_tokens=24,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    mask = samples.response_mask

    def whole(model: Any) -> torch.Tensor:
        return response_logprobs(model, samples.input_ids, samples.attention_mask, mask.shape[1])

    with torch.no_grad():
        old, ref_logprobs = whole(hand), whole(reference)
    numbers = torch.Generator().manual_seed(1)
    advantages = torch.randn(len(samples), generator=numbers, dtype=torch.float64)
    every = torch.ones(len(samples), dtype=torch.bool)
    batch = Batch(
        samples, Judged((advantages > 0).double()), advantages, ref_logprobs, every, every
    )
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.2) for one in (model, hand))
    for update in range(UPDATES):
        stats = update_policy(
            model, ours, algorithm, batch, temperature=1.0, constant=24, micro_batch_size=size,
            max_grad_norm=1e9,
        )  # fmt: skip
        assert (abs(stats["ratio_mean"] - 1) > 1e-9) == (update > 0)  # the policy has moved
        theirs.zero_grad()
        loss, _ = compute_loss(
            algorithm, whole(hand), old, advantages, mask, ref_logprobs=ref_logprobs, constant=24,
            correct=batch.judged.correct, truncated=samples.truncated, **batch.totals(algorithm),
        )  # fmt: skip
        loss.backward()
        theirs.step()
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-11, abs=1e-11)
        for mine, other in zip(model.parameters(), hand.parameters(), strict=True):
            assert other.grad.norm() > 0
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-11)
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)
