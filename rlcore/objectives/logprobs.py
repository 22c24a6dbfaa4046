"""Log-probabilities and entropy of a language model's tokens, from its logits.

Both work through the (B*T, V) table of logits in slices, in float32 or wider, and keep none of it:
the backward pass computes the softmax again.  Without that, a batch of bfloat16 logits would be
held a second time in float32, twice its size; and a slice stays in the processor's cache from one
operation to the next.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, cast

import torch
from torch import Tensor

from rlcore.objectives._checks import check_no_graph, check_number, describe, is_dense

Room = Tensor | None  # to leave a result in

SLICE = 2**18  # logits worked on at once by one core: 1 MiB in float32
LEAST = 2**14  # and at least so many, below which starting an operation costs more than it does
FORWARD, BACKWARD = 2, 3  # slices of logits that have to be copied, at least: see `_slices`
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
INTEGERS = (*SIGNED, torch.uint32, torch.uint16, torch.uint8)
# Of a nat.  exp(x) = 2^(x BITS), which takes some processors half the time.  Its last bits are
# others, so it is for narrow logits alone.  (With a number of Python's, torch takes longer.)
BITS = torch.tensor(math.log2(math.e), device="cpu")
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
    RuntimeError: a backward pass with ``create_graph``.
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
    if logits.device.type != "cpu":
        _check_range(ids, vocabulary)
    following = ids.roll(-1, dims=1)  # [:, t] is the token at t+1; the last is dropped
    try:
        return cast(Tensor, _TokenLogprobs.apply(logits, following, temperature))
    except RuntimeError:
        _check_range(ids, vocabulary)  # `gather` looks at every id, on the CPU
        raise


def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""$H = -\sum_v \pi(v) \log\pi(v)$ in nats, of the distribution at every position.

    ``logits`` (..., V) -> (...), in float32 (float64 for float64 logits).  A logit of -inf (a token
    that sampling excludes) counts as probability 0 and adds nothing.

    ValueError: no vocabulary axis, ``temperature`` < 1e-30.  RuntimeError: a backward pass with
    ``create_graph``.
    """
    temperature = check_temperature(temperature)
    if not _are_logits(logits) or logits.dim() < 1:
        raise ValueError(f"logits must be floating and of shape (..., V); got {describe(logits)}")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits must have a vocabulary axis; got shape {tuple(logits.shape)}")
    return cast(Tensor, _Entropy.apply(logits, temperature))


def _check_range(ids: Tensor, vocabulary: int) -> None:
    """ValueError: an id that is no word of the vocabulary."""
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocabulary:
        found = low if low < 0 else high
        raise ValueError(f"input_ids must lie in [0, {vocabulary - 1}] (V of logits); got {found}")


def check_temperature(temperature: float) -> float:
    """Greedy decoding (temperature 0) puts probability 1 on one token: there is no log-prob to
    compare and no importance ratio, so an objective refuses it.  Below 1e-30, logits divided by it
    leave the range of float32."""
    if type(temperature) is float and 1e-30 <= temperature < math.inf:
        return temperature
    if isinstance(temperature, int | float) and temperature == 0:
        raise ValueError(
            "temperature must be > 0: greedy decoding (temperature 0) has no log-probs to train "
            "on, since its importance ratio is undefined; got 0"
        )
    check_number("temperature", temperature, above=0)
    return check_number("temperature", temperature, at_least=1e-30)


def _are_logits(values: Any) -> bool:
    return is_dense(values) and values.is_floating_point() and not values.is_meta


