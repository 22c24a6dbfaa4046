"""The frame of every training loop: steps, interrupts, checkpoints, records.

What one step does is the business of `sft.py` and `policy.py`; what happens around it is here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.checks import brief
from rlcore.models import save
from rlcore.objectives import RewardHistory
from rlcore.training.checkpoint import (
    as_tuples,
    get_random_state,
    read_checkpoint,
    seeded,
    set_random_state,
    write_checkpoint,
)
from rlcore.training.interrupt import deferred_interrupt
from rlcore.training.progress import Progress
from rlcore.training.record import Recorder, Run


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite. `batch` holds the tensors of the step.

    The weights are those of the update before: nothing was trained on it.
    """

    def __init__(self, what: str, batch: dict[str, Any]) -> None:
        super().__init__(what)
        self.batch = batch


@dataclass
class Place:
    """Where the run is: with weights and optimizer, all that the next step depends on."""

    step: int
    data: random.Random  # draws problems and demonstrations
    generator: torch.Generator  # draws responses
    history: RewardHistory | None = None  # the rewards that prompts have had, where a row asks

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "data": self.data.getstate(),
            "generator": self.generator.get_state(),
            "random": get_random_state(),
            "history": None if self.history is None else self.history._asdict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.data.setstate(as_tuples(state["data"]))
        self.generator.set_state(state["generator"])
        saved = state["history"]
        self.history = None if saved is None else RewardHistory(**saved)
        set_random_state(state["random"])


def run_loop(
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    one_step: Callable[[Place], tuple[dict[str, Any], dict[str, float | None]]],
    *,
    title: str,
    recorder: Recorder,
    learning_rate: Callable[[int], float],
    steps: int,
    seed: int,
    evaluation: Callable[[], dict[str, Any]] | None,
    evaluate_every: int,
    checkpoint_every: int,
    resume: bool,
    progress: bool,
    extra: Mapping[str, torch.nn.Module | torch.optim.Optimizer] | None = None,
) -> Run:
    """Call `one_step` until `steps` are done; it returns a row of metrics, and what to show.

    An interrupt (Ctrl-C, a kernel's stop button) lets the step under way finish; a second one does
    not. Either way what was done is kept: the run is returned with `interrupted`, the model is as
    trained so far, and the folder, if there is one, has a checkpoint to resume from.
    extra: models and optimizers that belong to the run besides the policy's, kept in its
    checkpoints.
    """
    run, path = recorder.run, recorder.checkpoint
    place = Place(0, random.Random(f"{title}/{seed}"), torch.Generator().manual_seed(seed))
    kept = {"model": model, "optimizer": optimizer, **(extra or {})}
    with seeded(seed), deferred_interrupt() as stop:
        seconds = 0.0
        saved = read_checkpoint(path, run.settings) if resume and path is not None else None
        if saved is not None:
            try:
                for name, part in kept.items():
                    part.load_state_dict(saved[name])
                place.restore(saved)
                seconds = float(saved["seconds"])
            except Exception as error:
                raise ValueError(f"resume: {path} is damaged ({brief(error)})") from error
        recorder.begin(place.step, seconds)
        boundary = place.state()
        moved: list[bool] = []  # not empty: the weights are no longer those of the boundary
        hooks = [
            part.register_step_pre_hook(lambda *_: moved.append(True))
            for part in kept.values()
            if isinstance(part, torch.optim.Optimizer)
        ]

        def checkpoint() -> None:
            if path is not None:
                states = {name: part.state_dict() for name, part in kept.items()}
                rest = {"settings": run.settings, "seconds": run.seconds}
                write_checkpoint(path, {**boundary, **states, **rest})

        bar = Progress(title, steps, place.step, progress)
        try:
            if place.step == 0 and evaluation is not None and evaluate_every:
                recorder.add("evaluations", {"step": 0, **evaluation()})
            while place.step < steps and not stop():
                rate = learning_rate(place.step)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                row, shown = one_step(place)
                place.step += 1
                boundary = place.state()
                moved.clear()
                recorder.add("metrics", {"step": place.step, **row, "learning_rate": rate})
                last = place.step == steps
                due = evaluate_every and (last or place.step % evaluate_every == 0)
                if evaluation is not None and due:
                    recorder.add("evaluations", {"step": place.step, **evaluation()})
                if checkpoint_every and not last and place.step % checkpoint_every == 0:
                    checkpoint()
                bar.step(**shown)
            run.finished = place.step == steps
            run.interrupted = not run.finished
        except KeyboardInterrupt:
            run.interrupted = True
        except NonFiniteError as error:
            where = ""
            if recorder.folder is not None:
                file = recorder.folder / f"nonfinite-step-{place.step + 1}.pt"
                write_checkpoint(file, error.batch)
                where = f"; the batch is in {file}"
            recorder.describe("failed")
            message = f"step {place.step + 1}: {error}{where}; nothing was trained on it"
            raise NonFiniteError(message, error.batch) from error
        except BaseException:
            recorder.describe("failed")
            raise
        finally:
            for hook in hooks:
                hook.remove()
            bar.close()
        if not moved:
            checkpoint()
        if recorder.folder is not None:
            save(model, tokenizer, recorder.folder / "model")
        recorder.describe("finished" if run.finished else "interrupted")
    return run


def apply_gradient(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss: float,
    max_grad_norm: float,
    batch: dict[str, Any],
) -> float:
    """Check, clip and apply the gradient; returns its norm before clipping.

    Raises NonFiniteError, before the weights move, when loss or norm is not finite.
    """
    norm = clip_gradient(model, loss, max_grad_norm, batch)
    optimizer.step()
    return norm


def clip_gradient(
    model: Any, loss: float, max_grad_norm: float, batch: dict[str, Any], whose: str = ""
) -> float:
    """Check and clip the gradient of a model; returns its norm before.

    A parameter without a gradient gets 0, so that a step in which every row was skipped moves the
    weights by the optimizer's momentum, exactly as a step of zero gradients does.
    Raises NonFiniteError when loss or norm is not finite; `whose` they are goes into the message.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise NonFiniteError(f"the {whose}{name} is {value}", batch)
    return norm
