"""Models of which a part is frozen: what a run remembers of them, and nothing more.

A model with LoRA matrices has a few per cent of its weights trained. A checkpoint then holds those
alone, and the start that a KL term compares with is a copy of those alone, too.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights that are trained, by name."""
    return {name: w for name, w in model.named_parameters() if w.requires_grad}


def is_partly_frozen(model: torch.nn.Module) -> bool:
    """Whether some weights are trained and others are not."""
    return 0 < len(trained(model)) < len(dict(model.named_parameters()))


def weight_settings(model: torch.nn.Module) -> dict[str, Any]:
    """What a record says of the weights: how many are trained, and which ones stay as they are.

    The frozen ones are not in the checkpoint, so a resumed run must find the same: a checksum.
    """
    count = sum(weight.numel() for weight in trained(model).values())
    if not is_partly_frozen(model):
        return {"parameters": count}
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            digest.update(name.encode())
            digest.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"parameters": count, "frozen": digest.hexdigest()}


def checkpointed(model: torch.nn.Module) -> Any:
    """What a checkpoint keeps of the model: it, or the part of it that is trained."""
    return TrainedPart(model) if is_partly_frozen(model) else model


class TrainedPart:
    """The state of the weights that are trained."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """By name, as a module's."""
        return {name: weight.detach() for name, weight in trained(self.model).items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave. ValueError for other weights than the model trains."""
        weights = trained(self.model)
        if set(weights) != set(state):
            odd = sorted(set(weights) ^ set(state))
            raise ValueError(f"the model and the checkpoint differ in {odd[0]}")
        for name, weight in weights.items():
            weight.copy_(state[name])


def start_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model as it is now, to be compared with later: a frozen copy, or `StartWeights`."""
    if is_partly_frozen(model):
        return StartWeights(model)
    return copy.deepcopy(model).eval().requires_grad_(False)


class StartWeights(torch.nn.Module):
    """A copy of the trained weights alone; `at_start` puts them in place for a forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.weights = trained(model)  # no Parameter of this module: a dict is not registered
        self.model = (model,)  # nor is a tuple
        for i, weight in enumerate(self.weights.values()):
            self.register_buffer(str(i), weight.detach().clone())

    def swap(self) -> None:
        """Exchange the model's weights with the copies."""
        for weight, (name, kept) in zip(
            self.weights.values(), list(self.named_buffers()), strict=True
        ):
            weight.data, kept = kept, weight.data
            self._buffers[name] = kept


@contextmanager
def at_start(reference: Any) -> Iterator[Any]:
    """The model that `start_of` remembers, for forward passes without a gradient in the block."""
    if not isinstance(reference, StartWeights):
        yield reference
        return
    reference.swap()
    try:
        yield reference.model[0]
    finally:
        reference.swap()
