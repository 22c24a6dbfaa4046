"""What the policy loop asks of a row before it starts: that all it needs is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlcore.algorithms import Algorithm
from rlcore.models import _head
from rlcore.tasks import Task


def check_trainable(
    algorithm: Algorithm,
    task: Task,
    *,
    model: Any = None,
    reward_model: Any = None,
    reward_weights: Mapping[str, float] | None = None,
    critic: Any = None,
    advantage_function: Any = None,
) -> None:
    """ValueError for what is no row, for something that the row lacks, and for what it ignores.

    Every row of `rlcore.algorithms` can be trained: one with several rewards on a task that has
    them, one with a reward model where a reward model is given.
    model: the policy, where it is there already: a reward model or critic must read all its tokens.
    """
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm: found {algorithm!r}; wanted an Algorithm, as row() gives")
    _check_reward(algorithm, task, reward_model, reward_weights)
    if algorithm.advantage != "gae" and critic is not None:
        raise ValueError(
            f'critic: {algorithm.name} has none (advantage="{algorithm.advantage}"); wanted None'
        )
    if algorithm.advantage == "gae" and advantage_function is not None:
        raise ValueError(
            f"advantage_function: {algorithm.name} has a critic, and an advantage for each token; "
            "wanted None"
        )
    for name, scalar in (("reward_model", reward_model), ("critic", critic)):
        if scalar is not None:
            _check_scalar(name, scalar, model)


def _check_scalar(name: str, scalar: Any, policy: Any) -> None:
    try:
        _head(scalar)
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).partition(': ')[2]}") from None
    if policy is None:
        return
    found, wanted = (m.get_input_embeddings().num_embeddings for m in (scalar, policy))
    if found < wanted:
        raise ValueError(
            f"{name}: found a model of {found} tokens; wanted at least the policy's {wanted}"
        )


def _check_reward(
    row: Algorithm, task: Task, reward_model: Any, weights: Mapping[str, float] | None
) -> None:
    """Where the reward comes from."""
    if row.reward == "several" and task.rewards is None:
        raise ValueError(
            f"task: {task.name!r} has one reward, {row.name} takes several; wanted a task with "
            "rewards, such as sort-box"
        )
    if row.reward == "reward_model" and reward_model is None:
        raise ValueError(
            f"reward_model: {row.name} asks a reward model, found None; wanted a scalar model "
            "(train_reward_model), or the row with the task's verifier: "
            'dataclasses.replace(row, reward="verifier")'
        )
    if row.reward != "reward_model" and reward_model is not None:
        raise ValueError(
            f'reward_model: {row.name} has reward="{row.reward}"; wanted None, or '
            'dataclasses.replace(row, reward="reward_model")'
        )
    if row.reward == "reward_model" and row.nll_coef > 0:
        raise ValueError(
            f"algorithm: {row.name} raises the likelihood of correct responses (nll_coef), which "
            'a reward model does not know; wanted nll_coef=0 or reward="verifier"'
        )
    if weights is not None:
        check_weights(row, task, weights)


def check_weights(row: Algorithm, task: Task, weights: Mapping[str, float]) -> None:
    """A finite number for each reward of the task, by name."""
    if row.reward != "several":
        raise ValueError(f"reward_weights: {row.name} has one reward; wanted None")
    if not isinstance(weights, Mapping) or set(weights) != set(task.reward_names):
        raise ValueError(
            f"reward_weights: found {weights!r}; wanted a number for each of "
            f"{', '.join(task.reward_names)}"
        )
    for name, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise ValueError(f"reward_weights: found {weight!r} for {name}; wanted a finite number")
