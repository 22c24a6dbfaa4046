"""What the loops over preference pairs share: rows of tokens, their order, one update in parts."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.checks import check_final, check_folder, check_positive, check_seed, check_whole
from rlcore.devices import precision_settings
from rlcore.models import encode, evaluating
from rlcore.objectives.logprobs import token_logprobs
from rlcore.preferences import Method
from rlcore.tasks import PreferencePairs
from rlcore.training.adapters import weight_settings
from rlcore.training.loop import NonFiniteError, apply_gradient
from rlcore.training.processes import ALONE, Processes, processes
from rlcore.training.sharding import check_shard, sharded_twin
from rlcore.training.tracking import check_trackers

Objective = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Setup:
    """A checked run over pairs, ready to begin."""

    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]  # what the record says
    rate: Callable[[int], float]  # the learning rate of a step
    world: Processes
    twin: Any  # the sharded model that is trained in place of the one given, see `sharding.py`


def prepare(
    model: Any,
    pairs: PreferencePairs,
    method: Method,
    *,
    steps: int,
    batch_size: int,
    micro_batch_size: int | None,
    learning_rate: float,
    final_learning_rate: float,
    max_grad_norm: float,
    held_out: PreferencePairs | None,
    seed: int,
    evaluate_every: int,
    checkpoint_every: int,
    out: Any,
    resume: bool,
    trackers: Sequence[str],
    device: Any,
    precision: str,
    shard: bool = False,
) -> Setup:
    """Check the arguments that the loops over pairs share (ValueError), move the model to its
    device and make its optimizer (AdamW, betas 0.9, 0.99, no weight decay)."""
    check_pairs(pairs, batch_size, held_out)
    rows = 1 if micro_batch_size is None else micro_batch_size
    check_whole(1, steps=steps, micro_batch_size=rows)
    check_whole(0, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every)
    check_seed(seed)
    check_positive(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
    check_final(final_learning_rate)
    world = processes(device)
    world.check_enough(batch_size=batch_size)
    check_shard(shard, model, world)
    world.from_main(lambda: check_folder(out, resume))
    check_trackers(trackers, out)
    world.synchronize(model.to(world.device))
    twin = sharded_twin(model, world) if shard else None
    trained = model if twin is None else twin
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, learning_rate, betas=(0.9, 0.99), weight_decay=0)
    settings = {
        "method": method.name,
        "row": {name: v for name, v in asdict(method).items() if name != "notes"},
        "pairs": len(pairs),
        "pairs_fingerprint": pairs.fingerprint,
        "steps": steps,
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
        "learning_rate": learning_rate,
        "final_learning_rate": final_learning_rate,
        "max_grad_norm": max_grad_norm,
        "seed": seed,
        **weight_settings(model),
        **precision_settings(precision),
    }

    def rate(step: int) -> float:
        return learning_rate * (1 - (1 - final_learning_rate) * step / steps)

    return Setup(optimizer, settings, rate, world, twin)


def check_pairs(pairs: Any, batch_size: int, held_out: Any) -> None:
    """ValueError for what are no pairs, and for fewer than a batch."""
    for name, value in (("pairs", pairs), ("held_out", held_out)):
        if not isinstance(value, PreferencePairs) and not (name == "held_out" and value is None):
            raise ValueError(
                f"{name}: found a {type(value).__name__}; wanted PreferencePairs "
                "(sample_pairs, load_pairs)"
            )
    check_whole(1, batch_size=batch_size)
    if batch_size > len(pairs):
        raise ValueError(f"batch_size: found {batch_size}; there are only {len(pairs)} pairs")


@dataclass(frozen=True)
class Rows:
    """N prompts with a response each, padded on the right, so that no attention mask is needed."""

    ids: Tensor  # (N, L)
    lengths: Tensor  # (N,), prompt, response and terminal token
    mask: Tensor  # (N, L-1), True where ids[:, t+1] is a token of the response or its end

    def width(self, rows: Tensor) -> int:
        """The longest of some rows."""
        return int(self.lengths[rows].max())

    def real(self, rows: Tensor, width: int) -> Tensor:
        """(n, width), True at every token of some rows, of the prompt too."""
        return torch.arange(width, device=self.ids.device) < self.lengths[rows, None]


def encode_rows(
    tokenizer: Any,
    prompts: Sequence[str],
    responses: Sequence[str],
    cut: Sequence[bool],
    device: torch.device,
) -> Rows:
    """The rows; a response that was cut has no terminal token."""
    cut = cut or [False] * len(prompts)
    sequences, starts = [], []
    encoded = zip(encode(tokenizer, prompts), encode(tokenizer, responses), cut, strict=True)
    for prompt, response, is_cut in encoded:
        sequences.append([*prompt, *response, *([] if is_cut else [tokenizer.eos_token_id])])
        starts.append(len(prompt) - 1)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    width = int(lengths.max())
    ids = torch.full((len(sequences), width), tokenizer.pad_token_id)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
    places = torch.arange(width - 1)
    mask = (places >= torch.tensor(starts)[:, None]) & (places < lengths[:, None] - 1)
    return Rows(ids.to(device), lengths.to(device), mask.to(device))


def encode_pairs(tokenizer: Any, pairs: PreferencePairs, device: torch.device) -> Rows:
    """The 2N rows of the pairs: row i is a chosen response, row N+i the rejected one."""
    none = (False,) * len(pairs)
    return encode_rows(
        tokenizer,
        pairs.prompts * 2,
        pairs.chosen + pairs.rejected,
        (pairs.chosen_cut or none) + (pairs.rejected_cut or none),
        device,
    )


def row_logprobs(model: Any, data: Rows, rows: Tensor, width: int) -> Tensor:
    """Log-probs (n, width-1) of some rows' tokens, each beside its place in `data.mask`.

    One forward pass, gradients on, dropout off. Raises NonFiniteError for a response whose
    log-probs are not finite.
    """
    ids, mask = data.ids[rows, :width], data.mask[rows, : width - 1]
    with evaluating(model):
        logits = model(input_ids=ids, use_cache=False).logits
    logprobs = token_logprobs(logits, ids)
    if not bool(logprobs.detach()[mask].isfinite().all()):
        found = logprobs.detach().masked_fill(~mask, 0.0)
        batch = {"rows": rows, "input_ids": ids, "mask": mask, "logprobs": found}
        raise NonFiniteError("the model's log-probs are not finite", batch)
    return logprobs


@torch.no_grad()
def all_logprobs(model: Any, data: Rows, at_once: int, world: Processes = ALONE) -> Tensor:
    """Log-probs (N, L-1) of every row, `at_once` at a time; 0 outside the responses."""
    wide = torch.promote_types(model.dtype, torch.float32)  # that of the log-probs
    result = torch.zeros(data.mask.shape, dtype=wide, device=data.ids.device)
    # Rows of like length together: little padding is computed.
    order = data.lengths.sort().indices

    def some(own: slice) -> list[Tensor]:
        parts = order[own].split(at_once)
        return [row_logprobs(model, data, rows, data.width(rows)) for rows in parts]

    found = [part for parts in world.rows(len(order), some) for part in parts]
    for rows, logprobs in zip(order.split([len(part) for part in found]), found, strict=True):
        result[rows, : logprobs.shape[1]] = logprobs
    return result.masked_fill(~data.mask, 0.0)


class Kept(torch.nn.Module):
    """Tensors that are computed once and kept in a run's checkpoints."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def batch_order(n: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The rows of a step's batch: every epoch goes through all n in an order of its own.

    A function of its arguments: a resumed run needs no position. A batch may end one epoch and
    begin the next.
    """
    first = step * batch_size
    return [_epoch(n, place // n, seed)[place % n] for place in range(first, first + batch_size)]


@functools.lru_cache(maxsize=4)
def _epoch(n: int, epoch: int, seed: int) -> list[int]:
    order = list(range(n))
    random.Random(f"pairs/{seed}/{epoch}").shuffle(order)
    return order


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rows: Tensor,
    forward: Callable[[Tensor], Sequence[Tensor]],
    objective: Objective,
    *,
    micro_batch_size: int | None,
    max_grad_norm: float,
    batch: dict[str, Any],
    world: Processes,
    twin: Any = None,
) -> dict[str, float]:
    """One optimizer step on `rows`, in parts of `micro_batch_size`, each process on its share: the
    gradient is that of all.

    forward(part) gives tensors with gradient, first dimension the part's rows; objective(rows,
    tensors) the loss, divided as the whole step says, and its statistics. twin: the sharded model
    that `forward` calls in place of `model`, which follows it. Returns the loss, the statistics and
    grad_norm: those of the whole step, from the parts' tensors put together.
    Raises NonFiniteError before the weights move.
    """
    optimizer.zero_grad(set_to_none=True)

    def backward(own: slice) -> list[list[Tensor]]:
        seen = []
        for part in rows[own].split(micro_batch_size or len(rows)):
            work = functools.partial(forward, part)
            tensors = work() if twin is None else world.agree(work)
            objective(part, tensors)[0].backward()
            seen.append([tensor.detach() for tensor in tensors])
        if twin is not None:
            # The shares of its weights come together in every process or in none: one that has
            # fewer parts than another goes along, for a gradient of 0.
            work = functools.partial(forward, rows[:1])
            for _ in range(world.most_parts(len(rows), micro_batch_size) - len(seen)):
                (0.0 * torch.cat([t.flatten() for t in world.agree(work)]).sum()).backward()
        return seen

    seen = [part for parts in world.rows(len(rows), backward) for part in parts]
    whole = [torch.cat(column) for column in zip(*seen, strict=True)]
    loss, stats = objective(rows, whole)
    statistics = numbers(stats)
    known = {**batch, "statistics": {"loss": loss.item(), **statistics}}
    norm = apply_gradient(model, optimizer, loss.item(), max_grad_norm, known, world, twin)
    return {"loss": loss.item(), "grad_norm": norm, **statistics}


def numbers(stats: dict[str, Tensor], prefix: str = "") -> dict[str, float]:
    """Statistics as plain numbers."""
    return {prefix + name: float(value) for name, value in stats.items()}
