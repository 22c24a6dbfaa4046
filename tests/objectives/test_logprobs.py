"""Log-probs and entropy: what they are, and that they keep nothing they do not need."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.objectives import entropy, logprobs, policy_loss, token_logprobs


@pytest.fixture(params=[1, 7, 2**24], ids=lambda size: f"slices of {size}")
def slices(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whatever the slices, one row at a time or all at once, the result is the same."""
    monkeypatch.setattr(logprobs, "SLICE", request.param)
    return request.param


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 7, (3, 5), generator=generator)
    return logits.to(dtype).requires_grad_(), ids


def plain(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """The textbook expression."""
    table = torch.log_softmax(logits[:, :-1] / temperature, dim=-1)
    return table.gather(-1, ids[:, 1:, None])[..., 0]


def plain_entropy(logits: Tensor, temperature: float) -> Tensor:
    table = torch.log_softmax(logits / temperature, dim=-1)
    return -(table.exp() * table).sum(-1)


def close(ours: Tensor, wanted: Tensor, atol: float = 1e-14, rtol: float = 1e-13) -> None:
    torch.testing.assert_close(ours, wanted, atol=atol, rtol=rtol)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_logprobs_are_the_textbook_ones(slices: int, temperature: float) -> None:
    logits, ids = example()
    ours, wanted = (
        token_logprobs(logits, ids, temperature=temperature),
        plain(logits, ids, temperature),
    )
    assert ours.shape == (3, 4)
    close(ours, wanted)
    weight = torch.arange(12, dtype=torch.float64).view(3, 4) - 5
    (one,) = torch.autograd.grad((ours * weight).sum(), logits)
    (two,) = torch.autograd.grad((wanted * weight).sum(), logits)
    close(one, two)
    assert (one[:, -1] == 0).all()  # the last row is not used


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_entropy_is_the_textbook_one(slices: int, temperature: float) -> None:
    logits, _ = example()
    ours, wanted = entropy(logits, temperature=temperature), plain_entropy(logits, temperature)
    assert ours.shape == (3, 5)
    close(ours, wanted)
    weight = torch.arange(15, dtype=torch.float64).view(3, 5) - 5
    (one,) = torch.autograd.grad((ours * weight).sum(), logits)
    (two,) = torch.autograd.grad((wanted * weight).sum(), logits)
    close(one, two)


def test_gradients_against_finite_differences() -> None:
    logits, ids = example()
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, temperature=0.7), (logits,))
    assert torch.autograd.gradcheck(lambda x: entropy(x, temperature=0.7), (logits,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, ids = example(dtype)
    exact = logits.detach().double().requires_grad_()
    step = torch.finfo(dtype).eps
    for ours, wanted in (
        (token_logprobs(logits, ids), plain(exact, ids, 1.0)),
        (entropy(logits), plain_entropy(exact, 1.0)),
    ):
        assert ours.dtype == torch.float32
        close(ours.double(), wanted, atol=2e-6, rtol=1e-6)
        (one,) = torch.autograd.grad(ours.sum(), logits)
        (two,) = torch.autograd.grad(wanted.sum(), exact)
        assert one.dtype == dtype  # the gradient of a bfloat16 leaf is bfloat16
        close(one.double(), two, atol=2e-6, rtol=max(step, 1e-5))


def test_large_logits_keep_their_small_differences() -> None:
    """log p near 0 beside logits of 10,000: logit minus logsumexp would round to a multiple of
    0.001."""
    logits = torch.tensor([[[1e4, 1e4 - 8.0], [0.0, 0.0]]])
    ours = token_logprobs(logits, torch.tensor([[0, 0]]))
    assert ours.item() == pytest.approx(-math.log1p(math.exp(-8.0)), rel=1e-3)


def test_a_token_that_sampling_excludes() -> None:
    """Top-k sets logits to -inf: probability 0, log-prob -inf, no NaN in entropy or gradient."""
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    ours = token_logprobs(logits, torch.tensor([[0, 1]]))
    assert ours.item() == pytest.approx(-math.log(2), abs=1e-7)
    entropies = entropy(logits)
    assert entropies[0].tolist() == pytest.approx([math.log(2), math.log(3)], abs=1e-6)
    (gradient,) = torch.autograd.grad(ours.sum() + entropies.sum(), logits)
    assert gradient[0, 0].tolist() == pytest.approx([-0.5, 0.5, 0.0], abs=1e-7)
    assert token_logprobs(logits, torch.tensor([[0, 2]])).item() == -math.inf


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_the_logits_of_padding(slices: int, garbage: float) -> None:
    """From the logits on, not only from the log-probs on: nothing of it arrives in the gradient."""
    logits, ids = example()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.cat([mask == 0, torch.ones(3, 1, dtype=torch.bool)], dim=1)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    results = []
    for fill in (0.0, garbage):
        filled = logits.detach().masked_fill(unused[..., None], fill).requires_grad_()
        scores = token_logprobs(filled, ids)
        loss, _ = policy_loss(scores, scores, advantages, mask)
        mean_entropy = torch.where(mask == 1, entropy(filled)[:, :-1], 0.0).sum()
        (gradient,) = torch.autograd.grad(loss + mean_entropy, filled)
        assert (gradient[unused] == 0).all()
        results.append((loss.detach(), mean_entropy.detach(), gradient))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_the_graph_keeps_no_float32_copy_of_the_logits() -> None:
    """What autograd saves for the backward pass is the logits themselves and a few (B, T) rows."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    logits = torch.zeros(4, 8, 1000, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(4, 8, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(logits, ids, temperature=0.7)
        entropy(logits, temperature=0.7)
    own = logits.untyped_storage().data_ptr()
    copies = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() != own]
    assert any(tensor.untyped_storage().data_ptr() == own for tensor in saved)
    assert max(tensor.numel() for tensor in copies) <= ids.numel()


class Made(TorchDispatchMode):
    """The number of elements of every tensor with room of its own that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[torch.dtype, list[int]] = {}
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.add(func.__name__.partition(".")[0])
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given:
                room = value.untyped_storage().nbytes() // value.element_size()
                self.sizes.setdefault(value.dtype, []).append(room)
        return result

    def largest(self, *dtypes: torch.dtype) -> int:
        return max((size for dtype in dtypes for size in self.sizes.get(dtype, [0])), default=0)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut out of larger logits"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("function", ["token_logprobs", "entropy"])
def test_no_copy_of_the_logits_is_made_wider_than_a_slice(
    function: str, temperature: float, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, forward and backward: every tensor that any operation makes is counted.  The one
    table of the size of the logits is their gradient, in bfloat16."""
    monkeypatch.setattr(logprobs, "SLICE", 2048)
    slice_ = 2048 * torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    columns = 40 + cut
    whole = torch.randn(16, columns, 512, generator=generator).bfloat16()
    ids = torch.randint(0, 512, (16, 40), generator=generator)
    logits = whole[:, cut:].requires_grad_()
    assert logits.is_contiguous() != cut
    assert slice_ < logits.numel() // 4
    with Made() as forward:
        if function == "entropy":
            values = entropy(logits, temperature=temperature)
        else:
            values = token_logprobs(logits, ids, temperature=temperature)
    with Made() as backward:
        values.backward(torch.ones_like(values))
    for made in (forward, backward):
        assert "exp2_" in made.operations  # what is inside of the function is seen
    for made in (forward, backward):
        assert 512 <= made.largest(torch.float32, torch.float64) <= slice_
        assert made.largest(torch.bool, torch.int64) <= slice_
    assert forward.largest(torch.bfloat16) == 0
    tables = [size for size in backward.sizes[torch.bfloat16] if size > slice_]
    assert tables == [logits.numel()]


@pytest.mark.parametrize("function", ["token_logprobs", "entropy"])
def test_the_copy_of_a_slice_is_small_beside_small_logits(function: str) -> None:
    """Half of them in the forward pass; a third, rounded up to whole rows, beside a gradient."""
    logits = torch.zeros(8, 32, 512, dtype=torch.bfloat16, requires_grad=True)
    with Made() as forward:
        if function == "entropy":
            values = entropy(logits)
        else:
            values = token_logprobs(logits, torch.zeros(8, 32, dtype=torch.int64))
    with Made() as backward:
        values.backward(torch.ones_like(values))
    assert forward.largest(torch.float32, torch.float64) == 128 * 512
    assert backward.largest(torch.float32, torch.float64) == 86 * 512


@pytest.mark.parametrize("function", ["token_logprobs", "entropy"])
def test_a_gradient_of_the_gradient_is_refused(function: str) -> None:
    """It would be wrong: the backward pass does not say how it depends on the logits."""
    logits = torch.randn(2, 3, 4).requires_grad_()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    values = entropy(logits) if function == "entropy" else token_logprobs(logits, ids)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(values.sum(), logits, create_graph=True)


@pytest.mark.parametrize("scale", [1e4, 1e6, 3e38])
def test_narrow_logits_of_great_size_keep_their_ties(scale: float) -> None:
    """2^x in place of e^x is taken of the distances, which are exact."""
    logits = torch.tensor([[[1.0, -1.0, 1.0], [0.0, 0.0, 0.0]]]).mul(scale).bfloat16()
    logits.requires_grad_()
    scores = token_logprobs(logits, torch.tensor([[0, 2]]))
    assert scores.item() == pytest.approx(-math.log(2), rel=1e-6)
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    assert gradient[0, 0].tolist() == [-0.5, 0.0, 0.5]
    assert entropy(logits)[0].tolist() == pytest.approx([math.log(2), math.log(3)], rel=1e-6)


@pytest.mark.parametrize("function", ["token_logprobs", "entropy"])
def test_a_result_may_be_changed_in_place(function: str) -> None:
    logits, ids = example()
    gradients = []
    for in_place in (False, True):
        values = entropy(logits) if function == "entropy" else token_logprobs(logits, ids)
        values = values.mul_(2) if in_place else 2 * values
        gradients.append(torch.autograd.grad(values.sum(), logits)[0])
    assert torch.equal(*gradients)


def test_the_count_sees_a_copy() -> None:
    """The textbook expression makes the copies that the test above is to find."""
    logits = torch.zeros(4, 5, 512, dtype=torch.bfloat16, requires_grad=True)
    with Made() as made:
        plain_entropy(logits.float(), 0.7).sum().backward()
    assert made.largest(torch.float32) == logits.numel()


def test_logits_cut_out_of_larger_ones(slices: int) -> None:
    """As a model's logits from the prompt's last position on: other strides, the same bits."""
    whole = 3 * torch.randn(3, 9, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1))
    results = []
    part = whole[:, 4:]
    scattered = part.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # the vocabulary is no row
    assert scattered.stride(-1) != 1
    for logits in (part.contiguous(), part, scattered):
        leaf = logits.detach().requires_grad_()
        scores, entropies = token_logprobs(leaf, ids), entropy(leaf)
        (gradient,) = torch.autograd.grad(scores.square().sum() + entropies.square().sum(), leaf)
        results.append((scores.detach(), entropies.detach(), gradient))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_any_integer_dtype_of_ids(dtype: torch.dtype) -> None:
    logits, ids = example()
    assert torch.equal(token_logprobs(logits, ids.to(dtype)), token_logprobs(logits, ids))


def test_entropy_of_one_distribution_and_of_none() -> None:
    assert entropy(torch.zeros(8)).item() == pytest.approx(math.log(8), rel=1e-6)
    assert entropy(torch.zeros(0, 3, 8)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_unsigned_ids(dtype: torch.dtype) -> None:
    logits, ids = example()
    assert torch.equal(token_logprobs(logits, ids.to(dtype)), token_logprobs(logits, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast_changes_no_bit(
    dtype: torch.dtype, temperature: float, logits_dtype: torch.dtype
) -> None:
    """Neither forward nor backward, whichever of the two it is on for."""
    results = []
    for forward, backward in itertools.product((False, True), repeat=2):
        logits, ids = example(logits_dtype)
        with torch.autocast("cpu", dtype, enabled=forward):
            scores = token_logprobs(logits, ids, temperature=temperature)
            entropies = entropy(logits, temperature=temperature)
        total = scores.square().sum() + entropies.square().sum()
        with torch.autocast("cpu", dtype, enabled=backward):
            (gradient,) = torch.autograd.grad(total, logits)
        results.append((scores.detach(), entropies.detach(), gradient))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)


@pytest.mark.parametrize("scale", [1e10, -1e10, 3e38])
def test_logits_that_leave_the_range_when_divided_by_the_temperature(
    slices: int, scale: float
) -> None:
    """Their distances decide, and a distance beyond the range is probability 0."""
    logits = torch.tensor([[[1.0, 0.5], [1.0, 1.0]], [[-0.5, 1.0], [0.25, 0.25]]]) * scale
    logits.requires_grad_()
    likely = logits[:, 0].argmax(-1)
    ids = torch.stack([torch.zeros(2, dtype=torch.int64), likely], dim=1)
    scores = token_logprobs(logits, ids, temperature=1e-30)
    entropies = entropy(logits, temperature=1e-30)
    assert scores.tolist() == [[0.0], [0.0]]
    close(entropies, torch.tensor([[0.0, math.log(2)]] * 2), atol=1e-6)
    for value in (scores, entropies):
        (gradient,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
        assert (gradient == 0).all()


def test_close_logits_of_great_size_at_a_low_temperature(slices: int) -> None:
    """Shifted by their largest, they are 0 and -1 over 1e-30 ..., exactly as without the shift."""
    ids = torch.tensor([[0, 1], [0, 1]])
    plain_ = torch.tensor([[[0.0, -1e-30], [0.0, 0.0]]] * 2, requires_grad=True)
    wanted = token_logprobs(plain_, ids, temperature=1e-30)
    assert wanted[0].item() == pytest.approx(-math.log1p(math.e), rel=1e-6)
    great = torch.tensor([[[1e9, 1e9], [0.0, -1e-30]], [[0.0, -1e-30], [1e9, 1e9]]])
    great.requires_grad_()
    ours = token_logprobs(great, ids, temperature=1e-30)
    assert ours[:, 0].tolist() == pytest.approx([-math.log(2), wanted[1].item()], rel=1e-6)
    entropies = entropy(great, temperature=1e-30)
    assert entropies[0, 0].item() == pytest.approx(math.log(2), rel=1e-6)
    assert torch.equal(entropies[0, 1], entropies[1, 0])
    (gradient,) = torch.autograd.grad((ours[1] * 1e-30).sum(), great)
    (same,) = torch.autograd.grad((wanted[1] * 1e-30).sum(), plain_)
    assert torch.equal(gradient[1, 0], same[1, 0])
    assert gradient[1, 0].tolist() == pytest.approx([-0.731059, 0.731059], rel=1e-5)
