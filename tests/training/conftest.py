"""What the training tests share: a task that a random model meets half the time, and starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore import models, training
from rlcore.tasks import SORT, Task


def coin_flip(problem: str, response: str) -> float:
    """A reward that no model can learn and that comes half the time: a parity of the text."""
    return float(sum(map(ord, response)) % 2 == 0)


@pytest.fixture
def coin() -> Task:
    return replace(SORT, name="coin", verify=coin_flip)


@pytest.fixture
def make() -> Callable[..., tuple[Any, Any]]:
    """make(**settings of build_model) -> (model, tokenizer), the same each time."""

    def build(size: str = "nano", **settings: Any) -> tuple[Any, Any]:
        tokenizer = models.build_tokenizer(SORT.symbols)
        return models.build_model(size, tokenizer, **{"seed": 0, **settings}), tokenizer

    return build


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """start(task, seed) -> the folder of the SFT start by its recipe, made once per test run."""
    made: dict[tuple[str, int], Path] = {}

    def build(task: str, seed: int) -> Path:
        if (task, seed) not in made:
            folder = tmp_path_factory.mktemp("start") / f"{task}-{seed}"
            recipe = training.recipe(task)
            training.sft_start(
                recipe, seed=seed, out=folder, progress=False, threads=1, device="cpu"
            )
            made[task, seed] = folder / "model"
        return made[task, seed]

    return build
