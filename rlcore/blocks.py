"""Parts of a Llama layer with a backward pass of their own, which go through memory less often.

Between its products of matrices a layer changes single numbers, and on a processor that takes as
long as it takes to fetch them. Here it is done for as many tokens at a time as the cache holds, in
place where it can be, and little is kept for the backward pass. The values are those of torch's own
functions, bit for bit; gradients differ from theirs by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from rlcore.objectives._checks import check_no_graph

CACHED = 2**18  # numbers of one tensor that a processor's cache holds beside some others


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., d) / sqrt(mean(x^2) + eps) * weight (d,): `torch.rms_norm`."""
    normed: Tensor = _Norm.apply(x, weight, eps)
    return normed


def feed_forward(
    x: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """x (..., d) + W_down (silu(W_gate n) * W_up n), where n is x after `rms_norm`."""
    y: Tensor = _FeedForward.apply(x.reshape(-1, x.shape[-1]), norm, eps, gate, up, down)
    return y.view(x.shape)


def _scaled(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps), and by what x was multiplied, (..., 1)."""
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * scale, scale


def _norm_backward(
    grad: Tensor, scaled: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x (tokens, d) and of the weight."""
    pushed = grad * weight
    along = (pushed * scaled).mean(-1, keepdim=True)
    return pushed.sub_(scaled * along).mul_(scale), (grad * scaled).sum(0)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scaled, scale = _scaled(x, eps)
        ctx.save_for_backward(scaled, scale, weight)
        return scaled * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_no_graph()
        scaled, scale, weight = ctx.saved_tensors
        size = grad.shape
        grad, scaled, scale = grad.flatten(0, -2), scaled.flatten(0, -2), scale.flatten(0, -2)
        to_x, to_weight = _norm_backward(grad, scaled, scale, weight)
        return to_x.view(size), to_weight, None


class _FeedForward(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        # Each thread has a cache of its own; on other devices a large kernel is the better one.
        ctx.at_once = max(1, len(x))
        if x.device.type == "cpu":
            ctx.at_once = max(1, torch.get_num_threads() * CACHED // len(gate))
        y, kept = torch.empty_like(x), []
        for part, out in zip(x.split(ctx.at_once), y.split(ctx.at_once), strict=True):
            scaled, scale = _scaled(part, eps)
            normed = scaled * norm
            gates, ups = F.linear(normed, gate), F.linear(normed, up)
            torch.add(part, F.linear(F.silu(gates).mul_(ups), down), out=out)
            kept += [scaled, scale, gates, ups]
        ctx.save_for_backward(norm, gate, up, down, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_no_graph()
        norm, gate, up, down, *kept = ctx.saved_tensors
        to_x, to_norm = torch.empty_like(grad), torch.zeros_like(norm)
        to_gate, to_up, to_down = map(torch.empty_like, (gate, up, down))
        parts = zip(
            grad.split(ctx.at_once), to_x.split(ctx.at_once), *(kept[i::4] for i in range(4)),
            strict=True,
        )  # fmt: skip
        so_far = 0  # times what the gradients of the weights hold: at first not even zeros
        for part, out, scaled, scale, gates, ups in parts:
            normed, active = scaled * norm, F.silu(gates)
            to_down.addmm_(part.t(), active * ups, beta=so_far)
            to_product = part @ down
            to_ups = active.mul_(to_product)
            to_up.addmm_(to_ups.t(), normed, beta=so_far)
            to_gates = torch.ops.aten.silu_backward(to_product.mul_(ups), gates)
            to_gate.addmm_(to_gates.t(), normed, beta=so_far)
            to_normed = (to_ups @ up).addmm_(to_gates, gate)
            to_part, to_weight = _norm_backward(to_normed, scaled, scale, norm)
            torch.add(part, to_part, out=out)
            to_norm += to_weight
            so_far = 1
        return to_x, to_norm, None, to_gate, to_up, to_down
