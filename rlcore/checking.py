"""What the test cells of the exercises call: comparisons that explain themselves.

Each check returns None when the answer is right and raises `CheckFailed` when it is not. The
message names the value and says what is wrong with it, but does not give the expected value away.
A test in an exercise counts as failed on any exception, so a check is never silently skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["CheckFailed", "check_choice", "check_close", "check_number", "check_raises", "no_input"]

# Room for the rounding of the comparison itself, so that a value exactly on the tolerance passes.
_ROUNDING = 8 * torch.finfo(torch.float64).eps


class CheckFailed(AssertionError):
    """The answer was checked and is wrong; the message is written for the learner."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in the place of a traceback through the code of the check
        return [f"Not yet: {self}"]


def check_close(
    value: Any,
    expected: Any,
    *,
    name: str = "your answer",
    rtol: float | None = None,
    atol: float | None = None,
    wrong_turns: Mapping[str, Any] | None = None,
) -> None:
    """Accept `value` if it has the shape of `expected` and every number in it is close.

    value, expected: Python numbers, (nested) lists of numbers, NumPy scalars or arrays, torch
        tensors, of any real dtype and on any device; compared in float64. A value that is exact in
        another dtype (int 1 for 1.0, a float32 tensor for a float64 one) is as good.
    rtol, atol: |value - expected| <= atol + rtol * |expected|. With neither given, rtol = 1e-5 and
        atol = 1e-8; with only one given the other is 0, so `atol=1e-4` means exactly that.
    wrong_turns: {hint: the value that this wrong turn leads to}. When the answer is wrong and is
        such a value (same tolerance), the message is the hint. A tuple holds several such values.

    Shapes must be equal: nothing is broadcast, so (3, 1) is not (3,). NaN never passes; an infinity
    passes only for the same infinity.
    Raises CheckFailed for a wrong answer, ValueError for a mistake in the test itself.
    """
    rtol, atol = _tolerances(rtol, atol)
    wanted = _as_numbers(expected)
    if wanted is None or bool(torch.isnan(wanted).any()):
        raise ValueError(f"check_close: expected must hold numbers without NaN, got {expected!r}")
    given = _numbers_or_fail(value, name, want_bool=_is_bool(expected))
    if given.shape == wanted.shape and bool(_close(given, wanted, rtol, atol).all()):
        return
    for hint, turn in (wrong_turns or {}).items():
        for alternative in turn if isinstance(turn, tuple) else (turn,):
            wrong = _as_numbers(alternative)
            if wrong is None:
                raise ValueError(f"check_close: the wrong turn {hint!r} is no number: {turn!r}")
            if given.shape == wrong.shape and bool(_close(given, wrong, rtol, atol).all()):
                raise CheckFailed(f"{name}: {hint}")
    if given.shape != wanted.shape:
        raise CheckFailed(f"{name} has the shape {_shape(given)}; {_shape(wanted)} is wanted.")
    if bool(torch.isnan(given).any()):
        raise CheckFailed(f"{name} {_where(given, torch.isnan(given))} is NaN (not a number).")
    off = ~_close(given, wanted, rtol, atol)
    raise CheckFailed(f"{name} {_where(given, off)} is not right ({_say(rtol, atol)}).")


def check_number(value: Any, *, name: str = "your answer", shape: tuple[int, ...] = ()) -> None:
    """Accept any finite number (or numbers of the given shape): the form of an answer only.

    For the visible test of an exercise by hand, whose hidden test compares the number.
    Raises CheckFailed.
    """
    given = _numbers_or_fail(value, name, want_bool=False)
    if tuple(given.shape) != tuple(shape):
        raise CheckFailed(f"{name} has the shape {_shape(given)}; {_words(shape)} is wanted.")
    if not bool(torch.isfinite(given).all()):
        raise CheckFailed(f"{name} {_where(given, ~torch.isfinite(given))} is not finite.")


def check_choice(
    value: Any,
    expected: str | Iterable[str] | None = None,
    *,
    choices: Iterable[str],
    name: str = "your answer",
    wrong_turns: Mapping[str, str] | None = None,
) -> None:
    """Accept the letter (or word) of a multiple-choice question; case and outer spaces are free.

    value: one of `choices`; a list, tuple or set of them when `expected` is one (choose all).
    expected: the right choice(s). None checks only that a choice was made: the visible test.
    wrong_turns: {hint: the wrong choice it answers}.
    Raises CheckFailed for a wrong answer, ValueError for a mistake in the test itself.
    """
    allowed = {_fold(choice): choice for choice in choices}
    several = expected is not None and not isinstance(expected, str)
    right = _folded(expected if several else [expected]) if expected is not None else None
    if right is not None and not right <= set(allowed):
        raise ValueError(
            f"check_choice: expected {expected!r} is not among {list(allowed.values())}"
        )
    listing = ", ".join(allowed.values())
    many = isinstance(value, (list, tuple, set, frozenset))
    nothing = not value and right != set() if many else isinstance(value, str) and not value.strip()
    if value is None or value is ... or nothing:
        raise CheckFailed(f"{name} is not answered yet: set it to one of {listing}.")
    if many and expected is not None and not several:
        raise CheckFailed(f"{name} holds {len(value)} choices; one of {listing} is wanted.")
    chosen = list(value) if many else [value]
    for one in chosen:
        if not isinstance(one, str) or _fold(one) not in allowed:
            raise CheckFailed(f"{name} is {_show(one)}; one of {listing} is wanted (as text).")
    if right is None or _folded(chosen) == right:
        return
    for hint, wrong in (wrong_turns or {}).items():
        if _folded(chosen) == {_fold(wrong)}:
            raise CheckFailed(f"{name}: {hint}")
    raise CheckFailed(f"{name}: {_as_list(chosen)} is not right.")


