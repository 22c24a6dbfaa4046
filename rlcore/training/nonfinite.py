"""Why a loss or a gradient was not finite: what can be told from the step that it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

MISSING = ("reward",)  # NaN there is a reward that is missing
SHOWN = 5  # rows, names and past steps in a message


def diagnose(
    models: Mapping[str, torch.nn.Module],
    batch: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    learning_rate: float,
    moved: bool,
) -> dict[str, Any]:
    """What is not finite, and the likely cause in words.

    models: what the run trains, by name, with the gradients of the step that failed. metrics: of
    the steps before it. moved: whether an update of this step was made. Returns cause; weights and
    gradients, how many entries of each parameter are not finite; rows, where a tensor of the batch
    is not; statistics, those of the loss that are not; largest_gradient, the name of the parameter
    and the size of the entry; learning_rate; and grad_norms, of the last steps.
    """
    weights, gradients, largest = {}, {}, ("", 0.0)
    for name, parameter in named_parameters(models):
        bad = int((~parameter.isfinite()).sum())
        if bad:
            weights[name] = bad
        if parameter.grad is not None and parameter.grad.numel():
            finite = parameter.grad.isfinite()
            if not bool(finite.all()):
                gradients[name] = int((~finite).sum())
            most = float(torch.where(finite, parameter.grad, 0.0).abs().max())
            largest = max(largest, (name, most), key=lambda pair: pair[1])
    found: dict[str, Any] = {
        "weights": weights,
        "gradients": gradients,
        "rows": {name: rows for name, rows in bad_rows(batch) if rows},
        "statistics": {
            name: value
            for name, value in batch.get("statistics", {}).items()
            if not bool(torch.tensor(value).isfinite())
        },
        "largest_gradient": list(largest),
        "learning_rate": learning_rate,
        "grad_norms": [row["grad_norm"] for row in metrics if row.get("grad_norm") is not None][
            -SHOWN:
        ],
    }
    found["cause"] = in_words(found, moved)
    return found


def in_words(found: Mapping[str, Any], moved: bool) -> str:
    """The likely cause, from what `diagnose` found."""
    if found["weights"]:
        when = "the update made" if moved else "before any update there were"
        said = f"{when} infinite or NaN weights in {listed(found['weights'])}"
    elif found["rows"]:
        name, rows = next(iter(found["rows"].items()))
        said = f"the trained weights are finite, {name} is not in row {listed(rows)} of the batch"
    elif found["statistics"]:
        values = [f"{name} {value}" for name, value in found["statistics"].items()]
        said = f"finite log-probs, and a term of the loss overflowed: {listed(values)}"
    elif found["gradients"]:
        said = f"a finite loss, and its gradient overflowed in {listed(found['gradients'])}"
    else:
        name, size = found["largest_gradient"]
        said = "every gradient is finite, the sum of their squares is not; the largest is "
        said += f"{size:.3g}, of {name}"
    norms = found["grad_norms"]
    said += f"; learning rate {found['learning_rate']:.3g}"
    if norms:
        said += f", gradient norms before {', '.join(f'{norm:.3g}' for norm in norms)}"
        if len(norms) > 1 and norms[-1] > 10 * median(norms[:-1]):
            said += " and growing: a smaller learning rate may do"
    return said


def listed(names: Any) -> str:
    """The first few, and how many more."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more


def named_parameters(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Those that are trained, `model.layers.0...`."""
    for name, model in models.items():
        for inner, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield f"{name}.{inner}", parameter


def bad_rows(batch: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """For each tensor of a batch, the rows where it is not finite."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name not in MISSING:
            bad = ~value.isfinite().reshape(len(value), -1).all(1)
            yield name, bad.nonzero()[:, 0].tolist()
