"""Checkpoints: everything that the next step depends on, written whole or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore.checks import brief
from rlcore.files import write_whole


def get_random_state() -> dict[str, Any]:
    """The state of every global generator: python, numpy, torch, and CUDA where there is one."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `get_random_state` returned."""
    random.setstate(as_tuples(state["python"]))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def as_tuples(state: Any) -> Any:
    """`random.Random.setstate` wants tuples where a file may hold lists."""
    return tuple(as_tuples(part) for part in state) if isinstance(state, list | tuple) else state


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global generator for the block, then put the caller's states back."""
    before = get_random_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(before)


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Save `state`; a reader sees the old file or the new one, never a half (see `write_whole`).

    Raises WriteError, an OSError, naming the file when it cannot be written; the old one is then
    still there.
    """
    write_whole(path, lambda file: torch.save(state, file), "checkpoint ")


def read_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The state in `path`, or None when there is no such file. No code in it is run.

    Raises ValueError when it is no checkpoint, or was written with other settings: the rest of the
    run would then be neither the old run nor the new one.
    """
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved = dict(state["settings"])
    except OSError:
        raise
    except Exception as error:  # a damaged file fails in as many ways as there are bytes
        message = f"resume: {path} is damaged or not a checkpoint ({brief(error)})"
        raise ValueError(message) from error
    changed = _changed(saved, settings)
    if changed:
        said = "; ".join(f"{name} was {a!r}, now {b!r}" for name, a, b in changed)
        raise ValueError(f"resume: {path} belongs to another run: {said}")
    return state


def _changed(saved: dict[str, Any], settings: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The settings that differ: name, old and new value; of a row, only its fields that do."""
    found = []
    for name in sorted({*saved, *settings}):
        old, new = saved.get(name), settings.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [(f"{name}.{field}", a, b) for field, a, b in _changed(old, new)]
        elif old != new:
            found.append((name, old, new))
    return found
