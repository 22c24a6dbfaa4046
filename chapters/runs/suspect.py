"""Spoiler: the bug of the exercise "The suspect" in chapter 11. Look at the curves first."""

from torch import Tensor

GROUP_SIZE = 8


def advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A z-score over the wrong axis: it compares responses to different prompts.

    The rows come prompt by prompt, so this table has one row per prompt; its statistics are taken
    down the columns (dim=0) where they belong along the rows (dim=1).
    """
    table = rewards.reshape(-1, GROUP_SIZE)
    centred = table - table.mean(dim=0, keepdim=True)
    std = table.std(dim=0, correction=0, keepdim=True)
    return (centred / std.where(std > 0, 1.0)).flatten()
