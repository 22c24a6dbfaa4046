"""What the training tests share: a task that a random model meets half the time, and starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from rlcore import models, training
from rlcore.tasks import SORT, Task


def coin_flip(problem: str, response: str) -> float:
    """A reward that no model can learn and that comes half the time: a parity of the text."""
    return float(sum(map(ord, response)) % 2 == 0)


@pytest.fixture(scope="session")
def coin() -> Task:
    return replace(SORT, name="coin", verify=coin_flip)


@pytest.fixture(scope="session")
def make() -> Callable[..., tuple[Any, Any]]:
    """make(**settings of build_model) -> (model, tokenizer), the same each time."""

    def build(size: str = "nano", **settings: Any) -> tuple[Any, Any]:
        tokenizer = models.build_tokenizer(SORT.symbols)
        return models.build_model(size, tokenizer, **{"seed": 0, **settings}), tokenizer

    return build


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of one run of the tests have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def start(shared_folder: Path) -> Callable[[str, int], Path]:
    """start(task, seed) -> the SFT start by the task's recipe, made once for all processes."""

    def build(task: str, seed: int) -> Path:
        folder = shared_folder / f"start-{task}-{seed}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "model").exists():
                training.sft_start(
                    training.recipe(task),
                    seed=seed,
                    out=folder,
                    resume=True,
                    progress=False,
                    threads=1,
                    device="cpu",
                )
        return folder / "model"

    return build
