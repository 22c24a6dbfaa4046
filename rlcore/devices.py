"""Which device and which number type, chosen automatically and overridable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from rlcore.checks import check_threads

PRECISIONS = ("float32", "bf16")
_precision: ContextVar[str] = ContextVar("precision", default="float32")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device to run on: CUDA when there is one, else the CPU; or the one asked for.

    Raises ValueError for an unknown name, and for a CUDA device that this machine lacks.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device: {device!r} is not a device; wanted 'cpu', 'cuda' or 'cuda:<number>'"
        ) from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device: found {device!r}; wanted 'cpu' or 'cuda'")
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ValueError(
                f"device: {device!r} was asked for, but torch sees no CUDA device here"
            )
        if chosen.index is not None and chosen.index >= count:
            raise ValueError(f"device: {device!r} was asked for, but there are only {count}")
    return chosen


def choose_dtype(
    dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> torch.dtype:
    """The number type of the weights: float32 unless another one is asked for.

    float32 on CUDA too: weights that AdamW updates by 1e-4 of themselves do not move in bfloat16,
    whose step is 1/256. On the CPU bfloat16 is also slower at the compact sizes.
    Raises ValueError for a type that is not in `DTYPES`, and for float16, whose range is too small
    for a loss without scaling.
    """
    choose_device(device)
    if dtype is None:
        return torch.float32
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"dtype: found {dtype!r}; wanted one of {', '.join(DTYPES)}")


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Run the block with this many torch threads, then put the old number back; None: no change."""
    if threads is None:
        yield
        return
    check_threads(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """The same weights for the same seed, whatever the random state, dtype and device outside."""
    outside = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(outside)


@contextmanager
def using_precision(precision: str) -> Iterator[None]:
    """What the models' forward passes in the block compute in, sampling included.

    "float32": in the weights' own number type. "bf16": products of matrices in bfloat16, by
    torch's autocast; weights, gradients and optimizer stay as they are, softmax is float32, and
    log-probs, entropy, values and losses are computed in float32, the former from bfloat16 logits.
    The log-probs of the sampler and of the update then differ by the rounding of bfloat16, as they
    come from unlike products.
    Raises ValueError for another name.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision: found {precision!r}; wanted one of {', '.join(PRECISIONS)}")
    before = _precision.set(precision)
    try:
        yield
    finally:
        _precision.reset(before)


def forward_precision(model: Any) -> AbstractContextManager[Any]:
    """Around forward passes of the model, and nothing else: what `using_precision` asked for.

    Autocast keeps the weights that it has converted until its block ends, so no block may reach
    over an update of them.
    """
    if _precision.get() == "float32":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)


def precision_settings(precision: str) -> dict[str, str]:
    """What a record says of it: nothing for float32."""
    with using_precision(precision):
        return {} if precision == "float32" else {"precision": precision}
