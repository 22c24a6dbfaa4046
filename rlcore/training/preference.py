r"""The loop of every method that learns from preference pairs without a reward model.

One row of `rlcore.preferences` decides what differs between DPO, SimPO, ORPO, KTO and the others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.checks import check_whole
from rlcore.devices import using_precision, using_threads
from rlcore.evaluation import evaluate
from rlcore.models import check_length, check_vocabulary
from rlcore.preferences import (
    DPO,
    PreferenceMethod,
    UnpairedMethod,
    compute_preference_loss,
    compute_unpaired_loss,
)
from rlcore.tasks import PreferencePairs, Task
from rlcore.training.loop import Place, run_loop
from rlcore.training.pairs import (
    Kept,
    all_logprobs,
    batch_order,
    encode_pairs,
    encode_rows,
    numbers,
    prepare,
    row_logprobs,
    update,
)
from rlcore.training.processes import ALONE, Processes
from rlcore.training.record import Recorder, Run
from rlcore.training.sharding import coupled


def train_preference(
    model: Any,
    tokenizer: Any,
    pairs: PreferencePairs,
    method: PreferenceMethod | UnpairedMethod,
    *,
    steps: int,
    batch_size: int = 64,
    micro_batch_size: int | None = None,
    learning_rate: float,
    final_learning_rate: float = 0.1,
    max_grad_norm: float = 1.0,
    held_out: PreferencePairs | None = None,
    task: Task | None = None,
    seed: int,
    evaluate_every: int = 0,
    evaluate_n: int = 512,
    checkpoint_every: int = 50,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    trackers: Sequence[str] = (),
    progress: bool = True,
    threads: int | None = None,
    precision: str = "float32",
    device: str | torch.device | None = None,
    shard: bool = False,
) -> Run:
    r"""Train `model` in place on preference pairs by one row of `rlcore.preferences`.

    A step takes `batch_size` pairs, in an order that depends on `seed` alone (so two methods see
    the same batches), and makes one update (AdamW, betas 0.9, 0.99, no weight decay; the learning
    rate falls linearly to `final_learning_rate` times `learning_rate`). Dropout is off.
    The reference is the model as it is given: its log-probs are computed once for every pair,
    before the first step, and kept in the checkpoint. No second model stays in memory.
    KTO takes the responses singly: a step has 2 batch_size of them, the chosen ones desirable, the
    rejected ones not. $z_0$ comes from mismatched pairs, the response of each with another prompt
    of the data: they are drawn once, so that their reference log-probs are computed once too, and a
    step takes those of its own rows. (TRL shifts the responses within a batch, also once.)
    micro_batch_size: pairs per forward pass (None: all); the parts add up to the same gradient.
    held_out: pairs to measure on at each evaluation, under the names of the metrics with `eval_`
    before them, as TRL writes them. task: the task on whose held-out problems the policy's true
    reward is measured, see `evaluate`. The steps of evaluation are as in `train_policy`; without
    both there is none.
    Other arguments, shard too, and what is raised: see `train_sft`.

    Metrics per step: loss, grad_norm, learning_rate and the statistics of the method's loss, under
    TRL's names (rewards/chosen, rewards/rejected, rewards/accuracies, rewards/margins,
    logps/chosen, logps/rejected, ...; KTO: kl for $z_0$).

    Raises ValueError for a bad argument, for a sequence longer than the model has positions for,
    for fewer pairs than batch_size, and where KTO has pairs of one prompt only.
    """
    if not isinstance(method, PreferenceMethod | UnpairedMethod):
        raise ValueError(
            f"method: found {getattr(method, 'name', method)!r}; wanted a row over pairs of "
            "rlcore.preferences (a reward model: train_reward_model)"
        )
    check_whole(1, evaluate_n=evaluate_n)
    check_vocabulary(model, tokenizer)
    setup = prepare(
        model,
        pairs,
        method,
        steps=steps,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        learning_rate=learning_rate,
        final_learning_rate=final_learning_rate,
        max_grad_norm=max_grad_norm,
        held_out=held_out,
        seed=seed,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        out=out,
        resume=resume,
        trackers=trackers,
        device=device,
        precision=precision,
        shard=shard,
    )

    world, trained = setup.world, model if setup.twin is None else setup.twin
    coupling = coupled(model, setup.twin, setup.optimizer, world)
    with using_threads(threads), using_precision(precision), coupling:
        at_once = 2 * (micro_batch_size or batch_size)
        kinds = {PreferenceMethod: Paired, UnpairedMethod: Single}
        data: Paired | Single = kinds[type(method)](
            method, model, tokenizer, pairs, at_once, world, seed=seed
        )
        extra: dict[str, torch.nn.Module] = {"reference": data.reference}
        measured = None
        if held_out is not None:
            # KTO has no loss over pairs; its rewards are those of DPO.
            same = method if isinstance(method, PreferenceMethod) else _as_pairs(method)
            measured = Paired(same, model, tokenizer, held_out, at_once, world)
            extra["held_out_reference"] = measured.reference

        def one_step(place: Place) -> tuple[dict[str, Any], dict[str, float | None]]:
            chosen = batch_order(data.n, data.per_pair * batch_size, place.step, seed)
            rows = torch.tensor(chosen, device=model.device)
            data.begin(model, rows, at_once, world)
            row = update(
                model,
                setup.optimizer,
                rows,
                lambda part: data.forward(trained, part),
                data.loss,
                micro_batch_size=micro_batch_size and data.per_pair * micro_batch_size,
                max_grad_norm=max_grad_norm,
                batch={"rows": rows, "input_ids": data.rows.ids, "mask": data.rows.mask},
                world=world,
                twin=setup.twin,
            )
            shown = {"loss": row["loss"], "margin": row.get("rewards/margins")}
            return row, {**shown, "accuracy": row.get("rewards/accuracies")}

        def evaluation(stop: Callable[[], bool]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            if measured is not None:
                found |= measured.measure(model, at_once, isinstance(method, PreferenceMethod))
            if task is not None:
                found |= evaluate(
                    model, tokenizer, task, n=evaluate_n, allow_unrated=True, stop=stop
                )
            return found

        return run_loop(
            model,
            tokenizer,
            setup.optimizer,
            one_step,
            title=f"{method.title} on pairs",
            recorder=Recorder(Run(setup.settings), out, world, trackers),
            learning_rate=setup.rate,
            steps=steps,
            seed=seed,
            evaluation=None if held_out is None and task is None else evaluation,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            progress=progress,
            extra=extra,
            world=world,
            divided=(batch_size, "pairs"),
        )


def _as_pairs(method: UnpairedMethod) -> PreferenceMethod:
    return PreferenceMethod(name=method.name, title=DPO.title, source="", beta=method.beta)


class Paired:
    """A row over pairs and its data: chosen response i is row i, the rejected one row n+i."""

    per_pair = 1  # rows of the order that make a pair

    def __init__(
        self,
        method: PreferenceMethod,
        model: Any,
        tokenizer: Any,
        pairs: PreferencePairs,
        at_once: int,
        world: Processes = ALONE,
        *,
        seed: int = 0,
    ) -> None:
        self.method, self.n = method, len(pairs)
        self.rows = encode_pairs(tokenizer, pairs, model.device)
        check_length(model, self.rows.ids.shape[1])
        reference = None
        if method.needs_reference:
            reference = all_logprobs(model, self.rows, at_once, world)
        self.reference = Kept(**({} if reference is None else {"logprobs": reference}))
        self.width, self.totals = 0, dict[str, Any]()

    def begin(self, model: Any, pairs: Tensor, at_once: int, world: Processes = ALONE) -> None:
        """What the parts of a step share: the width, and what their losses divide by."""
        self.width = self.rows.width(torch.cat([pairs, pairs + self.n]))
        tokens = int(self.rows.mask[pairs].sum())
        self.totals = {"total": len(pairs), "token_total": tokens}

    def forward(self, model: Any, pairs: Tensor) -> Sequence[Tensor]:
        """Log-probs of the chosen and of the rejected responses, in one forward pass."""
        both = torch.cat([pairs, pairs + self.n])
        return row_logprobs(model, self.rows, both, self.width).split(len(pairs))

    def loss(self, pairs: Tensor, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss on some pairs of the step, from what `forward` gave for them."""
        sides, last = (pairs, pairs + self.n), self.width - 1
        known = dict(self.reference.named_buffers())
        reference = [known["logprobs"][s, :last] if known else None for s in sides]
        return compute_preference_loss(
            self.method,
            *logprobs,
            *(self.rows.mask[s, :last] for s in sides),
            ref_chosen_logprobs=reference[0],
            ref_rejected_logprobs=reference[1],
            **self.totals,
        )

    @torch.no_grad()
    def measure(self, model: Any, at_once: int, with_loss: bool) -> dict[str, float]:
        """The statistics on all pairs, and the loss."""
        every = torch.arange(self.n, device=model.device)
        self.begin(model, every, at_once)
        logprobs = all_logprobs(model, self.rows, at_once)
        loss, stats = self.loss(every, logprobs.split(self.n))
        return numbers({"loss": loss, **stats} if with_loss else stats, "eval_")


