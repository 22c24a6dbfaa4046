"""The critic in the loop: values at sampling time, and its own update beside the policy's.

The critic and the policy share no parameter, so each has an optimizer and a learning rate of its
own, and the gradient of one says nothing about the other's.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.algorithms import Algorithm
from rlcore.checks import check_positive, check_whole
from rlcore.models import build_scalar_model, token_values
from rlcore.objectives import last_token_values, value_loss
from rlcore.sampling import Samples
from rlcore.training.loop import NonFiniteError, check_weights, clip_gradient
from rlcore.training.processes import ALONE, Processes
from rlcore.training.update import Batch


def without_critic(algorithm: Algorithm) -> Algorithm:
    """The row as the policy's update sees it: the value loss is the critic's business."""
    return replace(algorithm, value_coef=0.0, epsilon_value=None)


def monte_carlo(algorithm: Algorithm) -> Algorithm:
    """The row with the whole return for the critic's target, as value pretraining has it."""
    return replace(algorithm, lam_critic=1.0)


def critic_settings(
    row: Algorithm,
    steps: int,
    learning_rate: float,
    critic_learning_rate: float | None,
    bootstrap_truncated: bool,
    value_pretraining_steps: int | None,
) -> dict[str, Any]:
    """What a record says of the critic (nothing without one). ValueError for a bad value."""
    if not isinstance(bootstrap_truncated, bool):
        raise ValueError(
            f"bootstrap_truncated: found {bootstrap_truncated!r}; wanted True or False"
        )
    if row.advantage != "gae":
        given = {
            "critic_learning_rate": critic_learning_rate,
            "bootstrap_truncated": bootstrap_truncated or None,
            "value_pretraining_steps": value_pretraining_steps,
        }
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: {row.name} has no critic; found {value!r}")
        return {}
    pretraining = value_pretraining_steps
    if pretraining is None:
        pretraining = max(1, round(steps / 10)) if row.value_pretraining and steps > 1 else 0
    check_whole(0, value_pretraining_steps=pretraining)
    if pretraining >= steps:
        raise ValueError(
            f"value_pretraining_steps: found {pretraining}; wanted fewer than steps, {steps}"
        )
    rate = 2 * learning_rate if critic_learning_rate is None else critic_learning_rate
    check_positive(critic_learning_rate=rate)
    return {
        "critic_learning_rate": rate,
        "bootstrap_truncated": bootstrap_truncated,
        "value_pretraining_steps": pretraining,
    }


def start_critic(critic: Any, policy: Any, reward_model: Any, seed: int) -> Any:
    """The scalar model that a run starts with, see `train_policy`."""
    if critic is not None:
        return critic
    if reward_model is not None:
        return copy.deepcopy(reward_model).eval().requires_grad_(True)
    return build_scalar_model(policy, seed=seed, std=0.0)


class Values(NamedTuple):
    """What the critic says of a batch; no gradient."""

    before: Tensor  # (B, T), before each token of the response is drawn
    after: Tensor  # (B,), after its last token


class Critic:
    """A scalar model with its optimizer (AdamW, betas 0.9, 0.99, no weight decay)."""

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        *,
        learning_rate: float,
        max_grad_norm: float,
        rows: int | None,
        world: Processes = ALONE,
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.model, self.algorithm, self.world = model, algorithm, world
        self.learning_rate, self.max_grad_norm, self.rows = learning_rate, max_grad_norm, rows
        self.optimizer = torch.optim.AdamW(
            parameters, learning_rate, betas=(0.9, 0.99), weight_decay=0
        )
        self.kept: Tensor | None = None  # own rows, with their graph, for a step's first update

    def set_rate(self, share: float) -> None:
        """The learning rate, as a share of the first one."""
        for group in self.optimizer.param_groups:
            group["lr"] = share * self.learning_rate

    def look(self, samples: Samples) -> Values:
        """The values at sampling time. NonFiniteError where one is not finite.

        Where the batch goes through in one piece, the first update takes its gradient from this
        forward pass, since nothing has moved until then.
        """
        whole, size = self.rows is None, self.rows or len(samples)

        def some(own: slice) -> Values:
            every, real = samples.input_ids[own], samples.attention_mask[own]
            with torch.set_grad_enabled(whole):
                parts = zip(every.split(size), real.split(size), strict=True)
                found = torch.cat([token_values(self.model, ids, mask) for ids, mask in parts])
            if not bool(found.detach().isfinite().all()):
                batch = {**vars(samples), "critic_values": found.detach()}
                raise NonFiniteError("the critic's values are not finite", batch)
            self.kept = self._before(found, samples) if whole else None
            after = last_token_values(found.detach(), real)
            return Values(self._before(found.detach(), samples), after)

        return Values(*map(torch.cat, zip(*self.world.rows(len(samples), some), strict=True)))

    def _before(self, found: Tensor, samples: Samples) -> Tensor:
        return found[:, -samples.response_mask.shape[1] - 1 : -1]

    def gradient(self, batch: Batch) -> dict[str, float]:
        """The gradient of the value loss over the rows that count, in parts; nothing moves yet.

        Returns val/loss (without its weight), val/grad_norm and the statistics of `value_loss`.
        Raises NonFiniteError.
        """
        samples, row = batch.samples, self.algorithm
        old, returns = batch.values, batch.returns
        assert old is not None
        assert returns is not None
        mask, used = samples.response_mask, batch.counted.nonzero()[:, 0]
        own = self.world.share(len(samples))  # those that it looked at
        clip: dict[str, Any] = {
            "epsilon": row.epsilon_value,
            "total": max(int(mask[used].sum()), 1),
        }
        self.optimizer.zero_grad(set_to_none=True)

        def backward() -> tuple[Tensor, float]:
            said, loss = torch.zeros_like(old), 0.0
            mine = used[(used >= own.start) & (used < own.stop)]
            for rows in mine.split(self.rows or len(mine)) if len(mine) else ():
                if self.kept is not None:
                    values = self.kept[rows - own.start]
                else:
                    found = token_values(
                        self.model, samples.input_ids[rows], samples.attention_mask[rows]
                    )
                    values = self._before(found, samples)
                said[rows] = values.detach()
                if not bool(said[rows].isfinite().all()):
                    known = {**batch.tensors(), "critic_values": said}
                    raise NonFiniteError("the critic's values are not finite", known)
                part, _ = value_loss(
                    values, returns[rows], mask[rows], old_values=old[rows], **clip
                )
                (row.value_coef * part).backward()
                loss += part.item()
            return said[own], loss

        parts = self.world.gather(backward)
        self.kept = None
        said, loss = torch.cat([values for values, _ in parts]), sum(part for _, part in parts)
        tensors, world = batch.tensors(), self.world
        norm = clip_gradient(self.model, loss, self.max_grad_norm, tensors, "critic's ", world)
        # Explained variance is no mean over parts: it is taken of all values at once.
        _, stats = value_loss(
            said, returns, mask & batch.counted[:, None], old_values=old, **clip, allow_empty=True
        )
        numbers = {name: float(value) for name, value in stats.items()}
        return {"val/loss": loss, "val/grad_norm": norm, **numbers}

    def step(self, batch: Batch) -> None:
        """Move the weights by the gradient."""
        self.optimizer.step()
        check_weights(self.model, batch.tensors(), "the critic's ")
