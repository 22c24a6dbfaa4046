"""One update of a policy on a batch of samples: questions 3 to 5, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import Algorithm, compute_loss, step_totals
from rlcore.objectives import entropy, token_logprobs
from rlcore.sampling import Samples, response_logits
from rlcore.training.judge import Judged
from rlcore.training.loop import NonFiniteError, apply_gradient
from rlcore.training.processes import ALONE, Processes


@dataclass
class Batch:
    """The samples of a step and what is known of them before the first update."""

    samples: Samples
    judged: Judged
    advantages: Tensor  # (B,), or (B, T) with a critic
    ref_logprobs: Tensor | None  # (B, T)
    counted: Tensor  # (B,), True for the rows whose loss is part of the step's mean
    used: Tensor  # (B,), those of them that are in forward and backward pass: the others add 0
    returns: Tensor | None = None  # (B, T), the critic's targets
    values: Tensor | None = None  # (B, T), what the critic said at sampling time
    old_logprobs: dict[int, Tensor] = field(default_factory=dict)  # by part, from the first update

    def totals(self, algorithm: Algorithm) -> dict[str, Any]:
        """What the terms of the loss divide by: the responses or tokens that count, used or not."""
        return step_totals(
            algorithm,
            self.samples.response_mask,
            known=self.counted,
            correct=self.judged.correct,
            truncated=self.samples.truncated,
        )

    def parts(self, rows: Tensor, at_once: int | None) -> Sequence[Tensor]:
        """Some rows, at most so many at a time.

        Groups whose longest responses are alike come together, for then little padding is computed;
        a group is not torn more than it must be, for its rows share their prompt.
        """
        if at_once is None or at_once >= len(rows):
            return (rows,) if len(rows) else ()
        groups, lengths = self.samples.group_ids, self.samples.lengths
        longest = lengths.new_zeros(len(groups)).scatter_reduce_(0, groups, lengths, "amax")
        return rows[longest[groups[rows]].sort(stable=True).indices].split(at_once)

    def tensors(self) -> dict[str, Any]:
        """All of it, to be saved for inspection."""
        known = {"reward": self.judged.reward, "advantages": self.advantages}
        critic = {"returns": self.returns, "values": self.values}
        return {**vars(self.samples), **known, **{k: v for k, v in critic.items() if v is not None}}


def update_policy(
    model: Any,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    batch: Batch,
    *,
    temperature: float,
    constant: int,
    micro_batch_size: int | None,
    max_grad_norm: float,
    world: Processes = ALONE,
    twin: Any = None,
) -> dict[str, float]:
    """One forward and backward pass over the rows in use, in parts, and one optimizer step.

    Each process takes its share of those rows, of whatever group; the gradient is that of all.
    twin: the sharded model that is trained in place of `model`, which follows it (`sharding.py`).
    The first call keeps its log-probs in `batch.old_logprobs`: there the ratio is exactly 1, and
    later calls compare with them. Returns loss, grad_norm and the statistics of `policy_loss`.
    Raises NonFiniteError before the weights move.
    """
    samples, mask = batch.samples, batch.samples.response_mask
    # The statistics are means over tokens, or over responses where they have one ratio each.
    weight = mask.sum(1) if algorithm.ratio_level == "token" else torch.ones_like(samples.lengths)
    used, totals = batch.used.nonzero()[:, 0], batch.totals(algorithm)
    parts = batch.parts(used[world.share(len(used))], micro_batch_size)
    trained = model if twin is None else twin
    optimizer.zero_grad(set_to_none=True)

    def forward(number: int, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        width = int(samples.lengths[rows].max())  # columns of padding alone are left out
        columns = samples.input_ids.shape[1] - mask.shape[1] + width
        ids = samples.input_ids[rows, :columns]
        attention, own_mask = samples.attention_mask[rows, :columns], mask[rows, :width]
        advantages, reference = batch.advantages[rows], batch.ref_logprobs
        logits = response_logits(trained, ids, attention, width)
        logprobs = token_logprobs(logits, ids[:, -logits.shape[1] :], temperature=temperature)
        entropies = None
        if algorithm.entropy_coef > 0:
            entropies = entropy(logits[:, :-1], temperature=temperature)
        old = batch.old_logprobs.setdefault(number, logprobs.detach())
        if not bool(logprobs.detach()[own_mask].isfinite().all()):
            new = {"new_logprobs": logprobs.detach().masked_fill(~own_mask, 0.0), "rows": rows}
            message = "the policy's log-probs are not finite"
            raise NonFiniteError(message, {**batch.tensors(), **new})
        return compute_loss(
            algorithm,
            logprobs,
            old,
            advantages if advantages.dim() == 1 else advantages[:, :width],
            own_mask,
            ref_logprobs=None if reference is None else reference[rows, :width],
            constant=constant,
            entropies=entropies,
            correct=batch.judged.correct[rows],
            truncated=samples.truncated[rows],
            **totals,
        )

    def backward() -> dict[str, float]:
        update: dict[str, float] = {"loss": 0.0}
        for number, rows in enumerate(parts):
            work = partial(forward, number, rows)
            loss, stats = work() if twin is None else world.agree(work)
            loss.backward()
            update["loss"] += loss.item()
            share = int(weight[rows].sum()) / int(weight[used].sum())
            for name, value in stats.items():
                part = share
                if name == "nll_loss":  # a mean over the tokens of correct responses alone
                    flags = {
                        "correct": batch.judged.correct[rows],
                        "truncated": samples.truncated[rows],
                    }
                    own = step_totals(algorithm, mask[rows], **flags)
                    part = own["correct_total"] / totals["correct_total"]
                update[name] = update.get(name, 0.0) + part * float(value)
        if twin is not None:
            # The shares of its weights come together in every process or in none: one that has
            # fewer parts than another goes along.
            for _ in range(world.most_parts(len(used), micro_batch_size) - len(parts)):
                world.agree(partial(idle, twin, samples)).backward()
        return update

    update = world.sum(backward)
    known = {**batch.tensors(), "statistics": update}
    norm = apply_gradient(model, optimizer, update["loss"], max_grad_norm, known, world, twin)
    return {**update, "grad_norm": norm}


def idle(model: Any, samples: Samples) -> Tensor:
    """0, through a forward pass of one row."""
    ids, attention = samples.input_ids[:1], samples.attention_mask[:1]
    return 0.0 * response_logits(model, ids, attention, samples.response_mask.shape[1]).sum()
