"""The loop of a reward model: a scalar model learns from preference pairs what a rater likes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.devices import using_precision, using_threads
from rlcore.models import _head, check_length, check_vocabulary, response_rewards, token_values
from rlcore.preferences import REWARD_MODEL, RewardModelMethod, compute_reward_model_loss
from rlcore.tasks import PreferencePairs
from rlcore.training.loop import NonFiniteError, Place, run_loop
from rlcore.training.pairs import Rows, batch_order, encode_pairs, numbers, prepare, update
from rlcore.training.record import Recorder, Run


def train_reward_model(
    model: Any,
    tokenizer: Any,
    pairs: PreferencePairs,
    *,
    method: RewardModelMethod = REWARD_MODEL,
    steps: int,
    batch_size: int = 64,
    micro_batch_size: int | None = None,
    learning_rate: float,
    final_learning_rate: float = 0.1,
    max_grad_norm: float = 1.0,
    held_out: PreferencePairs | None = None,
    seed: int,
    evaluate_every: int = 0,
    checkpoint_every: int = 50,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    trackers: Sequence[str] = (),
    progress: bool = True,
    threads: int | None = None,
    precision: str = "float32",
    device: str | torch.device | None = None,
) -> Run:
    r"""Train a scalar model (`build_scalar_model`) in place, so that chosen scores above rejected.

    The loss is that of `reward_model_loss`, with the pairs' margins where they have them. The order
    of the pairs, the optimizer and the learning rate are those of `train_preference`; dropout is
    off. The score of a response is read at its last token, the terminal one where it has one.
    held_out: pairs to measure on at each evaluation. Other arguments, and what is raised: see
    `train_preference`; ValueError for a model without a scalar head too.

    Metrics per step, under TRL's names: loss, accuracy (share of pairs with the chosen response
    ahead), margin (mean of chosen minus rejected), min_reward, mean_reward, max_reward, grad_norm,
    learning_rate. Evaluations: the same of the held-out pairs, `eval_` before them, and where their
    true rewards are known `eval_true_accuracy`: the share of the pairs of unlike true reward that
    the model orders as the true reward does. That has no noise of the rater in it; eval_accuracy
    cannot be expected above `PreferencePairs.agreement`.
    """
    if not isinstance(method, RewardModelMethod):
        raise ValueError(
            f"method: found {getattr(method, 'name', method)!r}; wanted a RewardModelMethod"
        )
    _head(model)
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
    )
    data = Scored(tokenizer, pairs, model, method)
    measured = None if held_out is None else Scored(tokenizer, held_out, model, method)

    def one_step(place: Place) -> tuple[dict[str, Any], dict[str, float | None]]:
        order = batch_order(len(pairs), batch_size, place.step, seed)
        rows = torch.tensor(order, device=model.device)
        row = update(
            model,
            setup.optimizer,
            rows,
            lambda part: data.forward(model, part),
            lambda part, rewards: data.loss(part, rewards, total=len(rows)),
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            batch={"rows": rows, "input_ids": data.rows.ids, "mask": data.rows.mask},
            world=setup.world,
        )
        return row, {name: row[name] for name in ("loss", "accuracy", "margin")}

    with using_threads(threads), using_precision(precision):
        return run_loop(
            model,
            tokenizer,
            setup.optimizer,
            one_step,
            title=f"{method.title} on pairs",
            recorder=Recorder(Run(setup.settings), out, setup.world, trackers),
            learning_rate=setup.rate,
            steps=steps,
            seed=seed,
            evaluation=None
            if measured is None
            else lambda stop: measured.measure(model, micro_batch_size or batch_size),
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            progress=progress,
            world=setup.world,
            divided=(batch_size, "pairs"),
        )


class Scored:
    """Pairs as a reward model reads them: chosen response i is row i, the rejected one row n+i."""

    def __init__(
        self, tokenizer: Any, pairs: PreferencePairs, model: Any, method: RewardModelMethod
    ) -> None:
        self.method, self.n, self.pairs = method, len(pairs), pairs
        self.rows: Rows = encode_pairs(tokenizer, pairs, model.device)
        check_length(model, self.rows.ids.shape[1])
        self.margins = torch.tensor(pairs.margins, device=model.device) if pairs.margins else None

    def forward(self, model: Any, pairs: Tensor) -> Sequence[Tensor]:
        """Rewards of the chosen and of the rejected responses, in one forward pass."""
        both = torch.cat([pairs, pairs + self.n])
        width = self.rows.width(both)
        ids, real = self.rows.ids[both, :width], self.rows.real(both, width)
        rewards = finite(model, ids, real)
        return rewards.split(len(pairs))

    def loss(
        self, pairs: Tensor, rewards: Sequence[Tensor], total: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss on some pairs of a step of `total`, from what `forward` gave for them."""
        margin = None if self.margins is None else self.margins[pairs]
        return compute_reward_model_loss(self.method, *rewards, margin=margin, total=total)

    @torch.no_grad()
    def measure(self, model: Any, at_once: int) -> dict[str, float]:
        """The loss and the statistics on all pairs."""
        every = torch.arange(self.n, device=model.device)
        seen = [self.forward(model, part) for part in every.split(at_once)]
        rewards = [torch.cat(column) for column in zip(*seen, strict=True)]
        loss, stats = self.loss(every, rewards, self.n)
        found = numbers({"loss": loss, **stats}, "eval_")
        if self.pairs.chosen_rewards:
            true = torch.tensor([self.pairs.chosen_rewards, self.pairs.rejected_rewards])
            gap, said = (true[0] - true[1]).sign(), (rewards[0] - rewards[1]).sign().cpu()
            unlike = gap != 0
            if bool(unlike.any()):
                found["eval_true_accuracy"] = float((said == gap)[unlike].double().mean())
        return found


def finite(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    """The rewards of rows, checked: NonFiniteError where one is not a finite number."""
    try:
        return response_rewards(model, ids, real.long())
    except ValueError as error:
        if "finite" not in str(error):
            raise
        with torch.no_grad():
            values = token_values(model, ids, real.long())
        batch = {"input_ids": ids, "mask": real, "rewards_by_token": values}
        raise NonFiniteError("the model's rewards are not finite", batch) from error
