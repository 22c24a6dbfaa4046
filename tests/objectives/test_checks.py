"""Reading masks and per-token values: the quick way and the careful one give the same; and what is
no mask, number or choice."""

import math
import numbers
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.objectives._checks import (
    Slots,
    as_numbers,
    check_choice,
    check_count,
    check_ddof,
    check_finite,
    check_number,
    describe,
    read_difference,
    read_mask,
    read_rewards,
    read_rows,
    read_slots,
    read_tokens,
)

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
VALUES = torch.tensor([[-1.0, 0.5, 2.0], [3.0, -4.0, 5.0]])
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_a_mask_of_any_dtype(dtype: torch.dtype) -> None:
    mask = read_mask(MASK.to(dtype))
    assert mask.dtype == torch.bool
    assert torch.equal(mask, MASK)
    whole = torch.ones(2, 3, dtype=dtype)
    assert read_mask(whole).all()
    assert torch.equal(read_mask(MASK.to(dtype).T.contiguous().T), MASK)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_a_mask_with_another_number_is_refused(dtype: torch.dtype) -> None:
    wrong = MASK.to(dtype)
    wrong[1, 2] = 2
    with pytest.raises(ValueError, match=r"response_mask must hold only 0 and 1 .*; got 2"):
        read_mask(wrong)


@pytest.mark.parametrize("number", [-1, -128])
def test_a_mask_with_a_number_below_0_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=rf"must hold only 0 and 1 .*; got {number}"):
        read_mask(torch.tensor([[1, number]], dtype=torch.int8))


@pytest.mark.parametrize("number", [0.5, math.nan, math.inf, 1 + 2e-7])
def test_a_mask_with_a_fraction_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="must hold only 0 and 1"):
        read_mask(torch.tensor([[1.0, number]]))


def test_numbers_of_a_mask() -> None:
    for mask in (MASK, MASK.T, MASK[:, 1:], MASK[:, :1].expand(2, 4)):
        assert torch.equal(as_numbers(mask, torch.float64), mask.double())


def read(values: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    leaf = values.clone().requires_grad_()
    result = read_tokens("logprobs", leaf, MASK)
    (gradient,) = torch.autograd.grad(result, leaf, push)
    return result.detach(), gradient


@pytest.mark.parametrize("garbage", [0.0, 7.0, LARGEST, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_is_0_and_has_no_gradient(garbage: float, dtype: torch.dtype) -> None:
    """Whatever it holds; also where the sum of finite values is not finite."""
    push = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]], dtype=dtype)
    values, gradient = read(VALUES.to(dtype).masked_fill(~MASK, garbage), push)
    assert torch.equal(values, VALUES.to(dtype) * MASK)
    assert torch.equal(gradient, push * MASK)


def test_finite_values_whose_sum_is_not() -> None:
    huge = torch.tensor([[LARGEST, LARGEST, math.nan], [-LARGEST, 1.0, 1.0]])
    values, gradient = read(huge, torch.ones_like(huge))
    assert torch.equal(values, torch.where(MASK, huge, 0.0))
    assert torch.equal(gradient, MASK.float())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_the_first_real_token_that_is_not_finite_is_named(wrong: float, garbage: float) -> None:
    """+inf and -inf do not cancel, nor does garbage in the padding hide one."""
    values = VALUES.masked_fill(~MASK, garbage)
    values[0, 1] = wrong
    values[1, 0] = -wrong
    with pytest.raises(
        ValueError, match=rf"logprobs must be finite .*; got {wrong} in row 0, slot 1"
    ):
        read_tokens("logprobs", values, MASK)


@pytest.mark.parametrize("garbage", [7.0, math.nan])
def test_the_mask_may_be_one_that_is_read_already(garbage: float) -> None:
    values = VALUES.masked_fill(~MASK, garbage)
    for dtype in (torch.float32, torch.float64):
        slots = Slots(as_numbers(MASK, dtype))
        result = read_tokens("logprobs", values, slots)
        assert result.dtype == torch.float32
        assert torch.equal(result, VALUES * MASK)
        found = read_difference(("logprobs", "old_logprobs"), values, VALUES.flip(0), slots)
        assert torch.equal(found.values, (VALUES - VALUES.flip(0)) * MASK)