class Single:
    """A row over single responses and its data: those of the pairs, one by one."""

    per_pair = 2

    def __init__(
        self,
        method: UnpairedMethod,
        model: Any,
        tokenizer: Any,
        pairs: PreferencePairs,
        at_once: int,
        world: Processes = ALONE,
        *,
        seed: int,
    ) -> None:
        self.method, self.n = method, 2 * len(pairs)
        self.rows = encode_pairs(tokenizer, pairs, model.device)
        self.desirable = torch.arange(self.n, device=model.device) < len(pairs)
        prompts, others = pairs.prompts * 2, mismatched(pairs.prompts * 2, seed)
        responses, none = pairs.chosen + pairs.rejected, (False,) * len(pairs)
        cut = (pairs.chosen_cut or none) + (pairs.rejected_cut or none)
        self.mismatched = encode_rows(
            tokenizer,
            prompts,
            [responses[i] for i in others],
            [cut[i] for i in others],
            model.device,
        )
        check_length(model, max(self.rows.ids.shape[1], self.mismatched.ids.shape[1]))
        self.reference = Kept(
            logprobs=all_logprobs(model, self.rows, at_once, world),
            mismatched_logps=all_logprobs(model, self.mismatched, at_once, world).sum(1),
        )
        self.width, self.total, self.log_ratios = 0, 0, torch.zeros(0)

    @torch.no_grad()
    def begin(self, model: Any, rows: Tensor, at_once: int, world: Processes = ALONE) -> None:
        """What the parts of a step share: the width, and the mismatched pairs of all its rows."""
        self.width, self.total = self.rows.width(rows), len(rows)
        width = self.mismatched.width(rows)

        def some(own: slice) -> Tensor:
            logps = []
            for part in rows[own].split(at_once):
                logprobs = row_logprobs(model, self.mismatched, part, width)
                mask = self.mismatched.mask[part, : width - 1]
                logps.append(logprobs.masked_fill(~mask, 0.0).sum(1))
            return torch.cat(logps)

        logps = torch.cat(world.rows(len(rows), some))
        self.log_ratios = logps - self.reference.get_buffer("mismatched_logps")[rows]

    def forward(self, model: Any, rows: Tensor) -> Sequence[Tensor]:
        """Log-probs of the responses."""
        return (row_logprobs(model, self.rows, rows, self.width),)

    def loss(self, rows: Tensor, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss on some rows of the step, from what `forward` gave for them."""
        last = self.width - 1
        return compute_unpaired_loss(
            self.method,
            logprobs[0],
            self.reference.get_buffer("logprobs")[rows, :last],
            self.rows.mask[rows, :last],
            self.desirable[rows],
            mismatched_log_ratios=self.log_ratios,
            total=self.total,
        )


def mismatched(prompts: Sequence[str], seed: int) -> list[int]:
    """For each row another row, whose prompt is a different one: the next such in a random order.

    ValueError where all prompts are one.
    """
    if len(set(prompts)) < 2:
        raise ValueError("pairs: all have one prompt; wanted two prompts at least, for mismatches")
    order = list(range(len(prompts)))
    random.Random(f"mismatched/{seed}").shuffle(order)
    found = [0] * len(order)
    # Backwards, twice around the circle: the answer is the row that follows, or that row's answer.
    for _ in range(2):
        for here, following in zip(order[::-1], [order[0], *order[:0:-1]], strict=True):
            other = prompts[following] != prompts[here]
            found[here] = following if other else found[following]
    return found
