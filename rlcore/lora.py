r"""LoRA: the weights stay, and small matrices beside them are trained (Hu et al. 2021).

A linear map $W$ becomes $W + \frac{\alpha}{r} B A$ with $A$ of shape (r, in) and $B$ of shape
(out, r); $B$ starts at 0, so the model starts as it was. The matrices are those of the package
`peft`, an extra (`pip install .[lora]`) that is imported on first use; the model keeps its class,
so every loop and the sampler take it.

A run folder's `model/` has the matrices added to the weights: it is a plain model, for `load` and
for everybody else. The checkpoint of a run holds the matrices alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.checks import brief, check_seed, check_whole, shown
from rlcore.devices import drawing

HEAD = "score"  # of a scalar model: it is new, and trained whole


@dataclass(frozen=True)
class Lora:
    r"""How large the matrices are, and where they stand.

    rank: $r$, at most the smaller side of the largest of the maps. alpha: $\alpha$; None is twice
    the rank. dropout: on the input of $A$, during SFT only. targets: the names of the linear maps,
    such as ("q_proj", "v_proj"); "all-linear", every one but the head of words.

    Raises ValueError for numbers out of range.
    """

    rank: int = 16
    alpha: int | None = None
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        check_whole(1, rank=self.rank)
        if self.alpha is not None:
            check_whole(1, alpha=self.alpha)
        number = isinstance(self.dropout, int | float) and not isinstance(self.dropout, bool)
        if not number or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: found {shown(self.dropout)}; wanted 0 <= dropout < 1")
        if self.targets != "all-linear" and (
            not isinstance(self.targets, tuple)
            or not self.targets
            or not all(isinstance(name, str) for name in self.targets)
        ):
            raise ValueError(
                f'targets: found {shown(self.targets)}; wanted "all-linear" or a tuple of names'
            )


def add_lora(model: Any, lora: Lora | None = None, *, seed: int) -> Any:
    """Put LoRA matrices into `model`, in place, and freeze its other weights; returns the model.

    model: of `load`, `load_pretrained`, `build_model` or `build_scalar_model`, whose scalar head is
    trained too. lora: None, `Lora()`. The matrices are float32 also beside bfloat16 weights, and
    the same for the same seed; the global random state is left as it was.
    Raises ValueError where peft is not installed, where the model has such matrices already, and
    for targets that it does not have or that are all smaller than the rank.
    """
    check_seed(seed)
    lora = Lora() if lora is None else lora
    if not isinstance(lora, Lora):
        raise ValueError(f"lora: found {shown(lora)}; wanted a Lora, or None")
    if has_lora(model):
        raise ValueError("model: it has LoRA matrices already; wanted a model without")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora: peft is not installed; pip install peft (extra: lora)") from error
    check_rank(model, lora)
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=[HEAD, "lm_head"] if targets == "all-linear" else None,
    )
    trained = model.training
    with drawing(seed):
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ValueError(
                f"targets: the model takes no such matrices ({brief(error)})"
            ) from error
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name or name.startswith(f"{HEAD}."))
        if "lora_" in name:
            weight.data = weight.data.float()
    return model.train(trained)


def check_rank(model: torch.nn.Module, lora: Lora) -> None:
    """ValueError for a rank above the smaller side of the largest map that is adapted.

    No change of a weight has a higher rank, and matrices of that size may never be done.
    """
    sides = [
        min(module.weight.shape)
        for name, module in model.named_modules()
        if _is_target(name, module, lora) and getattr(module.weight, "ndim", 0) == 2
    ]
    if sides and lora.rank > max(sides):
        raise ValueError(
            f"rank: found {lora.rank}; wanted at most {max(sides)}, the smaller side of the "
            "largest matrix that is adapted"
        )


def _is_target(name: str, module: Any, lora: Lora) -> bool:
    """As peft reads the names."""
    if lora.targets == "all-linear":
        linear = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        return linear and name.rpartition(".")[2] not in (HEAD, "lm_head")
    named = any(name == target or name.endswith(f".{target}") for target in lora.targets)
    return named and hasattr(module, "weight")


def has_lora(model: torch.nn.Module) -> bool:
    """Whether LoRA matrices stand beside weights of the model."""
    return any(_is_adapted(module) for module in model.modules())


def merged_state(model: torch.nn.Module) -> dict[str, Tensor]:
    r"""The weights by name, with $\frac{\alpha}{r} B A$ added: those of a model without LoRA."""
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        owner = next((o for o in _owners(name) if o in adapted), None)
        if owner is None:
            state[name] = value
            continue
        kind, _, rest = name.removeprefix(f"{owner}.").partition(".")
        if kind != "base_layer":
            continue  # one of the matrices
        if rest == "weight":
            module: Any = adapted[owner]
            with torch.no_grad():
                for adapter in module.active_adapters:
                    delta = module.get_delta_weight(adapter)
                    value = (value.to(delta.dtype) + delta).to(value.dtype)
        state[f"{owner}.{rest}"] = value
    return state


def without_lora(model: Any) -> Any:
    """A plain model to be saved, with the matrices added to its weights; the model itself where it
    has none. It shares what weights it can, and cannot be run."""
    if not has_lora(model):
        return model
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    plain.load_state_dict(merged_state(model), assign=True)
    plain.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        plain.generation_config = copy.deepcopy(model.generation_config)
    return plain


def _is_adapted(module: torch.nn.Module) -> bool:
    return hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")


def _owners(name: str) -> Iterator[str]:
    """The modules that a weight's name lies in, from the outermost."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))
