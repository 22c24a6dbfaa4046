"""Log-probabilities and entropy of a language model's tokens, from its logits.

Both work through the (B*T, V) table of logits in slices, in float32 or wider, and keep none of it:
the backward pass computes the softmax again.  Without that, a batch of bfloat16 logits would be
held a second time in float32, twice its size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.objectives._checks import check_number, describe, is_dense, to_float

SLICE = 2**24  # logits worked on at once: 64 MiB in float32


def token_logprobs(logits: Tensor, input_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log pi_theta(y_t | x, y_<t) of every token that has something before it.

    logits (B, T, V): the model's output for input_ids (B, T).  The logits at position t predict the
    token at t + 1, so the result is (B, T-1): entry [:, t] scores input_ids[:, t+1]; the logits of
    the last position are not used and the first token gets no value.
    temperature: that of the sampling; logits are divided by it, so that the log-probs are those of
    the distribution that was sampled from.  Policy, old and reference log-probs share it.
    Equal to log_softmax(logits[:, :-1] / temperature) at the chosen tokens, in float32 (float64 for
    float64 logits).  A row whose incoming gradient is 0 gets gradient 0, whatever its logits hold.
    ValueError: shapes that do not fit, T < 2, ids outside the vocabulary, temperature < 1e-30.
    """
    temperature = check_temperature(temperature)
    if not is_dense(logits) or logits.dim() != 3 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating and of shape (B, T, V); got {describe(logits)}")
    batch, length, vocabulary = logits.shape
    if not is_dense(input_ids) or input_ids.shape != (batch, length):
        raise ValueError(
            f"input_ids must be of shape {(batch, length)}, the first two of logits; got "
            f"{describe(input_ids)}"
        )
    if input_ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise ValueError(f"input_ids must hold integers; got {describe(input_ids)}")
    if length < 2:
        raise ValueError(f"input_ids must hold at least 2 tokens a row; got {length}")
    if logits.numel() == 0:
        raise ValueError(f"logits must hold at least one row and one word; got {describe(logits)}")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocabulary:
        found = low if low < 0 else high
        raise ValueError(f"input_ids must lie in [0, {vocabulary - 1}] (V of logits); got {found}")
    following = input_ids.long().roll(-1, dims=1)  # [:, t] is the token at t+1; the last is dropped
    scores = _TokenLogprobs.apply(logits.flatten(0, 1), following.flatten(), temperature)
    return scores.view(batch, length)[:, :-1]


def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """H = -sum_v pi(v) log pi(v) in nats, of the distribution at every position.

    logits (..., V) -> (...), in float32 (float64 for float64 logits).  A logit of -inf (a token
    that sampling excludes) counts as probability 0 and adds nothing.
    ValueError: no vocabulary axis, temperature < 1e-30.
    """
    temperature = check_temperature(temperature)
    if not is_dense(logits) or logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating and of shape (..., V); got {describe(logits)}")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits must have a vocabulary axis; got shape {tuple(logits.shape)}")
    flat = logits.reshape(-1, logits.shape[-1])
    return _Entropy.apply(flat, temperature).view(logits.shape[:-1])


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


def _slices(rows: int, vocabulary: int) -> list[slice]:
    step = max(1, SLICE // vocabulary)
    return [slice(start, start + step) for start in range(0, rows, step)]


class _TokenLogprobs(torch.autograd.Function):
    """Logits (N, V), ids (N,) -> log softmax(logits / temperature) at ids, (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        result = torch.empty(len(logits), dtype=_wide(logits), device=logits.device)
        for part in _slices(*logits.shape):
            scores = torch.log_softmax(to_float(logits[part]) / temperature, dim=-1)
            result[part] = scores.gather(1, ids[part, None])[:, 0]
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, ids = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in _slices(*logits.shape):
            push = gradient[part, None] / ctx.temperature
            # d log pi(y) / dz_v = 1[v = y] - pi(v)
            change = torch.softmax(to_float(logits[part]) / ctx.temperature, dim=-1).mul_(-push)
            change[torch.arange(len(change), device=ids.device), ids[part]] += push[:, 0]
            result[part] = change.masked_fill_(push == 0, 0.0)
        return result, None, None


class _Entropy(torch.autograd.Function):
    """Logits (N, V) -> entropy of softmax(logits / temperature), (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        result = torch.empty(len(logits), dtype=_wide(logits), device=logits.device)
        for part in _slices(*logits.shape):
            probabilities = torch.softmax(to_float(logits[part]) / temperature, dim=-1)
            result[part] = torch.special.entr(probabilities).sum(-1)
        ctx.save_for_backward(logits, result)
        ctx.temperature = temperature
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, total = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in _slices(*logits.shape):
            push = gradient[part, None] / ctx.temperature
            probabilities = torch.softmax(to_float(logits[part]) / ctx.temperature, dim=-1)
            # dH/dz_v = -p_v (log p_v + H); entr(p) = -p log p, and is 0 where p is 0
            change = torch.special.entr(probabilities) - probabilities * total[part, None]
            result[part] = (change * push).masked_fill_(push == 0, 0.0)
        return result, None


def _wide(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
