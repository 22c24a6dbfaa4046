"""Question 1 in the loop: what each response earned, and what it was truly worth."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import Algorithm
from rlcore.sampling import Samples
from rlcore.tasks import Task, VerifierTimeout, rate_all, rate_each
from rlcore.training.processes import ALONE, Processes
from rlcore.training.reward import finite

SCORE_NORMALIZATIONS = ("none", "start")
ABSTAINED = "abstained"  # among the errors: no verdict, and nothing raised


@dataclass
class Judged:
    """What B responses earned, NaN where missing. Every tensor in float64."""

    reward: Tensor  # (B,); of several rewards, their weighted sum
    rewards: Tensor | None = None  # (B, n), where they are several
    truth: Tensor | None = None  # (B,), what the verifier says where it is not the reward itself
    errors: list[dict[str, Any]] = field(default_factory=list)  # what was raised, and on what

    @property
    def correct(self) -> Tensor:
        """(B,), True where the verifier gave 1."""
        return (self.reward if self.truth is None else self.truth) == 1

    def __getitem__(self, rows: Any) -> Judged:
        """Some of the rows; the errors are not among them."""
        return Judged(
            self.reward[rows],
            None if self.rewards is None else self.rewards[rows],
            None if self.truth is None else self.truth[rows],
        )


def join(parts: Sequence[Judged]) -> Judged:
    """Several calls' rows as one."""

    def whole(found: list[Tensor | None]) -> Tensor | None:
        known = [tensor for tensor in found if tensor is not None]
        return torch.cat(known) if known else None

    return Judged(
        torch.cat([part.reward for part in parts]),
        whole([part.rewards for part in parts]),
        whole([part.truth for part in parts]),
        [error for part in parts for error in part.errors],
    )


class ScoreScale(torch.nn.Module):
    """Mean and std of a reward model's scores on the first batch, kept in the checkpoint."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "std"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def forward(self, scores: Tensor) -> Tensor:
        """Scores in units of that std above that mean; scores that are all equal are 0."""
        if not bool(self.std):
            self.mean, self.std = scores.mean().cpu(), scores.std(correction=0).cpu()
            if not bool(self.std):
                self.std = torch.ones_like(self.std)
        scaled: Tensor = (scores - self.mean.to(scores.device)) / self.std.to(scores.device)
        return scaled


class Judge:
    """Asks the verifier, the task's several rewards or a reward model, as a row has it."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        *,
        reward_model: Any = None,
        reward_weights: Mapping[str, float] | None = None,
        score_normalization: str = "none",
        rows: int | None = None,
        world: Processes = ALONE,
    ) -> None:
        self.task, self.kind, self.world = task, algorithm.reward, world
        self.reward_model, self.rows = reward_model, rows
        weights = reward_weights or dict.fromkeys(task.reward_names, 1.0)
        self.weights = torch.tensor([weights[n] for n in task.reward_names], dtype=torch.float64)
        self.scale = ScoreScale() if score_normalization == "start" else None

    def __call__(self, samples: Samples, step: int) -> Judged:
        """What the responses earned, each process asking for its share of them.

        NonFiniteError where a score is not finite.
        """
        verified, errors = self._ask(samples, step, "verify")
        if self.kind == "verifier":
            return Judged(verified, errors=errors)
        if self.kind == "reward_model":
            return Judged(self._score(samples), truth=verified, errors=errors)
        rewards, more = self._ask(samples, step, "rewards")
        known = ~rewards.isnan()
        total = (torch.where(known, rewards, 0.0) * self.weights.to(rewards.device)).sum(1)
        total = total.masked_fill(~known.any(1), math.nan)
        return Judged(total, rewards, verified, errors + more)

    def _ask(self, samples: Samples, step: int, what: str) -> tuple[Tensor, list[dict[str, Any]]]:
        """A function of the task on every response; an error is listed with its response."""
        pairs = list(zip(samples.prompts, samples.texts, strict=True))

        def some(own: slice) -> Sequence[tuple[Any, str | None]]:
            if what == "verify":
                return rate_all(self.task, samples.prompts[own], samples.texts[own])
            return [rate_each(self.task, *pair) for pair in pairs[own]]

        values, errors = [], []
        found = [one for part in self.world.rows(len(samples), some) for one in part]
        for (prompt, text), (value, error) in zip(pairs, found, strict=True):
            if error is None and bool(torch.tensor(value).isnan().any()):
                error = ABSTAINED
            if error is not None:
                errors.append({"step": step, "error": error, "prompt": prompt, "response": text})
            values.append(value)
        return torch.tensor(values, dtype=torch.float64, device=samples.input_ids.device), errors

    @torch.no_grad()
    def _score(self, samples: Samples) -> Tensor:
        size = self.rows or len(samples)

        def some(rows: slice) -> Tensor:
            ids, real = samples.input_ids[rows], samples.attention_mask[rows].bool()
            parts = zip(ids.split(size), real.split(size), strict=True)
            return torch.cat([finite(self.reward_model, *part) for part in parts])

        scores = torch.cat(self.world.rows(len(samples), some)).double()
        return scores if self.scale is None else self.scale(scores)

    def describe(self, judged: Judged) -> dict[str, Any]:
        """The metrics that only some rows have, see `train_policy`."""
        row: dict[str, Any] = {}
        if judged.truth is not None:
            name = "accuracy" if self.kind == "several" else "true_reward"
            row[name] = mean(judged.truth)
        if judged.rewards is not None:
            for name, column in zip(self.task.reward_names, judged.rewards.unbind(1), strict=True):
                row[f"rewards/{name}/mean"] = mean(column)
                row[f"rewards/{name}/std"] = pstdev(known(column)) if known(column) else None
                row[f"rewards/{name}/missing"] = int(column.isnan().sum())
        return row


