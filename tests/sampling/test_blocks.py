"""Parts of a layer with a backward pass of their own: torch's values, and torch's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore import blocks

EPS = 1e-3  # large enough to be seen in the gradient
SIZE, WIDE = 6, 10


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_feed(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    normed = torch_norm(x, norm)
    return x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


def our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return blocks.rms_norm(x, weight, EPS)


def our_feed(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return blocks.feed_forward(x, norm, EPS, gate, up, down)


PAIRS = {"norm": (our_norm, torch_norm), "feed forward": (our_feed, torch_feed)}


def inputs(name: str, shape: tuple[int, ...], dtype: Any = torch.float64) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(*shape, SIZE), (SIZE,)]
    if name == "feed forward":
        shapes += [(WIDE, SIZE), (WIDE, SIZE), (SIZE, WIDE)]
    return [
        torch.randn(s, dtype=torch.float64, generator=numbers).to(dtype).requires_grad_()
        for s in shapes
    ]


def gradients(function: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
    y = function(*given)
    push = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(y, given, push.to(y.dtype))


@pytest.fixture(params=[1, 2, 7, 1000], ids="{} tokens at once".format)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the tokens are computed at a time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(blocks, "CACHED", request.param * WIDE)
    return int(request.param)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (14,), (0, 3)])
def test_values_and_gradients_of_torch(name: str, shape: tuple[int, ...], at_once: int) -> None:
    ours, theirs = PAIRS[name]
    given = inputs(name, shape)
    found, wanted = ours(*given), theirs(*given)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for one, other in zip(gradients(ours, given), gradients(theirs, given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_in_float32_the_values_are_those_of_torch_to_the_bit(name: str) -> None:
    ours, theirs = PAIRS[name]
    given = inputs(name, (64, 31), torch.float32)
    assert torch.equal(ours(*given), theirs(*given))


@pytest.mark.parametrize("name", PAIRS)
def test_gradient_by_differences(name: str, at_once: int) -> None:
    assert torch.autograd.gradcheck(PAIRS[name][0], inputs(name, (5, 2)))


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_that_are_not_contiguous(name: str) -> None:
    ours, theirs = PAIRS[name]
    given = inputs(name, (5, 3))
    push = torch.randn(3, SIZE, 5, dtype=torch.float64).permute(2, 0, 1)
    pairs = (torch.autograd.grad(function(*given), given, push) for function in (ours, theirs))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_uninitialized_memory_is_not_read(name: str, at_once: int) -> None:
    """torch fills it with NaN in its deterministic mode."""
    given = inputs(name, (5, 3))
    torch.use_deterministic_algorithms(True)
    try:
        found = [PAIRS[name][0](*given), *gradients(PAIRS[name][0], given)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(part.isfinite().all()) for part in found)


@pytest.mark.parametrize("name", PAIRS)
def test_a_second_derivative_is_refused(name: str) -> None:
    given = inputs(name, (5, 3))
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(PAIRS[name][0](*given).sum(), given[:1], create_graph=True)


def test_less_is_kept_than_by_torch() -> None:
    """Numbers kept for the backward pass, weights left out."""

    def kept(function: Callable[..., Tensor]) -> int:
        given, seen = inputs("feed forward", (40,)), {}
        weights = {w.untyped_storage().data_ptr() for w in given}

        def pack(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(*given)
        return sum(tensor.numel() for at, tensor in seen.items() if at not in weights)

    assert kept(our_feed) == 40 * (SIZE + 1 + 2 * WIDE)
    assert kept(torch_feed) >= 40 * (2 * SIZE + 4 * WIDE)