def check_raises(
    call: Callable[[], Any],
    error: type[BaseException] = ValueError,
    *,
    mentions: str = "",
    name: str = "the call",
) -> None:
    """Accept a call without arguments that raises `error`, its message containing `mentions`.

    `check_raises(lambda: group_advantage([1.0], [0]), ValueError, mentions="group")`.
    NotImplementedError (an untouched exercise) is never the wanted error. Raises CheckFailed.
    """
    try:
        result = call()
    except NotImplementedError as found:
        raise CheckFailed(f"{name} is not written yet (NotImplementedError).") from found
    except error as found:
        if mentions.casefold() in str(found).casefold():
            return
        raise CheckFailed(
            f"{name} raises {type(found).__name__} as it should, but the message "
            f"{str(found)!r} does not say {mentions!r}."
        ) from found
    except (Exception, SystemExit) as found:
        raise CheckFailed(
            f"{name} raises {type(found).__name__} ({found}); {error.__name__} is wanted."
        ) from found
    raise CheckFailed(
        f"{name} raises nothing and returns a {type(result).__name__}; {error.__name__} is wanted."
    )


def no_input(prompt: object = "") -> str:
    """Stand in for `input` in a homework notebook, where nobody can type while it is graded."""
    raise RuntimeError(
        "input() is not available in homework: nobody can type while it is graded. "
        "Assign the value to a variable instead."
    )


def _tolerances(rtol: float | None, atol: float | None) -> tuple[float, float]:
    if rtol is None and atol is None:
        return 1e-5, 1e-8
    pair = (0.0 if rtol is None else rtol, 0.0 if atol is None else atol)
    for label, given in zip(("rtol", "atol"), pair, strict=True):
        if not isinstance(given, (int, float)) or not 0 <= given <= sys.float_info.max:
            raise ValueError(f"check_close: {label} must be finite and >= 0, got {given!r}")
    return pair


def _as_numbers(value: Any) -> torch.Tensor | None:
    """The value as a float64 tensor on the CPU; None if it is not made of real numbers."""
    if value is None or isinstance(value, (str, bytes, complex)):
        return None
    try:
        if isinstance(value, (list, tuple)):
            parts = [_as_numbers(part) for part in value]
            if any(part is None for part in parts):
                return None
            return torch.stack(parts) if parts else torch.empty(0, dtype=torch.float64)  # type: ignore[arg-type]
        if isinstance(value, (bool, int, float)):
            return torch.tensor(value, dtype=torch.float64)  # torch's default would be float32
        if not isinstance(value, torch.Tensor) and not hasattr(value, "__array__"):
            return None
        tensor = torch.as_tensor(value).detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        return None if tensor.is_complex() else tensor.to("cpu", torch.float64)
    except Exception:
        return None  # ragged lists, arrays of objects, an answer that raises an error of its own


def _numbers_or_fail(value: Any, name: str, *, want_bool: bool) -> torch.Tensor:
    if value is None or value is ... or value is NotImplemented:
        raise CheckFailed(f"{name} is not answered yet (it is {value!r}).")
    if _is_bool(value) and not want_bool:
        raise CheckFailed(f"{name} is True or False; a number is wanted.")
    numbers = _as_numbers(value)
    if numbers is None:
        raise CheckFailed(f"{name} is {_show(value)} ({type(value).__name__}); numbers are wanted.")
    return numbers


def _show(value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("torch.bool", "bool")


def _close(given: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    # The sign of the comparison matters: NaN <= x is False, so NaN is never close.
    room = atol + (rtol + _ROUNDING) * wanted.abs()
    near = (given - wanted).abs() <= room
    return torch.where(torch.isinf(wanted) | torch.isinf(given), given == wanted, near)


def _shape(tensor: torch.Tensor) -> str:
    return _words(tuple(tensor.shape))


def _words(shape: tuple[int, ...]) -> str:
    return str(tuple(shape)) if shape else "() (one number)"


def _where(given: torch.Tensor, off: torch.Tensor) -> str:
    """Which of the learner's own numbers is meant: 'at index [2] (-0.463)'."""
    if given.dim() == 0:
        return f"({given.item():.6g})"
    first = off.nonzero()[0].tolist()
    more = int(off.sum()) - 1
    others = f", and {more} more," if more else ""
    return f"at index {first} ({given[tuple(first)].item():.6g}){others}"


def _say(rtol: float, atol: float) -> str:
    parts = [f"{atol:g}"] if atol else []
    parts += [f"{rtol:g} relative"] if rtol else []
    return f"tolerance {' + '.join(parts)}" if parts else "it must be exact"


def _fold(text: Any) -> str:
    return str(text).strip().casefold()


def _folded(values: Iterable[Any]) -> set[str]:
    return {_fold(value) for value in values}


def _as_list(chosen: list[Any]) -> str:
    return ", ".join(repr(one) for one in chosen)
