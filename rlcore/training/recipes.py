"""The numbers that work, one recipe a task: the notebook and the command both read them here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlcore.algorithms import Algorithm, by_name
from rlcore.checks import check_final, check_positive, check_whole
from rlcore.models import build_model, build_tokenizer
from rlcore.tasks import Task, get_task
from rlcore.training.record import Run
from rlcore.training.sft import train_sft


@dataclass(frozen=True)
class Recipe:
    """Settings of the whole way from random weights over SFT to a trained policy.

    pairs and the settings after it are for tasks with a true reward for preferences: how many pairs
    are drawn from the start, and how a reward model and a policy are trained on them.
    """

    task: str
    size: str = "tiny"
    max_length: int = 64
    sft_steps: int = 600
    sft_batch_size: int = 64
    sft_learning_rate: float = 3e-3
    steps: int = 120
    prompts_per_step: int = 32
    group_size: int = 8
    learning_rate: float = 5e-4
    final_learning_rate: float = 0.1
    pairs: int = 2000
    reward_steps: int = 150
    reward_learning_rate: float = 1e-3
    preference_steps: int = 150
    preference_batch_size: int = 64
    preference_learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        check_whole(1, sft_steps=self.sft_steps, sft_batch_size=self.sft_batch_size)
        check_whole(1, steps=self.steps, prompts_per_step=self.prompts_per_step)
        check_whole(2, group_size=self.group_size)
        check_positive(sft_learning_rate=self.sft_learning_rate, learning_rate=self.learning_rate)
        check_final(self.final_learning_rate)
        check_whole(1, pairs=self.pairs, reward_steps=self.reward_steps)
        check_whole(1, preference_steps=self.preference_steps)
        check_whole(1, preference_batch_size=self.preference_batch_size)
        check_positive(
            reward_learning_rate=self.reward_learning_rate,
            preference_learning_rate=self.preference_learning_rate,
        )

    def sft_settings(self) -> dict[str, Any]:
        """The keyword arguments of `train_sft`, seed apart."""
        return {
            "steps": self.sft_steps,
            "batch_size": self.sft_batch_size,
            "learning_rate": self.sft_learning_rate,
        }

    def policy_settings(self) -> dict[str, Any]:
        """The keyword arguments of `train_policy`, seed apart."""
        return {
            "steps": self.steps,
            "prompts_per_step": self.prompts_per_step,
            "group_size": self.group_size,
            "learning_rate": self.learning_rate,
            "final_learning_rate": self.final_learning_rate,
        }

    def reward_settings(self) -> dict[str, Any]:
        """The keyword arguments of `train_reward_model`, seed apart."""
        return {
            "steps": self.reward_steps,
            "batch_size": self.preference_batch_size,
            "learning_rate": self.reward_learning_rate,
        }

    def preference_settings(self) -> dict[str, Any]:
        """The keyword arguments of `train_preference`, seed apart."""
        return {
            "steps": self.preference_steps,
            "batch_size": self.preference_batch_size,
            "learning_rate": self.preference_learning_rate,
        }


RECIPES = {
    "sort": Recipe("sort"),
    "sort-unseen": Recipe("sort-unseen", steps=60),
    "sort-few": Recipe("sort-few"),
    "robot": Recipe("robot", steps=250, learning_rate=1e-3),
    "sort-box": Recipe("sort-box", steps=80),
    "sort-box-uneven": Recipe("sort-box-uneven", steps=80),
    "sort-filler": Recipe("sort-filler", steps=60),
    "letters": Recipe("letters", steps=40, learning_rate=3e-4),
    "formula": Recipe("formula"),
    # Also for DPO with beta 0.5, as its paper takes for summaries: at 0.1 reviews become short.
    "reviews": Recipe("reviews", sft_steps=800),
}


# What the command takes for a pretrained model, where nothing else is asked for: small steps, since
# the model is to stay what it is, and few of them, since each takes most of a minute on a CPU.
PRETRAINED = {
    "sft_steps": 16,
    "sft_batch_size": 32,
    "sft_learning_rate": 2e-5,
    "steps": 20,
    "prompts_per_step": 8,
    "learning_rate": 1e-5,
    "pairs": 64,
    "reward_steps": 20,
    "reward_learning_rate": 1e-5,
    "preference_steps": 20,
    "preference_batch_size": 8,
    "preference_learning_rate": 1e-6,
}


def recipe(task: str, **changes: Any) -> Recipe:
    """The recipe of a task, with changes by field name. ValueError for an unknown task or field."""
    get_task(task)
    unknown = sorted(set(changes) - set(Recipe.__dataclass_fields__))
    if unknown:
        names = ", ".join(Recipe.__dataclass_fields__)
        raise ValueError(f"recipe: no setting {', '.join(unknown)}; wanted one of {names}")
    return replace(RECIPES[task], **changes)


def row(
    algorithm: str | Algorithm,
    *,
    beta: float | None = 0.0,
    reward: str | None = None,
    length_alpha: float | None = 0.5,
) -> Algorithm:
    """The row as the recipes run it: the algorithm with `beta` for its KL weight.

    The recipes take beta = 0 (no KL term) for every row, so that rows differ only where the
    chapters say; None keeps the paper's own weight. reward: "verifier", "reward_model" or "several"
    in place of the row's own, as in `row("ppo", reward="verifier")`. length_alpha: of rows whose
    lambda follows the length (VAPO); the paper's 0.05, which None keeps, is for thousands of
    tokens: below 20 lambda is 0, and all rests on the critic. ValueError for a beta > 0 on a row
    without a KL term, and where reward and row do not fit together.
    """
    chosen = by_name(algorithm) if isinstance(algorithm, str) else algorithm
    if reward is not None:
        chosen = replace(chosen, reward=reward)
    if length_alpha is not None and chosen.length_alpha is not None:
        chosen = replace(chosen, length_alpha=length_alpha)
    if beta is None:
        return chosen
    if beta == 0:
        return replace(chosen, beta=0.0, kl="none")
    return replace(chosen, beta=beta)


def sft_start(
    recipe: Recipe,
    *,
    seed: int,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    trackers: Sequence[str] = (),
    progress: bool = True,
    threads: int | None = None,
    precision: str = "float32",
    device: str | torch.device | None = None,
) -> tuple[Any, Any, Task, Run]:
    """Model, tokenizer and task after SFT by the recipe, and the run: where RL starts from."""
    task = get_task(recipe.task)
    tokenizer = build_tokenizer(task.vocabulary)
    model = build_model(
        recipe.size, tokenizer, seed=seed, max_length=recipe.max_length, device=device
    )
    run = train_sft(
        model,
        tokenizer,
        task,
        **recipe.sft_settings(),
        seed=seed,
        out=out,
        resume=resume,
        trackers=trackers,
        progress=progress,
        threads=threads,
        precision=precision,
        device=device,
    )
    return model, tokenizer, task, run
