"""The frame of every training loop: steps, interrupts, checkpoints, records.

What one step does is the business of `sft.py` and `policy.py`; what happens around it is here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlcore.checks import brief
from rlcore.evaluation import EvaluationStopped
from rlcore.files import WriteError
from rlcore.models import save
from rlcore.objectives import RewardHistory
from rlcore.training.adapters import checkpointed
from rlcore.training.checkpoint import (
    as_tuples,
    get_random_state,
    read_checkpoint,
    seeded,
    set_random_state,
    write_checkpoint,
)
from rlcore.training.interrupt import deferred_interrupt
from rlcore.training.nonfinite import diagnose
from rlcore.training.processes import ALONE, Processes
from rlcore.training.progress import Progress, warn
from rlcore.training.record import Recorder, Run
from rlcore.training.timing import Timings


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite. `batch` holds the tensors of the step.

    The weights are those of the update before: nothing was trained on it. Where it is the weights
    that an update made infinite, the last checkpoint is good. found: what is not finite, and the
    likely cause, see `diagnose`. run: as far as it came.
    """

    def __init__(
        self,
        what: str,
        batch: dict[str, Any],
        run: Run | None = None,
        found: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(what)
        self.batch, self.run, self.found = batch, run, found or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.batch)  # it may cross from one process to others


@dataclass
class Place:
    """Where the run is: with weights and optimizer, all that the next step depends on."""

    step: int
    data: random.Random  # draws problems and demonstrations
    generator: torch.Generator  # draws responses
    history: RewardHistory | None = None  # the rewards that prompts have had, where a row asks
    timings: Timings = field(default_factory=Timings)

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
    evaluation: Callable[[Callable[[], bool]], dict[str, Any]] | None,
    evaluate_every: int,
    checkpoint_every: int,
    resume: bool,
    progress: bool,
    extra: Mapping[str, torch.nn.Module | torch.optim.Optimizer] | None = None,
    world: Processes = ALONE,
    divided: tuple[int, str] = (0, ""),
) -> Run:
    """Call `one_step` until `steps` are done; it returns a row of metrics, and what to show.

    An interrupt (Ctrl-C, a kernel's stop button, SIGTERM) lets the step under way finish, but no
    evaluation: that is given up at its next batch, and a resumed run makes it. A second one does
    not wait for the step, only for a file that is being written. Either way what was done is kept:
    the run is returned with `interrupted`, the model is as trained so far, and the folder, if there
    is one, has a checkpoint to resume from. After a SIGTERM the process then ends, see
    `deferred_interrupt`.
    evaluation: called with what says whether to give up, see `evaluate`.
    extra: models and optimizers that belong to the run besides the policy's, kept in its
    checkpoints.
    divided: what of each step the processes share out, and how many. The main one alone evaluates
    and writes; a signal to any of them stops all after the same step.
    The folder is locked meanwhile: ValueError where another run is writing it.
    Raises NonFiniteError, and WriteError where the folder takes no more (a full disk): both have
    the run so far as `run`, and the last good checkpoint stays.
    """
    world.check(recorder.run.settings)
    run, path = recorder.run, recorder.checkpoint
    place = Place(0, random.Random(f"{title}/{seed}"), torch.Generator().manual_seed(seed))
    kept = {"model": checkpointed(model), "optimizer": optimizer, **(extra or {})}
    with recorder.alone(), seeded(seed), deferred_interrupt(world.size > 1) as stop:
        seconds, good = 0.0, None  # the last good checkpoint's
        saved = None
        if resume and path is not None:
            saved = world.from_main(lambda: read_checkpoint(path, run.settings))
            if saved is None and world.is_main:  # also without a bar: it may be another folder
                warn(f"resume: {path.parent} holds no checkpoint; the run starts anew")
        if saved is not None:
            try:
                for name, part in kept.items():
                    part.load_state_dict(saved[name])
                place.restore(saved)
                seconds, good = float(saved["seconds"]), place.step
            except Exception as error:
                raise ValueError(f"resume: {path} is damaged ({brief(error)})") from error

        def stopped(error: WriteError) -> WriteError:
            whole = WriteError(f"{error}{told(path, good, place.step)}", error, run)
            whole.add_note("Model and `run` of this error are usable.")  # in Python, not in a shell
            return whole

        try:
            recorder.begin(place.step, seconds)
        except WriteError as error:
            raise stopped(error) from error
        boundary = place.state()
        rate = learning_rate(place.step)
        moved: list[bool] = []  # not empty: the weights are no longer those of the boundary
        hooks = [
            part.register_step_pre_hook(lambda *_: moved.append(True))
            for part in kept.values()
            if isinstance(part, torch.optim.Optimizer)
        ]

        def checkpoint() -> None:
            nonlocal good
            states = {name: part.state_dict() for name, part in kept.items()}
            rest = {"settings": run.settings, "seconds": run.seconds}
            recorder.write_checkpoint({**boundary, **states, **rest})
            good = boundary["step"]

        def measure() -> None:
            """Evaluate where that is due and was not done, as when it was interrupted."""
            due = evaluate_every and (place.step == steps or place.step % evaluate_every == 0)
            done = any(row["step"] == place.step for row in run.evaluations)
            if evaluation is not None and due and not done:
                with place.timings.part("evaluation"):
                    found = world.from_main(lambda: evaluation(stop))
                recorder.add("evaluations", {"step": place.step, **found})

        def finish() -> None:
            if recorder.folder is not None:
                save(model, tokenizer, recorder.folder / "model")
            recorder.describe("finished" if run.finished else "interrupted")

        bar = Progress(title, steps, place.step, progress and world.is_main)
        if world.size > 1:
            bar.say(world.words(*divided))
        try:
            measure()
            while place.step < steps and not world.any(stop()):
                rate = learning_rate(place.step)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                with place.timings.part("seconds"):
                    row, shown = one_step(place)
                with stop.held():  # a step is done for the log and for a checkpoint, or for neither
                    place.step += 1
                    boundary = place.state()
                    moved.clear()
                    recorder.add("metrics", {"step": place.step, **row, "learning_rate": rate})
                    recorder.add("timings", {"step": place.step, **place.timings.take()})
                measure()
                if checkpoint_every and place.step < steps and place.step % checkpoint_every == 0:
                    with stop.held(), place.timings.part("checkpoint"):
                        checkpoint()
                bar.step(**shown)
            run.finished = place.step == steps
        except EvaluationStopped:  # in all processes: it came to them from the main one
            pass
        except KeyboardInterrupt:
            if world.size > 1:  # no signal raised it, and the other processes know nothing of it
                recorder.give_up()
                raise
        except NonFiniteError as error:
            parts = {n: part for n, part in kept.items() if isinstance(part, torch.nn.Module)}
            found = diagnose(parts, error.batch, run.metrics, rate, bool(moved))
            where = "" if moved and found["weights"] else "; nothing was trained on it"
            if recorder.folder is not None:
                file = recorder.folder / f"nonfinite-step-{place.step + 1}.pt"
                try:
                    write_checkpoint(file, {**error.batch, "found": found})
                    where = f"; the batch is in {file}{where}"
                except WriteError as second:
                    where = f"; {second}{where}"
            recorder.give_up()
            message = f"step {place.step + 1}: {error}{where}; likely cause: {found['cause']}"
            raise NonFiniteError(message, error.batch, run, found) from error
        except WriteError as error:
            recorder.give_up()
            raise stopped(error) from error
        except BaseException:
            recorder.give_up()
            raise
        finally:
            for hook in hooks:
                hook.remove()
            bar.close()
            recorder.close()
        run.interrupted = not run.finished
        stop.hold()
        try:
            if not moved:
                checkpoint()
            world.gather(finish)
        except WriteError as error:
            raise stopped(error) from error
    return run