def _slices(logits: Tensor, *rows: Tensor | None, least: int) -> Iterator[tuple[Any, ...]]:
    """The logits (..., V) as tables (n, V), each with its part of all the ``rows`` (N, ...).

    Views, never a copy: logits that were cut out of larger ones (`logits[:, -T:]`) are not one
    table (N, V), so their parts are taken one after the other.  What is done to a row does not
    depend on the rows beside it, so the slices change no result.  Narrow logits are copied into
    float32 slice by slice, in ``least`` slices or more, so that a copy is small beside them (and,
    in the backward pass, together with their gradient).
    """
    vocabulary = logits.shape[-1]
    cores = torch.get_num_threads() if logits.is_cpu else CORES_OF_A_GPU
    step = max(1, SLICE * cores // vocabulary)
    if logits.itemsize < 4:
        share = math.ceil(logits.numel() / vocabulary / least)
        step = min(step, max(share, LEAST // vocabulary, 1))
    try:
        return _cut(step, logits.view(-1, vocabulary), *rows)
    except RuntimeError:  # no view of these strides
        tables = _tables(logits)
    lengths = [table.shape[0] for table in tables]
    columns = [repeat(None) if row is None else row.split(lengths) for row in rows]
    return chain.from_iterable(_cut(step, *own) for own in zip(tables, *columns, strict=False))


def _cut(step: int, table: Tensor, *rows: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """``step`` rows of a table, and of others as long, at a time; of an empty one, no row once."""
    whole, rest = divmod(table.shape[0], step)
    sizes = [step] * whole + ([rest] if rest or not whole else [])
    columns = [  # half the cost of `split`
        repeat(None) if row is None else row.split_with_sizes(sizes) for row in rows
    ]
    return zip(table.split_with_sizes(sizes), *columns, strict=False)


def _tables(logits: Tensor) -> list[Tensor]:
    try:
        return [logits.view(-1, logits.shape[-1])]
    except RuntimeError:  # no view of these strides
        return [table for part in logits for table in _tables(part)]


def _wide(table: Tensor, shift: Tensor | None, temperature: float) -> Tensor:
    """Logits (n, V), less the shift of each row, (n, 1), which changes no softmax, over the
    temperature; in float32 or wider: the table itself where it is that."""
    wide = table.float() if table.itemsize < 4 else table
    if shift is not None:
        wide = wide - shift
    return wide if temperature == 1 else wide / temperature


def _shift(logits: Tensor, temperature: float, result: Tensor) -> Tensor | None:
    """A temperature below 1 may carry logits out of the range, to inf - inf.  The rows of the
    ``result`` (N, 1) where it did are computed again from their distances to their largest, the
    others with a shift of 0, so that they stay as they are, to the bit.  None: there is none."""
    if temperature >= 1 or not bool(result.sum().isnan()):
        return None
    tables = _slices(logits, least=FORWARD)
    largest = torch.cat([_wide(table, None, 1).amax(dim=-1, keepdim=True) for (table,) in tables])
    return torch.where(result.isnan(), largest, 0.0)


def _join(rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """What was found for the rows of each slice, as columns (N, 1)."""
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _no_view(values: Tensor) -> Tensor:
    """The same, no longer a view in the eyes of autograd, which lets nobody change a view in place
    that was made inside of a function."""
    return values.data


def _gradient(
    ctx: Any, logits: Tensor, gradient: Tensor, change: Callable[..., Tensor], *rows: Tensor
) -> Tensor:
    """The gradient of the logits, from that of their rows, (N, 1).  ``change`` computes it for a
    table of scaled logits, from its part of the ``rows`` (N, 1), whose first is 0 where the
    gradient is, and leaves it in ``out``; the other place it may use is ``room``, the table itself
    if that is a copy.  Whatever the logits of a row without gradient hold, it stays 0."""
    result = logits.new_empty(logits.shape)
    flat = result.view(-1, logits.shape[-1])
    idle = gradient.logical_not().nonzero()[:, 0]
    idles, narrow = idle.shape[0], logits.itemsize < 4
    for table, place, shift, *own in _slices(logits, flat, ctx.shift, *rows, least=BACKWARD):
        if idles >= table.shape[0] > 0 and not bool(own[0].any()):
            place.zero_()
            continue
        scores = _wide(table, shift, ctx.temperature)
        room = None if scores is table else scores
        if narrow:
            place.copy_(change(scores, room, None, *own))
        else:
            change(scores, room, place, *own)
        del scores, room  # before the next ones are made
    if idles > 0:
        flat.index_fill_(0, idle, 0.0)
    return result


class _TokenLogprobs(torch.autograd.Function):
    """Logits (B, T, V), ids (B, T) -> log softmax(logits / temperature) at ids, but for those of
    the last position, (B, T-1)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        column = ids.reshape(-1, 1)
        result, top, size = _logprobs(logits, column, temperature, None)
        shift = _shift(logits, temperature, result)
        if shift is not None:
            result, top, size = _logprobs(logits, column, temperature, shift)
        ctx.save_for_backward(logits, column, top, size)
        ctx.temperature, ctx.shift = temperature, shift
        return _no_view(result.view(ids.shape)[:, :-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        check_no_graph()
        logits, ids, top, size = ctx.saved_tensors

        def change(
            scores: Tensor, room: Room, out: Room, push: Tensor, share: Tensor, top: Tensor,
            ids: Tensor,
        ) -> Tensor:  # fmt: skip
            # d log pi(y) / dz_v = 1[v = y] - pi(v)
            if out is None:
                weights = scores.sub_(top).mul_(BITS).exp2_()
            else:
                weights = torch.sub(scores, top, out=out).exp_()
            return weights.mul_(share).scatter_add_(1, ids, push)

        gradient = torch.constant_pad_nd(gradient, (0, 1)).reshape(-1, 1)
        push = gradient if ctx.temperature == 1 else gradient / ctx.temperature
        rows = push, push / -size, top, ids
        return _gradient(ctx, logits, gradient, change, *rows), None, None


def _logprobs(
    logits: Tensor, ids: Tensor, temperature: float, shift: Tensor | None
) -> tuple[Tensor, ...]:
    """Log-probs of the ids (N, 1), largest scores and sums of the weights, each (N, 1).

    The exponential and its sum are all there is to a softmax, and torch is quicker at them than at
    its own."""
    narrow = logits.itemsize < 4
    rows: list[tuple[Tensor, ...]] = []
    for table, own_shift, own_ids in _slices(logits, shift, ids, least=FORWARD):
        scores = _wide(table, own_shift, temperature)
        top = scores.amax(dim=-1, keepdim=True)
        below = scores - top if scores is table else scores.sub_(top)
        chosen = below.gather(1, own_ids)
        weights = below.mul_(BITS).exp2_() if narrow else below.exp_()
        rows.append((chosen, top, weights.sum(dim=-1, keepdim=True)))
        del scores, below, weights  # before the next ones are made
    chosen, top, size = _join(rows)
    return chosen.sub_(size.log()), top, size


class _Entropy(torch.autograd.Function):
    """Logits (..., V) -> entropy of softmax(logits / temperature), (...)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        ctx.bounded, found = _entropies(logits, temperature, None)
        shift = _shift(logits, temperature, found[0])
        if shift is not None:
            ctx.bounded, found = _entropies(logits, temperature, shift)
        result, *rows = found
        ctx.save_for_backward(logits, *rows)
        ctx.temperature, ctx.shift = temperature, shift
        return _no_view(result.view(logits.shape[:-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        check_no_graph()
        logits, top, size, mean = ctx.saved_tensors

        def change(
            scores: Tensor, room: Room, out: Room, share: Tensor, top: Tensor, mean: Tensor
        ) -> Tensor:
            # dH/dz_v = -p_v (log p_v + H) = -p_v (below_v - E[below])
            below = _below(scores, top, room, bounded=ctx.bounded)
            weights = _exp(below, out, narrow=out is None)
            return weights.mul_(below.sub_(mean)).mul_(share)

        gradient = gradient.reshape(-1, 1)
        push = gradient if ctx.temperature == 1 else gradient / ctx.temperature
        return _gradient(ctx, logits, gradient, change, push / -size, top, mean), None


def _entropies(
    logits: Tensor, temperature: float, shift: Tensor | None
) -> tuple[bool, list[Tensor]]:
    """Whether the scores had to be bounded, and as rows (N, 1): entropy, largest score, sum of the
    weights and mean of the scores below the largest."""

    def attempt(bounded: bool) -> list[Tensor]:
        narrow = logits.itemsize < 4
        rows: list[tuple[Tensor, ...]] = []
        for table, own_shift in _slices(logits, shift, least=FORWARD):
            scores = _wide(table, own_shift, temperature)
            top = scores.amax(dim=-1, keepdim=True)
            room = None if scores is table else scores
            below = _below(scores, top, room, bounded=bounded)
            weights = _exp(below, None, narrow=narrow)
            size = weights.sum(dim=-1, keepdim=True)
            rows.append((top, size, weights.mul_(below).sum(dim=-1, keepdim=True)))
            del scores, room, below, weights  # before the next ones are made
        top, size, mean = _join(rows)
        mean.div_(size)
        # log p_v = below_v - log size, so H = log size - E[below]: no term < 0
        return [size.log() - mean, top, size, mean]

    found = attempt(bounded=False)
    bounded = bool(found[0].sum().isnan())  # 0 log 0, for one
    return bounded, attempt(bounded=True) if bounded else found


def _below(scores: Tensor, top: Tensor, room: Room, *, bounded: bool = False) -> Tensor:
    """How far scores (n, V) lie below the largest of their row, (n, 1), in ``room`` if there is
    some.  ``bounded``: kept finite, so that 0 log 0 is 0 for a score of -inf."""
    below = scores.sub_(top) if room is scores else torch.sub(scores, top, out=room)
    return below.clamp_(min=torch.finfo(below.dtype).min) if bounded else below


def _exp(values: Tensor, out: Room, *, narrow: bool) -> Tensor:
    """exp(values), in ``out`` if there is one."""
    return torch.mul(values, BITS, out=out).exp2_() if narrow else torch.exp(values, out=out)
