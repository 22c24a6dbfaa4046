"""Log-probabilities and entropy of a language model's tokens, from its logits.

Both work through the (B*T, V) table of logits in slices, in float32 or wider, and keep none of it:
the backward pass computes the softmax again.  Without that, a batch of bfloat16 logits would be
held a second time in float32, twice its size; and a slice stays in the processor's cache from one
operation to the next.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.objectives._checks import check_number, describe, is_dense, to_float

Function = TypeVar("Function", bound=Callable)

SLICE = 2**18  # logits worked on at once by one core: 1 MiB in float32
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
INTEGERS = (*SIGNED, torch.uint32, torch.uint16, torch.uint8)
CORES_OF_A_GPU = 64  # slices of 64 MiB, so that starting an operation costs nothing beside it


def token_logprobs(logits: Tensor, input_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""$\log\pi_\theta(y_t \mid x, y_{<t})$ of every token that has something before it.

    ``logits`` (B, T, V): the model's output for ``input_ids`` (B, T).  The logits at position $t$
    predict the token at $t + 1$, so the result is (B, T-1): entry ``[:, t]`` scores
    ``input_ids[:, t+1]``; the logits of the last position are not used and the first token gets no
    value.

    ``temperature``: that of the sampling; logits are divided by it, so that the log-probs are those
    of the distribution that was sampled from.  Policy, old and reference log-probs share it.

    Equal to ``log_softmax(logits[:, :-1] / temperature)`` at the chosen tokens, in float32 (float64
    for float64 logits).  A row whose incoming gradient is 0 gets gradient 0, whatever its logits
    hold.

    Autocast does not reach it, nor ``entropy``: both are computed as outside of it.

    ValueError: shapes that do not fit, T < 2, ids outside the vocabulary, ``temperature`` < 1e-30.
    """
    temperature = check_temperature(temperature)
    if not _are_logits(logits) or logits.dim() != 3:
        raise ValueError(f"logits must be floating and of shape (B, T, V); got {describe(logits)}")
    batch, length, vocabulary = logits.shape
    if not is_dense(input_ids) or input_ids.shape != (batch, length):
        raise ValueError(
            f"input_ids must be of shape {(batch, length)}, the first two of logits; got "
            f"{describe(input_ids)}"
        )
    if input_ids.device != logits.device:
        raise ValueError(f"input_ids must be on {logits.device}, as logits; got {input_ids.device}")
    if input_ids.dtype not in INTEGERS:
        raise ValueError(
            f"input_ids must hold integers (of at most 63 bits); got {describe(input_ids)}"
        )
    if length < 2:
        raise ValueError(f"input_ids must hold at least 2 tokens a row; got {length}")
    if logits.numel() == 0:
        raise ValueError(f"logits must hold at least one row and one word; got {describe(logits)}")
    ids = input_ids.long()
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocabulary:
        found = low if low < 0 else high
        raise ValueError(f"input_ids must lie in [0, {vocabulary - 1}] (V of logits); got {found}")
    following = ids.roll(-1, dims=1)  # [:, t] is the token at t+1; the last is dropped
    scores = _TokenLogprobs.apply(logits, following.flatten(), temperature)
    return scores.view(batch, length)[:, :-1]