def told(path: Path | None, good: int | None, step: int) -> str:
    """Where a run stands that could not be written down, for the message."""
    kept = f"the last good checkpoint, {path}, is of step {good}: resume goes on from it"
    if good is None:
        kept = "there is no checkpoint yet"
    return f". The run stopped after step {step}; {kept}"


def apply_gradient(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss: float,
    max_grad_norm: float,
    batch: dict[str, Any],
    world: Processes = ALONE,
    twin: Any = None,
) -> float:
    """Check, clip and apply the gradient; returns its norm before clipping.

    twin: has the gradient, and is what the optimizer moves, see `sharding.py`.

    Raises NonFiniteError, before the weights move, when loss or norm is not finite; and after it
    when they are not, so that they come into no checkpoint.
    """
    trained = model if twin is None else twin
    norm = clip_gradient(trained, loss, max_grad_norm, batch, world=world)
    optimizer.step()
    check_weights(model, batch)
    return norm


def check_weights(model: Any, batch: dict[str, Any], whose: str = "") -> None:
    """Raises NonFiniteError when an update made a weight of the model infinite or NaN."""
    weights = [p.detach() for p in model.parameters() if p.requires_grad]
    # A sum costs a tenth of looking at each entry, and no NaN or infinity is lost in it.
    total = torch.stack([weight.sum().double() for weight in weights]).sum()
    if not math.isfinite(total) and not all(bool(w.isfinite().all()) for w in weights):
        raise NonFiniteError(f"the update made {whose}weights that are not finite", batch)


def clip_gradient(
    model: Any,
    loss: float,
    max_grad_norm: float,
    batch: dict[str, Any],
    whose: str = "",
    world: Processes = ALONE,
) -> float:
    """Add up the processes' gradients of a model, check and clip the sum; its norm before.

    A parameter without a gradient gets 0, so that a step in which every row was skipped moves the
    weights by the optimizer's momentum, exactly as a step of zero gradients does.
    Raises NonFiniteError when loss or norm is not finite; `whose` they are goes into the message.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    world.sum_gradients(model.parameters())
    parameters = [p for p in model.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):  # before clipping, which would spread a NaN to every gradient
            raise NonFiniteError(f"the {whose}{name} is {value}", batch)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, total)
    return norm
