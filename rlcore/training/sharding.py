"""The update of a large model: gradients and optimizer state shared out over processes (FSDP).

A twin of the model, sharded by torch's `fully_shard`, makes forward and backward pass and is what
the optimizer moves: each process has its share of the twin's weights, their gradients and moments,
and layers come together only while they are computed. The model itself stays whole in every process
and takes the twin's weights after each update: it samples, which is hundreds of forward passes that
no two processes make alike, it is evaluated and saved, and checkpoints are those of a run that is
not shared out. So a process needs room for the weights once, and for three times their size
(float32 weights, gradients, two moments: 4 in all) divided by the number of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlcore.training.processes import Processes


def check_shard(shard: Any, model: Any, world: Processes) -> None:
    """ValueError for a model that cannot be shared out, and where nobody is there to share."""
    if not isinstance(shard, bool):
        raise ValueError(f"shard: found {shard!r}; wanted True or False")
    if not shard:
        return
    if world.size == 1:
        raise ValueError("shard: found True with 1 process; wanted several (torchrun), or False")
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"shard: found {frozen[0]} frozen; wanted a model that is trained as a whole, or False "
            "(of adapters, gradients and optimizer state are small)"
        )


def sharded_twin(model: Any, world: Processes) -> Any:
    """A copy of the model of which this process has its share of each weight.

    Every layer is a unit of its own, what is left another. Gradients are added up, not averaged.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    twin = copy.deepcopy(model)
    layers = [
        m for parts in twin.modules() if isinstance(parts, torch.nn.ModuleList) for m in parts
    ]
    for module in (*layers, twin):
        fully_shard(module, mesh=mesh)
    for module in twin.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Else float32 is multiplied by 1 on its way, which nccl can do and gloo cannot.
            module.set_force_sum_reduction_for_comms(True)
    return twin


@contextmanager
def coupled(
    model: Any, twin: Any, optimizer: torch.optim.Optimizer, world: Processes
) -> Iterator[None]:
    """In the block the model follows its twin after each update, and the twin a model that was
    loaded; without a twin nothing happens.

    The optimizer, which moves the twin, says and takes its state as that of the whole model.
    """
    if twin is None:
        yield
        return
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    shares = [share for _, share in pairs]

    @torch.no_grad()
    def to_model(*_: Any) -> None:
        for whole, share in pairs:
            whole.copy_(share.full_tensor())

    @torch.no_grad()
    def to_twin(*_: Any) -> None:
        for whole, share in pairs:
            share.copy_(_as(whole, share))

    def gathered(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        def whole(value: Any) -> Any:
            if not hasattr(value, "full_tensor"):
                return value
            full = value.full_tensor()
            return full.cpu() if world.is_main else None  # who writes the checkpoint

        each = {
            i: {name: whole(value) for name, value in of.items()}
            for i, of in state["state"].items()
        }
        return {**state, "state": each}

    def shared_out(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        each = {
            i: {name: _as(v, shares[i]) if v.dim() else v for name, v in of.items()}
            for i, of in state["state"].items()
        }
        return {**state, "state": each}

    hooks = [
        optimizer.register_step_post_hook(to_model),
        optimizer.register_state_dict_post_hook(gathered),
        optimizer.register_load_state_dict_pre_hook(shared_out),
        model.register_load_state_dict_post_hook(to_twin),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _as(whole: torch.Tensor, share: Any) -> torch.Tensor:
    """A whole tensor, shared out as another one is."""
    from torch.distributed.tensor import distribute_tensor

    here = whole.detach().to(share.device)
    return distribute_tensor(here, share.device_mesh, share.placements)
