"""What the objectives of preferences share: one number per response, and a mean over pairs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.objectives._checks import check_count, describe, is_dense, to_float

MAX_SCORE = 1e12  # of a score or a reward, and
MAX_FACTOR = 1e9  # of what multiplies it: the sum of many squares stays in the range of float32


def read_scores(
    name: str, values: Tensor, *, like: Tensor | None = None, wanted: str = ""
) -> Tensor:
    """One finite number per row, (B,), in float32 or wider; of the shape and device of ``like``,
    which the message calls ``wanted``.  The gradient flows through."""
    fits = is_dense(values) and values.dim() == 1 and len(values) > 0 and not values.is_complex()
    if not fits or (like is not None and values.shape != like.shape):
        shape = "(B,), B >= 1" if like is None else f"{tuple(like.shape)}, as {wanted}"
        raise ValueError(f"{name} must be real and of shape {shape}; got {describe(values)}")
    if like is not None and values.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, as {wanted}; got {values.device}")
    values = to_float(values)
    check_size(name, values)
    return values


def check_size(name: str, values: Tensor, where: str = "") -> None:
    """ValueError for rows of (B,) that are not finite, or so large that a loss would overflow."""
    low, high = (end.item() for end in values.detach().aminmax())  # NaN, both, if one is
    if not (low >= -MAX_SCORE and high <= MAX_SCORE):
        row = int((~(values.abs() <= MAX_SCORE)).nonzero()[0])
        raise ValueError(
            f"{name} must be finite and at most {MAX_SCORE:g} in size{where}; got "
            f"{values[row].item():g} in row {row}"
        )


def check_counts(**counts: Any) -> None:
    """ValueError where some counts of a whole step are given and others are not: the terms of the
    parts would be shares of the step here and means of the part there, and not add up."""
    given = next((name for name, count in counts.items() if count is not None), None)
    for name, count in counts.items():
        if given is not None and count is None:
            count = check_count(given, counts[given])
            raise ValueError(
                f"{name} must be given with {given}={count}: a call that sees a part of a step "
                "needs the counts of the whole step; got None"
            )


def read_divisor(total: Any, count: int, what: str, name: str = "total") -> int:
    """What a sum over the ``count`` rows of this part is divided by: the rows of the whole step."""
    if total is None:
        return max(count, 1)
    whole = check_count(name, total)
    if whole < count:
        raise ValueError(f"{name} must be at least the {count} {what} of this part; got {whole}")
    return whole


def log_sigmoid_loss(margin: Tensor) -> Tensor:
    r"""$-\log\sigma(h)$: the price of a pair that is won by $h$.  It stays finite for any h."""
    return -F.logsigmoid(margin)


def mean_of(values: Tensor, kept: Tensor, count: Tensor) -> Tensor:
    """The mean over the ``count`` rows that are kept, without gradient; 0 where there is none."""
    return torch.where(kept, values.detach(), 0.0).sum() / count.clamp(min=1)
