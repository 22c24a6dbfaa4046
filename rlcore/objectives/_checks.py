"""What every objective asks of its arguments, so that no mistake passes in silence.

Two conventions live here and nowhere else: arithmetic is done in float32 or wider, and a slot that
the mask leaves out may hold anything (NaN and inf too) without touching value or gradient.
"""

import contextlib
import math
import numbers
import operator
import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rewards = Tensor | Sequence[float | None]

SMALL_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

WIDE = (torch.float32, torch.float64)

MAX_WEIGHT = 1e30  # of a factor (beta, epsilon_high): room for it in float32, and for a product
MAX_LOG_RATIO = 80.0  # e^80 = 6e34 is in the range of float32, e^89 is not


class _Short(reprlib.Repr):
    """Python refuses to print an integer of more than 4300 digits."""

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"{'-' if x < 0 else ''}0x{abs(x) >> (x.bit_length() - 32):x}..."


def short(value: Any, longest: int = 30) -> str:
    """A value as an error message shows it, however large it is; texts up to so many characters."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f" and layout {value.layout}"
        device = " and no values (device meta)" if value.is_meta else ""
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}{layout}{device}"
    writer = _Short()
    writer.maxstring = writer.maxother = longest
    return writer.repr(value)


def describe(value: Any) -> str:
    """A short description of what was passed, for an error message: with its type."""
    return short(value) + ("" if isinstance(value, Tensor) else f" ({type(value).__name__})")


def is_dense(value: Any) -> bool:
    """A tensor that is not stored sparsely: few operations know sparse ones."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {describe(value)}")
    return value


