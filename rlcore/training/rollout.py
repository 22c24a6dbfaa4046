"""What is known of a batch of samples before the update: rewards, statistics, examples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import Algorithm, Estimates, compute_advantages
from rlcore.objectives import RewardHistory
from rlcore.objectives.advantages import equal_groups
from rlcore.objectives.kl import kl_per_token
from rlcore.sampling import Samples, response_logprobs
from rlcore.tasks import Task
from rlcore.training.judge import Judged, known, mean
from rlcore.training.processes import ALONE, Processes


def score(
    model: Any, samples: Samples, temperature: float, rows: int | None, world: Processes = ALONE
) -> Tensor:
    """Log-probs (B, T) of the responses under another model, `rows` at a time."""
    width, size = samples.response_mask.shape[1], rows or len(samples)

    def some(own: slice) -> Tensor:
        ids, mask = samples.input_ids[own].split(size), samples.attention_mask[own].split(size)
        parts = zip(ids, mask, strict=True)
        return torch.cat(
            [response_logprobs(model, *part, width, temperature=temperature) for part in parts]
        )

    return torch.cat(world.rows(len(samples), some))


def compare(
    algorithm: Algorithm,
    task: Task,
    samples: Samples,
    judged: Judged,
    *,
    ref_logprobs: Tensor | None = None,
    greedy: Tensor | None = None,
    history: RewardHistory | None = None,
    reward_weights: Tensor | None = None,
    values: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    function: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Estimates:
    """Advantages (B,), or (B, T) with a critic, by the row of the algorithm; or by a function."""
    reward = judged.rewards if algorithm.advantage == "decoupled" else judged.reward
    assert reward is not None
    if function is not None:
        return Estimates(replaced(function, reward, samples.group_ids))
    remembers = algorithm.advantage == "smoothed"
    return compute_advantages(
        algorithm,
        reward,
        prompt_ids(samples.prompts).to(reward.device) if remembers else samples.group_ids,
        old_logprobs=samples.logprobs,
        ref_logprobs=ref_logprobs,
        response_mask=samples.response_mask,
        max_length=task.max_new_tokens,
        greedy_rewards=greedy,
        reward_weights=reward_weights,
        history=history,
        values=values,
        bootstrap_values=bootstrap_values,
    )


def prompt_ids(prompts: Sequence[str]) -> Tensor:
    """A number for each text, the same in every step and every run: 63 bits of its checksum."""
    digests = [hashlib.blake2b(prompt.encode(), digest_size=8).digest() for prompt in prompts]
    return torch.tensor([int.from_bytes(digest) >> 1 for digest in digests])


def replaced(
    function: Callable[[Tensor, Tensor], Tensor], reward: Tensor, group_ids: Tensor
) -> Tensor:
    """Advantages (B,) from a function of the caller's; 0 for missing rewards, whatever it says.

    Raises ValueError where it returns anything but finite numbers of shape (B,).
    """
    rated = ~reward.isnan() if reward.dim() == 1 else ~reward.isnan().all(1)
    result = function(reward, group_ids)
    try:
        advantages = torch.as_tensor(result, device=reward.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"advantage_function: found {result!r}; wanted a tensor") from error
    if advantages.is_complex():
        raise ValueError("advantage_function: found complex numbers; wanted real ones")
    if advantages.shape != rated.shape:
        raise ValueError(
            f"advantage_function: found a result of shape {tuple(advantages.shape)}; wanted "
            f"{tuple(rated.shape)}, one advantage per response"
        )
    advantages = torch.where(rated, advantages.to(reward.dtype), 0.0)
    if not bool(advantages.isfinite().all()):
        row = int((~advantages.isfinite()).nonzero()[0])
        raise ValueError(
            f"advantage_function: found {advantages[row].item()} in row {row}; "
            "wanted finite numbers"
        )
    return advantages


def describe(
    samples: Samples, reward: Tensor, advantages: Tensor, reference: Tensor | None
) -> dict[str, Any]:
    """The metrics of a step that do not depend on the update, see `train_policy`."""
    mask = samples.response_mask
    rated = known(reward)
    given = advantages if advantages.dim() == 1 else advantages[mask]
    groups: dict[int, list[float]] = {}
    for group, r in zip(samples.group_ids.tolist(), reward.tolist(), strict=True):
        if not math.isnan(r):
            groups.setdefault(group, []).append(r)
    row: dict[str, Any] = {
        "reward": mean(reward),
        "reward_std": fmean(map(pstdev, groups.values())) if groups else None,
        "frac_reward_zero_std": float(equal_groups(reward, samples.group_ids).share),
        "advantage_min": float(given.min()),
        "advantage_max": float(given.max()),
        "missing_rewards": len(samples) - len(rated),
        "entropy": float(samples.entropy[mask].mean()),
        "length": float(samples.lengths.double().mean()),
        "truncated": float(samples.truncated.double().mean()),
    }
    if reference is not None:
        row["kl"] = float(
            kl_per_token(samples.logprobs, reference, mask, estimator="k3")[mask].mean()
        )
    return row


def examples(
    samples: Samples,
    judged: Judged,
    names: Sequence[str],
    advantages: Tensor,
    values: Tensor | None,
    step: int,
    groups: int = 2,
) -> list[dict[str, Any]]:
    """Every response to the first few prompts, with reward and advantage, for the record.

    names: of several rewards. With a critic the advantage is the mean over the tokens, and those of
    the tokens are there too, beside the values.
    """
    rows = []
    for i in (samples.group_ids < groups).nonzero()[:, 0].tolist():
        real = samples.response_mask[i]
        each = advantages[i][real] if advantages.dim() == 2 else advantages[i]
        row = {
            "step": step,
            "prompt": samples.prompts[i],
            "response": samples.texts[i],
            "reward": number(judged.reward[i]),
            "advantage": float(each.mean()),
            "truncated": bool(samples.truncated[i]),
        }
        if judged.truth is not None:
            row["true_reward"] = number(judged.truth[i])
        if judged.rewards is not None:
            row["rewards"] = dict(zip(names, map(number, judged.rewards[i]), strict=True))
        if values is not None:
            row |= {"advantages": each.tolist(), "values": values[i][real].tolist()}
        rows.append(row)
    return rows


def number(value: Tensor) -> float | None:
    """None for NaN."""
    return None if math.isnan(value) else float(value)