@pytest.mark.parametrize("rows", [[True, True], [True, False]])
def test_one_value_for_each_response(rows: list[bool]) -> None:
    """0, whatever it is, where a response has no real token."""
    kept = torch.tensor(rows)
    slots = Slots(as_numbers(MASK & kept[:, None], torch.float32))
    for garbage in (2.0, math.nan):
        values = torch.tensor([3.0, 2.0]).masked_fill(~kept, garbage)
        result = read_rows("advantages", values, slots)
        assert torch.equal(result, (torch.tensor([3.0, 2.0]) * kept)[:, None])
    with pytest.raises(ValueError, match=r"^advantages must be finite .*; got inf in row 0"):
        read_rows("advantages", torch.tensor([math.inf, 2.0]), slots)


def difference(values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    leaf, other = values.clone().requires_grad_(), others.clone().requires_grad_()
    found = read_difference(("logprobs", "old_logprobs"), leaf, other, MASK)
    result = found.values
    assert (found.lowest, found.highest) == (result.min(), result.max())
    assert found.clean == (leaf - other).isfinite().all()
    (gradient,) = torch.autograd.grad(result, leaf, torch.full_like(values, 3.0))
    assert torch.autograd.grad(result.sum(), other, allow_unused=True) == (None,)
    return result.detach(), gradient


@pytest.mark.parametrize("garbage", [0.0, 7.0, LARGEST, math.nan, math.inf, -math.inf])
def test_a_difference_is_that_of_the_two(garbage: float) -> None:
    """With garbage in the padding of the one, the other, or both."""
    others = 2 * VALUES.flip(0)
    for first, second in ((garbage, 0.0), (0.0, garbage), (garbage, garbage), (garbage, -garbage)):
        result, gradient = difference(
            VALUES.masked_fill(~MASK, first), others.masked_fill(~MASK, second)
        )
        assert torch.equal(result, (VALUES - others) * MASK)
        assert torch.equal(gradient, 3 * MASK.float())


def test_a_difference_that_overflows_is_not_taken_for_a_bad_value() -> None:
    values = VALUES.clone()
    values[0, 1] = LARGEST
    with pytest.raises(
        ValueError,
        match=r"^logprobs must be so close to old_logprobs that their difference is finite; got "
        r"3.4\d*e\+38 and -3.4\d*e\+38 in row 0, slot 1$",
    ):
        difference(values, -values)


def test_finite_differences_whose_sum_is_not() -> None:
    values = VALUES.clone()
    values[:, 0] = LARGEST
    result, _ = difference(values, torch.zeros_like(values))
    assert torch.equal(result, values * MASK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_argument_is_to_blame_for_what_is_not_finite(dtype: torch.dtype) -> None:
    """Of its real tokens only; a sum of finite results that is not finite is no fault."""
    huge = VALUES.masked_fill(~MASK, math.inf)
    largest = torch.finfo(dtype).max
    check_finite(torch.tensor([largest, largest], dtype=dtype), MASK, logprobs=VALUES)
    wide = str(dtype).removeprefix("torch.")
    result = torch.tensor(math.inf, dtype=dtype)
    for arguments, name, found in (
        ({"logprobs": huge, "beta": 0.5}, "logprobs", "3"),
        ({"logprobs": huge, "beta": 3.5, "ref_logprobs": None}, "beta", "3.5"),
        ({"advantages": torch.tensor([1.0, -9.0]), "logprobs": huge}, "advantages", "-9"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"^{name} must be so small that the result stays finite in {wide}; got {found}$",
        ):
            check_finite(result, MASK, **arguments)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs"])
def test_the_one_that_is_not_finite_is_named(name: str, wrong: float) -> None:
    values, others = VALUES.clone(), VALUES.clone()
    (values if name == "logprobs" else others)[1, 0] = wrong
    with pytest.raises(
        ValueError, match=rf"^{name} must be finite .*; got {wrong} in row 1, slot 0"
    ):
        read_difference(("logprobs", "old_logprobs"), values, others, MASK)


def test_the_same_infinity_twice_is_no_difference() -> None:
    values = VALUES.clone()
    values[0, 0] = -math.inf
    with pytest.raises(ValueError, match=r"^logprobs must be finite .*; got -inf in row 0, slot 0"):
        read_difference(("logprobs", "old_logprobs"), values, values, MASK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_a_mask_is_counted_to(dtype: torch.dtype) -> None:
    slots = read_slots(MASK.long(), VALUES.to(dtype))
    assert torch.equal(slots.mask, MASK)
    assert slots.real.dtype == slots.lengths.dtype
    assert slots.real.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert slots.lengths.tolist() == slots.counts == [2, 1]
    assert (slots.tokens, slots.responses) == (3, 2)


def test_empty_rows_are_counted_or_named() -> None:
    mask = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 1, 1]])
    slots = read_slots(mask, None, allow_empty=True)
    assert (slots.tokens, slots.responses) == (4, 2)
    with pytest.raises(ValueError, match=r"^chosen_mask row 1 is empty"):
        read_slots(mask, None, name="chosen_mask")


# --- what a message says --------------------------------------------------------------------------

BEYOND = 10**5000  # Python refuses to print it


def kind(value: Any) -> str:
    """So that no test's name is such a number."""
    return type(value).__name__


@pytest.mark.parametrize(
    "value", [BEYOND, -BEYOND, [BEYOND], {"a": (BEYOND,)}, Fraction(BEYOND)], ids=kind
)
def test_any_value_can_be_described(value: Any) -> None:
    said = describe(value)
    assert type(value).__name__ in said
    assert len(said) < 100


def test_the_leading_digits_of_a_number_too_long_to_print() -> None:
    assert describe(-(0xABCDEF12 << 40_000)) == "-0xabcdef12... (int)"


@pytest.mark.parametrize(
    "value", ["x" * 10_000, ["x"] * 10_000, torch.zeros(100, 100), BEYOND], ids=kind
)
def test_a_choice_that_is_none_is_described_in_short(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^level must be one of a, b; got ") as caught:
        check_choice("level", value, ("a", "b"))
    assert len(str(caught.value)) < 150


def test_a_number_without_limits_has_no_words_for_them() -> None:
    with pytest.raises(ValueError, match=r"^threshold must be a finite number; got 'a' \(str\)$"):
        check_number("threshold", "a")  # type: ignore[arg-type]


class Half(numbers.Real):
    """A number as NumPy makes them: neither int nor float, but registered as real."""

    def __float__(self) -> float:
        return 0.5


Half.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [0.5, Fraction(1, 2), Half()], ids=kind)
def test_any_real_number_is_one(value: Any) -> None:
    number = check_number("beta", value, at_least=0, at_most=1)
    assert type(number) is float
    assert number == 0.5
    with pytest.raises(ValueError, match=r"^beta must be a finite number > 0.5; got"):
        check_number("beta", value, above=0.5)


@pytest.mark.parametrize(
    "value", [True, "0.5", 0.5j, None, torch.tensor(0.5), BEYOND, math.nan], ids=kind
)
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^beta must be a finite number >= 0; got"):
        check_number("beta", value, at_least=0)


@pytest.mark.parametrize(
    "value",
    [True, torch.tensor(True), torch.tensor(1.0), 1.0, "1", None, torch.ones((), device="meta")],
    ids=kind,
)
def test_what_is_no_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^total must be an integer >= 1; got"):
        check_count("total", value)
    with pytest.raises(ValueError, match=r"^ddof must be 0 .* or 1 .*; got"):
        check_ddof(value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_a_whole_number_may_be_a_tensor(dtype: torch.dtype) -> None:
    for found in (
        check_count("total", torch.tensor(1, dtype=dtype)),
        check_ddof(torch.tensor(1, dtype=dtype)),
    ):
        assert type(found) is int
        assert found == 1


@pytest.mark.parametrize("rewards", [b"ab", bytearray(b"ab"), "12", {1.0, 2.0}, {1: 2}], ids=kind)
def test_what_is_no_list_of_rewards(rewards: Any) -> None:
    with pytest.raises(ValueError, match=r"^rewards must be a tensor or a list of numbers"):
        read_rewards(rewards)


def test_tensors_without_values_are_refused() -> None:
    meta = MASK.to("meta")
    with pytest.raises(ValueError, match=r"^response_mask must hold values; got .*device meta"):
        read_mask(meta)
    with pytest.raises(ValueError, match=r"^rewards must hold values; got .*device meta"):
        read_rewards(VALUES[0].to("meta"))