def check_number(
    name: str,
    value: float,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> float:
    """A finite real number inside the given limits, as a float (torch takes no huge int)."""
    number = value if type(value) is float else _real(value)
    if not math.isfinite(number) or number < at_least or number <= above or number > at_most:
        limits = {">=": at_least, ">": above, "<=": at_most}
        wanted = [f"{sign} {limit:g}" for sign, limit in limits.items() if math.isfinite(limit)]
        limited = f" {' and '.join(wanted)}" if wanted else ""
        raise ValueError(f"{name} must be a finite number{limited}; got {describe(value)}")
    return number


def _real(value: Any) -> float:
    """A real number, NumPy's too, as a float; NaN for anything else, True and False."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    return math.nan


def _whole(value: Any) -> int | None:
    """An integer, NumPy's or a tensor's too, as an int; None for anything else, True and False."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # a tensor on "meta" has no value to tell
        return None


def check_ddof(ddof: Any) -> int:
    """0 or 1, as an int (a 0-d integer tensor will do)."""
    whole = _whole(ddof)
    if whole not in (0, 1):
        raise ValueError(f"ddof must be 0 (population std) or 1 (sample std); got {describe(ddof)}")
    return whole


def check_count(name: str, value: Any, *, at_least: int = 1) -> int:
    """An integer (a 0-d integer tensor will do) not below ``at_least``."""
    count = _whole(value)
    if count is None or count < at_least:
        raise ValueError(f"{name} must be an integer >= {at_least}; got {describe(value)}")
    if count >= 2**53:
        raise ValueError(f"{name} must be an integer below 2**53; got {describe(value)}")
    return count


def to_float(values: Tensor) -> Tensor:
    """float64 stays float64; everything else is computed in float32."""
    return values if values.dtype in WIDE else values.float()


def check_no_graph() -> None:
    """RuntimeError in a backward pass that is to be differentiated again: it computes without a
    graph, and its gradient would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph must be False: rlcore's gradients have no graph; got True")


def scalar(value: float, like: Tensor) -> Tensor:
    """A number to divide by: torch takes twice as long with one of Python's.  On the CPU, which
    goes with tensors of any device."""
    return torch.full((), value, dtype=like.dtype, device="cpu")


def read_rewards(rewards: Rewards, name: str = "rewards") -> Tensor:
    """A tensor (B,), finite or NaN; of a list, in float64, with NaN for None."""
    values = as_rewards(rewards, name)
    if values.isinf().any():
        row = int(values.isinf().nonzero()[0])
        raise ValueError(f"{name} must be finite or missing (NaN); got {values[row]} in row {row}")
    return values


def as_rewards(rewards: Rewards, name: str = "rewards") -> Tensor:
    """The same, infinite ones not yet refused."""
    if not isinstance(rewards, Tensor):
        try:
            if isinstance(rewards, Mapping | Set | bytes | bytearray):
                raise TypeError("no order of rows, or no numbers")
            numbers = [math.nan if reward is None else float(+reward) for reward in rewards]
            rewards = torch.tensor(numbers, dtype=torch.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{name} must be a tensor or a list of numbers (None: missing); got "
                f"{describe(rewards)}"
            ) from None
    real = is_dense(rewards) and not rewards.is_complex()
    if not real or rewards.dim() != 1 or len(rewards) == 0:
        raise ValueError(f"{name} must be real and of shape (B,), B >= 1; got {describe(rewards)}")
    if rewards.is_meta:
        raise ValueError(f"{name} must hold values; got {describe(rewards)}")
    if rewards.is_floating_point() and rewards.itemsize == 1:
        rewards = rewards.float()  # torch does not sort float8
    return rewards.detach()


def read_lengths(lengths: Tensor | Sequence[int], device: torch.device | None = None) -> Tensor:
    """(B,) int64; a list becomes a tensor on that device."""
    counts = read_integers("lengths", lengths, device)
    if not is_dense(counts) or counts.dim() != 1 or len(counts) == 0:
        raise ValueError(f"lengths must be of shape (B,), B >= 1; got {describe(counts)}")
    if counts.dtype == torch.bool or counts.is_floating_point() or counts.is_complex():
        raise ValueError(f"lengths must hold integers (counts of tokens); got {describe(counts)}")
    if counts.is_meta:
        raise ValueError(
            f"lengths must be of shape (B,), B >= 1, and hold data; got {describe(counts)}"
        )
    counts = counts.long()
    if (counts < 0).any():
        row = int((counts < 0).nonzero()[0])
        raise ValueError(f"lengths must be >= 0; got {counts[row].item()} in row {row}")
    return counts


def read_integers(
    name: str, values: Tensor | Sequence[int], device: torch.device | None = None
) -> Tensor:
    """A tensor as it is (torch moves it to the default device, if asked to make one of it), a list
    as a tensor on that device.  Unsigned integers, which torch can hardly compare, become int64."""
    numbers = values
    if not isinstance(numbers, Tensor):
        try:
            numbers = torch.as_tensor(numbers, device=device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(
                f"{name} must be a tensor or a list of integers; got {describe(values)}"
            ) from None
    if numbers.dtype not in (torch.uint16, torch.uint32, torch.uint64) or not is_dense(numbers):
        return numbers
    signed = numbers.long()
    if numbers.dtype == torch.uint64 and (signed < 0).any():
        raise ValueError(f"{name} must be below 2**63; got {describe(numbers)}")
    return signed


def read_pair(rewards: Rewards, name: str, other: Rewards) -> tuple[Tensor, Tensor]:
    """Two rewards per row, both (B,) and on one device; the second one's name is for messages."""
    if isinstance(rewards, Tensor) and isinstance(other, Tensor) and rewards.device != other.device:
        raise ValueError(f"{name} must be on {rewards.device}, as rewards; got {other.device}")
    values, others = read_rewards(rewards), read_rewards(other, name)
    if others.shape != values.shape:
        raise ValueError(
            f"{name} must be of shape {tuple(values.shape)}, as rewards; got {describe(others)}"
        )
    device = values.device if isinstance(rewards, Tensor) else others.device
    return values.to(device), others.to(device)


class Slots:
    """A mask that is read, as numbers: a product costs a quarter of a choice.  What else a loss
    asks of it is worked out once, and only if it asks."""

    def __init__(self, real: Tensor, mask: Tensor | None = None) -> None:
        self.real = real  # (B, T), 1 where the slot holds a token of the response, else 0
        self._mask = mask
        self._lengths: Tensor | None = None
        self._counts: list[float] | None = None
        self._tokens: int | None = None

    @property
    def mask(self) -> Tensor:
        """The same as booleans."""
        if self._mask is None:
            self._mask = self.real.bool()
        return self._mask

    @property
    def lengths(self) -> Tensor:
        """(B,), real tokens of each response, in the dtype of ``real``."""
        if self._lengths is None:
            self._lengths = self.real.sum(dim=1)
        return self._lengths

    @property
    def counts(self) -> list[float]:
        """The same: one look at the tensor, and sums of it are exact in Python."""
        if self._counts is None:
            self._counts = self.lengths.tolist()
        return self._counts

    @property
    def tokens(self) -> int:
        if self._tokens is None:
            self._tokens = int(sum(self.counts))
        return self._tokens

    @property
    def responses(self) -> int:
        """Rows with a real token."""
        return len(self.counts) - self.counts.count(0)


def read_slots(
    response_mask: Tensor, values: Any, *, name: str = "response_mask", allow_empty: bool = False
) -> Slots:
    """The mask, in numbers of the dtype in which ``values`` are read."""
    _check_mask(name, response_mask)
    wide = isinstance(values, Tensor) and values.dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    slots = None
    if response_mask.dtype in SMALL_INTEGERS:
        real = response_mask.to(dtype)
        low, high = real.aminmax()  # of integers, two ends tell what equality takes five passes for
        if low.item() >= 0 and high.item() <= 1:
            slots = Slots(real)
    if slots is None:
        mask = _booleans(name, response_mask)
        slots = Slots(as_numbers(mask, dtype), mask)
    if not allow_empty and 0 in slots.counts:
        raise _empty(name, slots.counts.index(0))
    return slots


def read_mask(
    response_mask: Tensor, *, name: str = "response_mask", allow_empty: bool = False
) -> Tensor:
    """The mask as booleans (B, T): true where the slot holds a token of the response."""
    _check_mask(name, response_mask)
    mask = _booleans(name, response_mask)
    if not allow_empty:
        filled = mask.view(torch.uint8).amax(dim=1)  # of bytes: `any` takes up to eight times that
        if not int(filled.amin()):
            raise _empty(name, int((filled == 0).nonzero()[0]))
    return mask


def _check_mask(name: str, response_mask: Any) -> None:
    if not is_dense(response_mask) or response_mask.dim() != 2:
        raise ValueError(f"{name} must be a tensor of shape (B, T); got {describe(response_mask)}")
    if response_mask.numel() == 0:
        raise ValueError(
            f"{name} must hold at least one row and one slot; got shape "
            f"{tuple(response_mask.shape)}"
        )
    if response_mask.is_meta:
        raise ValueError(f"{name} must hold values; got {describe(response_mask)}")
    if response_mask.is_complex():
        raise ValueError(
            f"{name} must hold only 0 and 1 (or booleans); got {describe(response_mask)}"
        )


def _empty(name: str, row: int) -> ValueError:
    return ValueError(
        f"{name} row {row} is empty: a response needs at least one real token; got 0 "
        "(allow_empty=True leaves such rows out)"
    )


def _booleans(name: str, values: Tensor) -> Tensor:
    """A mask of any dtype as booleans (the very tensor, where it holds them)."""
    if values.dtype == torch.bool:
        return values
    if values.dtype in SMALL_INTEGERS:
        low, high = values.aminmax()
        if int(low) >= 0 and int(high) <= 1:
            return values.bool()
    mask = values == 1
    strange = ~mask & (values != 0)
    if strange.any():
        found = values[strange][0].item()
        raise ValueError(f"{name} must hold only 0 and 1 (or booleans); got {found}")
    return mask


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of booleans as 0 and 1; by way of its bytes, which torch converts six times faster."""
    return mask.view(torch.uint8).to(dtype)


def read_tokens(name: str, values: Tensor, mask: Tensor | Slots) -> Tensor:
    """Per-token values (B, T) in float32 or wider, with 0 in every slot that the mask leaves out.

    A sum is finite only if all its terms are, and costs a twentieth of asking each of them.  Where
    even the padding is finite, a product with the mask leaves 0 there, in value and gradient, at a
    quarter of the cost of a choice.  Where it is not, a product would keep its NaN: those slots are
    replaced before any arithmetic.
    """
    _check_values(name, values, mask)
    values = to_float(values)
    if math.isfinite(values.detach().sum().item()):
        return values * _real_slots(mask, values.dtype)
    values = torch.where(mask.mask if isinstance(mask, Slots) else mask, values, 0.0)
    bad = ~values.isfinite()
    if bad.any():
        row, slot = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name} must be finite at every real token; got {values[row, slot].item()} in row "
            f"{row}, slot {slot}"
        )
    return values


def read_rows(name: str, values: Tensor, slots: Slots) -> Tensor:
    """One value for each response, (B,), read as by ``read_tokens``: (B, 1), 0 where a response has
    no real token."""
    _check_values(name, values, slots.lengths)
    values = to_float(values)[:, None]
    if slots.responses == len(values) and math.isfinite(values.detach().sum().item()):
        return values  # nothing to leave out
    return read_tokens(name, values, Slots(slots.lengths[:, None].clamp(max=1)))


class Difference(NamedTuple):
    """Of two tensors of per-token values, and what was seen of it while it was checked."""

    values: Tensor  # (B, T), 0 in every slot that the mask leaves out
    lowest: float
    highest: float
    clean: bool  # it was finite in all slots, the padding too, and so both tensors are


def read_difference(
    names: tuple[str, str], values: Tensor, others: Tensor, mask: Tensor | Slots
) -> Difference:
    """``values - others``, read as by ``read_tokens``, with a gradient through ``values`` only.

    A difference is finite only if both are, so one look at it and one product stand for two.
    """
    _check_values(names[0], values, mask)
    _check_values(names[1], others, mask)
    difference = to_float(values) - to_float(others).detach()
    difference = difference * _real_slots(mask, difference.dtype)  # inf becomes NaN in padding
    lowest, highest = (end.item() for end in difference.detach().aminmax())  # NaN, if one is
    if math.isfinite(lowest) and math.isfinite(highest):
        return Difference(difference, lowest, highest, clean=True)
    values = read_tokens(names[0], values, mask)
    others = read_tokens(names[1], others.detach(), mask)
    difference = values - others
    lowest, highest = (end.item() for end in difference.detach().aminmax())
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        row, slot = (~difference.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{names[0]} must be so close to {names[1]} that their difference is finite; got "
            f"{values[row, slot].item():g} and {others[row, slot].item():g} in row {row}, slot "
            f"{slot}"
        )
    return Difference(difference, lowest, highest, clean=False)


def _real_slots(mask: Tensor | Slots, dtype: torch.dtype) -> Tensor:
    return mask.real.to(dtype) if isinstance(mask, Slots) else as_numbers(mask, dtype)


def check_finite(result: Tensor, mask: Tensor | Slots, **arguments: Tensor | float | None) -> None:
    """That what came of finite arguments is finite; if not, the largest of them is to blame.

    ``mask`` (B, T) says which of their values count, those of tensors (B, T) or (B,)."""
    total = result if result.dim() == 0 else result.detach().sum()
    if math.isfinite(total.item()) or result.isfinite().all():
        return
    mask = mask.mask if isinstance(mask, Slots) else mask
    largest = {}
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            counted = mask if argument.shape == mask.shape else mask.any(dim=1)
            values = argument.detach()[counted].double()
            largest[name] = float(values[values.abs().argmax()])
        elif argument is not None:
            largest[name] = float(argument)
    name = max(largest, key=lambda name: abs(largest[name]))
    dtype = str(result.dtype).removeprefix("torch.")
    raise ValueError(
        f"{name} must be so small that the result stays finite in {dtype}; got {largest[name]:g}"
    )


def _check_values(name: str, values: Tensor, mask: Tensor | Slots) -> None:
    mask = mask.real if isinstance(mask, Slots) else mask
    if not is_dense(values) or values.shape != mask.shape:
        raise ValueError(
            f"{name} must be a tensor of shape {tuple(mask.shape)}, that of the mask; got "
            f"{describe(values)}"
        )
    if values.device != mask.device:
        raise ValueError(f"{name} must be on {mask.device}, as the mask; got {values.device}")
    if values.is_complex():
        raise ValueError(f"{name} must hold real numbers; got {describe(values)}")