def count_errors(judged: Judged) -> dict[str, int]:
    """How often the verifier failed: it raised or returned what is no reward; it ran out of time.

    Both and abstentions are missing rewards.
    """
    raised = [error["error"] for error in judged.errors if error["error"] != ABSTAINED]
    late = sum(error.startswith(f"{VerifierTimeout.__name__}: ") for error in raised)
    return {"verifier_errors": len(raised) - late, "verifier_timeouts": late}


def no_reward(judged: Judged, step: int) -> str | None:
    """The warning for a step in which every reward is missing, and why; None for another one."""
    if not bool(judged.reward.isnan().all()):
        return None
    why = "the verifier abstained"
    raised = [error["error"] for error in judged.errors if error["error"] != ABSTAINED]
    if raised:  # the last one: of several rewards, the verifier's own come first
        said = raised[-1].strip().splitlines()[0][:200]
        why = f"the last of {len(raised)} errors of the verifier: {said}"
        why += " (Run.errors, errors.jsonl)"
    return f"step {step}: none of {len(judged.reward)} responses has a reward; {why}"


def known(values: Tensor) -> list[float]:
    """Those that are not missing."""
    return [value for value in values.tolist() if not math.isnan(value)]


def mean(values: Tensor) -> float | None:
    """Of those that are not missing; None where all are."""
    found = known(values)
    return fmean(found) if found else None


def fingerprint(model: Any) -> str:
    """A checksum of a model's weights: another reward model makes another run."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in model.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def reward_settings(
    row: Algorithm,
    reward_model: Any,
    weights: Mapping[str, float] | None,
    score_normalization: str,
) -> dict[str, Any]:
    """What a record says of where the reward comes from. ValueError for a bad normalisation."""
    if score_normalization not in SCORE_NORMALIZATIONS:
        raise ValueError(
            f"score_normalization: found {score_normalization!r}; wanted one of "
            f"{', '.join(SCORE_NORMALIZATIONS)}"
        )
    if row.reward == "several":
        return {"reward_weights": None if weights is None else dict(weights)}
    if row.reward == "reward_model":
        return {
            "reward_model": fingerprint(reward_model),
            "score_normalization": score_normalization,
        }
    if score_normalization != "none":
        raise ValueError(f"score_normalization: {row.name} has no score; wanted none")
    return {}
