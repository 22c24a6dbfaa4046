"""Training: SFT, preference pairs, reward models and the loop of every online algorithm.

With records, checkpoints and recipes.
"""

from __future__ import annotations

from rlcore.files import WriteError
from rlcore.training.loop import NonFiniteError
from rlcore.training.policy import train_policy
from rlcore.training.preference import train_preference
from rlcore.training.recipes import PRETRAINED, RECIPES, Recipe, recipe, row, sft_start
from rlcore.training.record import Run, read_records, read_run
from rlcore.training.reward import train_reward_model
from rlcore.training.sft import train_sft
from rlcore.training.trainable import check_trainable

__all__ = [
    "PRETRAINED",
    "RECIPES",
    "NonFiniteError",
    "Recipe",
    "Run",
    "WriteError",
    "check_trainable",
    "read_records",
    "read_run",
    "recipe",
    "row",
    "sft_start",
    "train_policy",
    "train_preference",
    "train_reward_model",
    "train_sft",
]