def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""$H = -\sum_v \pi(v) \log\pi(v)$ in nats, of the distribution at every position.

    ``logits`` (..., V) -> (...), in float32 (float64 for float64 logits).  A logit of -inf (a token
    that sampling excludes) counts as probability 0 and adds nothing.

    ValueError: no vocabulary axis, ``temperature`` < 1e-30.
    """
    temperature = check_temperature(temperature)
    if not _are_logits(logits) or logits.dim() < 1:
        raise ValueError(f"logits must be floating and of shape (..., V); got {describe(logits)}")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits must have a vocabulary axis; got shape {tuple(logits.shape)}")
    return _Entropy.apply(logits, temperature).view(logits.shape[:-1])


def check_temperature(temperature: float) -> float:
    """Greedy decoding (temperature 0) puts probability 1 on one token: there is no log-prob to
    compare and no importance ratio, so an objective refuses it.  Below 1e-30, logits divided by it
    leave the range of float32."""
    if isinstance(temperature, int | float) and temperature == 0:
        raise ValueError(
            "temperature must be > 0: greedy decoding (temperature 0) has no log-probs to train "
            "on, since its importance ratio is undefined; got 0"
        )
    check_number("temperature", temperature, above=0)
    return check_number("temperature", temperature, at_least=1e-30)


def _are_logits(values: Any) -> bool:
    return is_dense(values) and values.is_floating_point() and not values.is_meta


def _slices(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The logits (..., V) as tables (n, V), with the rows of (N,) that each of them is.

    Views, never a copy: logits that were cut out of larger ones (`logits[:, -T:]`) are not one
    table (N, V), so their parts are taken one after the other.  What is done to a row does not
    depend on the rows beside it, so the slices change no result.
    """
    cores = torch.get_num_threads() if logits.device.type == "cpu" else CORES_OF_A_GPU
    step = max(1, SLICE * cores // logits.shape[-1])
    start = 0
    for table in _tables(logits):
        for part in table.split(step):
            yield slice(start, start + len(part)), part
            start += len(part)


def _tables(logits: Tensor) -> list[Tensor]:
    try:
        return [logits.view(-1, logits.shape[-1])]
    except RuntimeError:  # no view of these strides
        return [table for part in logits for table in _tables(part)]


class _Scale(NamedTuple):
    """What is done to logits before their softmax."""

    temperature: float
    shift: Tensor | None = None  # (N,), taken off each row, which changes no softmax


def _wide(table: Tensor, part: slice, scale: _Scale) -> Tensor:
    """Logits over the temperature, in float32 or wider: the table itself where it is that."""
    wide = to_float(table)
    if scale.shift is not None:
        wide = wide - scale.shift[part, None]
    return wide if scale.temperature == 1 else wide / scale.temperature


def _within_range(
    compute: Callable[[_Scale], Tensor], logits: Tensor, temperature: float
) -> tuple[Tensor, _Scale]:
    """What ``compute`` gives for each row, (N,).  A temperature below 1 may carry logits out of the
    range, to inf - inf; the rows where it did are computed again from their distances to their
    largest, the others stay as they are, to the bit."""
    scale = _Scale(temperature)
    result = compute(scale)
    if temperature < 1 and bool(result.sum().isnan()):
        largest = torch.cat([to_float(table).amax(dim=-1) for _, table in _slices(logits)])
        scale = _Scale(temperature, torch.where(result.isnan(), largest, 0.0))
        result = compute(scale)
    return result, scale


def _without_autocast(function: Function) -> Function:
    """Autocast would have some of the arithmetic done in half precision."""

    @functools.wraps(function)
    def wrapped(ctx: Any, values: Tensor, *rest: Any) -> Any:
        if not torch.is_autocast_enabled(values.device.type):  # to switch it off costs 10 us
            return function(ctx, values, *rest)
        with torch.autocast(values.device.type, enabled=False):
            return function(ctx, values, *rest)

    return cast(Function, wrapped)


def _rows(logits: Tensor) -> Tensor:
    """Room for a number per row, (N,)."""
    rows = logits.shape[:-1].numel()
    return torch.empty(rows, dtype=_width(logits), device=logits.device)


def _width(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _gradient(
    logits: Tensor, rows: Tensor, gradient: Tensor, scale: _Scale, change: Callable[..., Tensor]
) -> Tensor:
    """The gradient of the logits, from that of their rows (N,) and what the forward pass left of
    them, (N,).  `change` computes that of a table of scaled logits, in place where that can be, and
    whatever the logits of a row without gradient hold, it stays 0."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    flat = result.view(-1, logits.shape[-1])
    for part, table in _slices(logits):
        push, place = gradient[part], flat[part]
        idle = (push == 0).nonzero()[:, 0]
        if len(idle) == len(push):
            place.zero_()
            continue
        out = place if place.dtype == _width(logits) else None
        push = push[:, None] / scale.temperature
        found = change(_wide(table, part, scale), rows[part], push, out)
        if out is None:
            place.copy_(found)
        if len(idle) > 0:
            place.index_fill_(0, idle, 0.0)
    return result


class _TokenLogprobs(torch.autograd.Function):
    """Logits (..., V), ids (N,) -> log softmax(logits / temperature) at ids, (N,)."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        def compute(scale: _Scale) -> Tensor:
            result = _rows(logits)
            for part, table in _slices(logits):
                scores = torch.log_softmax(_wide(table, part, scale), dim=-1)
                result[part] = scores.gather(1, ids[part, None])[:, 0]
            return result

        result, ctx.scale = _within_range(compute, logits, temperature)
        ctx.save_for_backward(logits, ids)
        return result

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, ids = ctx.saved_tensors

        def change(scores: Tensor, drawn: Tensor, push: Tensor, out: Tensor | None) -> Tensor:
            # d log pi(y) / dz_v = 1[v = y] - pi(v)
            result = torch.softmax(scores, dim=-1, out=out)
            return result.mul_(-push).scatter_add_(1, drawn[:, None], push)

        return _gradient(logits, ids, gradient, ctx.scale, change), None, None


class _Entropy(torch.autograd.Function):
    """Logits (..., V) -> entropy of softmax(logits / temperature), (N,)."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        def compute(scale: _Scale) -> Tensor:
            result = _rows(logits)
            for part, table in _slices(logits):
                scores = _wide(table, part, scale)
                spare = scores.dtype != logits.dtype
                below, probabilities, top = _from_the_top(scores, spare=spare)
                # log p_v = log p_top + below_v, so H = -log p_top - sum_v p_v below_v: no term < 0
                result[part] = torch.linalg.vecdot(probabilities, below).add_(top).neg_()
            return result

        result, ctx.scale = _within_range(compute, logits, temperature)
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, total = ctx.saved_tensors

        def change(scores: Tensor, entropy: Tensor, push: Tensor, out: Tensor | None) -> Tensor:
            spare = scores.dtype != logits.dtype
            below, probabilities, top = _from_the_top(scores, out, spare=spare)
            # dH/dz_v = -p_v (log p_v + H)
            surprise = below.add_((top + entropy)[:, None])
            return probabilities.mul_(surprise).mul_(-push)

        return _gradient(logits, total, gradient, ctx.scale, change), None


def _from_the_top(
    scores: Tensor, out: Tensor | None = None, *, spare: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of scores (n, V): how far each lies below the row's largest, softmax, and the largest's
    log-prob (n,).  No exp or log per word but that of softmax itself, which is the cost of it.
    The distance is kept finite, so that 0 log 0 is 0 for a score of -inf.  ``spare`` scores, a copy
    that nobody else reads, make room for it."""
    top = scores.amax(dim=-1, keepdim=True)
    below = torch.sub(scores, top, out=scores if spare else None)
    below.clamp_(min=torch.finfo(below.dtype).min)
    probabilities = torch.softmax(below, dim=-1, out=out)
    return below, probabilities, probabilities.amax(dim=-1).log_()
