"""Supervised fine-tuning on a task's demonstrations: the start of every run in this book."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.checks import check_final, check_folder, check_positive, check_seed, check_whole
from rlcore.devices import forward_precision, precision_settings, using_precision, using_threads
from rlcore.evaluation import evaluate
from rlcore.models import check_length, check_vocabulary, encode
from rlcore.objectives.likelihood import sft_loss
from rlcore.objectives.logprobs import token_logprobs
from rlcore.tasks import Task
from rlcore.training.adapters import weight_settings
from rlcore.training.loop import NonFiniteError, Place, apply_gradient, run_loop
from rlcore.training.processes import processes
from rlcore.training.record import Recorder, Run
from rlcore.training.sharding import check_shard, coupled, sharded_twin
from rlcore.training.tracking import check_trackers


def train_sft(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    final_learning_rate: float = 0.0,
    max_grad_norm: float = 1.0,
    seed: int,
    evaluate_every: int = 0,
    evaluate_n: int = 512,
    checkpoint_every: int = 100,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    trackers: Sequence[str] = (),
    progress: bool = True,
    threads: int | None = None,
    precision: str = "float32",
    device: str | torch.device | None = None,
    shard: bool = False,
) -> Run:
    """Maximise the likelihood of fresh demonstrations; `model` is trained in place.

    Loss: mean over all response tokens of the batch, the terminal token included. AdamW
    (betas 0.9, 0.95, no weight decay), the learning rate falls from `learning_rate` to
    `final_learning_rate` times it along a cosine. Dropout is on where the model has it.
    Metrics per step: loss, grad_norm, tokens, learning_rate.
    Under torchrun the processes share out the batch: the loss and its gradient are those of one
    process, up to rounding, without dropout, whose masks each process draws for itself. shard:
    gradient and optimizer state are shared out over them too (FSDP, `sharding.py`).
    out: a run folder, see `record.py`. resume: go on from its checkpoint, with the same bits as
    without the stop; starts anew when there is none yet. trackers: ("tensorboard",) draws the
    curves in a folder of out too (`pip install .[tensorboard]`).
    threads: torch threads during the run (None: as they are). precision: of the forward passes,
    "float32" or "bf16", see `using_precision`; float32 on a GPU too, where `make gpu-check`
    measures both. device: None is CUDA when there is one, else the CPU.

    Raises ValueError for bad arguments and a tokenizer with more ids than the model has
    embeddings, NonFiniteError (with step and batch) when the loss or the
    gradient is not finite, WriteError (an OSError) when the folder takes no more; both errors have
    the run so far, and the last good checkpoint stays.
    """
    check_whole(1, steps=steps, batch_size=batch_size, evaluate_n=evaluate_n)
    check_seed(seed)
    check_whole(0, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every)
    check_positive(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
    check_final(final_learning_rate)
    check_vocabulary(model, tokenizer)
    world = processes(device)
    world.check_enough(batch_size=batch_size)
    check_shard(shard, model, world)
    world.from_main(lambda: check_folder(out, resume))
    check_trackers(trackers, out)
    world.synchronize(model.to(world.device))
    twin = sharded_twin(model, world) if shard else None
    trained = model if twin is None else twin
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, learning_rate, betas=(0.9, 0.95), weight_decay=0)
    settings = {
        "method": "sft",
        "task": task.name,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "final_learning_rate": final_learning_rate,
        "max_grad_norm": max_grad_norm,
        "seed": seed,
        **weight_settings(model),
        **precision_settings(precision),
    }

    def rate(step: int) -> float:
        fall = 0.5 * (1 + math.cos(math.pi * step / steps))
        return learning_rate * (final_learning_rate + (1 - final_learning_rate) * fall)

    def one_step(place: Place) -> tuple[dict[str, Any], dict[str, float | None]]:
        batch = demonstrations(tokenizer, task, batch_size, place.data)
        ids, mask = (tensor.to(model.device) for tensor in batch)
        check_length(model, ids.shape[1])
        own, tokens = world.share(batch_size), int(mask.sum())
        optimizer.zero_grad(set_to_none=True)

        def forward() -> Tensor:
            if world.size > 1:  # dropout: each process has masks of its own, at any step
                name = f"dropout/{seed}/{place.step}/{world.rank}"
                torch.manual_seed(random.Random(name).getrandbits(63))
            trained.train()
            # Padding is on the right, where a causal model never looks: no mask is needed.
            with forward_precision(trained):
                logits = trained(input_ids=ids[own], use_cache=False).logits
            trained.eval()
            logprobs = token_logprobs(logits, ids[own])
            if not bool(logprobs.detach()[mask[own]].isfinite().all()):
                known = {"logprobs": logprobs.detach().masked_fill(~mask[own], 0.0)}
                batch = {"input_ids": ids[own], "mask": mask[own], **known}
                raise NonFiniteError("the loss is not finite", batch)
            return sft_loss(logprobs, mask[own], total=tokens)[0]

        def backward() -> dict[str, float]:
            loss = forward() if twin is None else world.agree(forward)
            loss.backward()
            return {"loss": loss.item()}

        loss = world.sum(backward)["loss"]
        known = {"input_ids": ids, "mask": mask, "statistics": {"loss": loss}}
        norm = apply_gradient(model, optimizer, loss, max_grad_norm, known, world, twin)
        return {"loss": loss, "grad_norm": norm, "tokens": tokens}, {"loss": loss}

    coupling = coupled(model, twin, optimizer, world)
    with using_threads(threads), using_precision(precision), coupling:
        return run_loop(
            model,
            tokenizer,
            optimizer,
            one_step,
            title=f"SFT {task.name}",
            recorder=Recorder(Run(settings), out, world, trackers),
            learning_rate=rate,
            steps=steps,
            seed=seed,
            evaluation=lambda stop: evaluate(
                model, tokenizer, task, n=evaluate_n, allow_unrated=True, stop=stop
            ),
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            progress=progress,
            world=world,
            divided=(batch_size, "demonstrations"),
        )


def demonstrations(tokenizer: Any, task: Task, n: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """`n` demonstrations on fresh training problems: input_ids (n, T) and mask (n, T-1).

    mask[:, t] is True where input_ids[:, t+1] is a token of the response or its end: the same
    shift as `token_logprobs`. It follows lengths, not token ids, so that the end is always learned.
    """
    prompts = [task.draw(rng) for _ in range(n)]
    responses = encode(tokenizer, [task.demonstration(prompt, rng) for prompt in prompts])
    rows = list(zip(encode(tokenizer, prompts), responses, strict=True))
    width = max(len(prompt) + len(response) + 1 for prompt, response in rows)
    ids = torch.full((n, width), tokenizer.pad_token_id)
    mask = torch.zeros((n, width - 1), dtype=torch.bool)
    for i, (prompt, response) in enumerate(rows):
        whole = [*prompt, *response, tokenizer.eos_token_id]
        ids[i, : len(whole)] = torch.tensor(whole)
        mask[i, len(prompt) - 1 : len(whole) - 1] = True
    return ids, mask
