r"""Which responses and prompts count: dynamic sampling and overlong filtering.

A group whose rewards are all equal has no gradient.  DAPO samples on until the batch holds only
groups that have one; a response that was cut by the length limit can be left out of the loss while
its reward still shapes the statistics of its group.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.objectives._checks import Rewards, check_count, describe, is_dense, read_mask
from rlcore.objectives._groups import by_prompt


def informative_rows(
    rewards: Rewards, group_ids: Tensor | Sequence[int], *, wanted: int | None = None
) -> Tensor:
    r"""The rows of prompts whose rewards are not all equal: $0 < |\{g : correct\}| < G$.

    ``rewards`` (B,), ``group_ids`` (B,), as for ``group_advantages``; returns (B,), bool, the same
    for all rows of a prompt.  Rewards that differ by rounding alone are equal.  Missing rewards are
    not compared, and their rows go with their prompt.  ``wanted``: at most so many prompts, those
    that come first in the batch; dynamic sampling drops the surplus of its last round this way.

    Source: DAPO, arXiv 2503.14476, the constraint of eqs. 8 and 11.  It speaks of right and wrong
    answers: give the rewards of the verifier, not yet the overlong penalty, with which two wrong
    answers of different lengths are "not equal".  verl's recipe keeps prompts whose metric has a
    std > 0; TRL does not implement it and only logs the share (``frac_reward_zero_std``).

    ValueError: as ``group_advantages``; ``wanted`` < 0.
    """
    limit = None if wanted is None else check_count("wanted", wanted, at_least=0)
    groups = by_prompt(rewards, group_ids)
    line = groups.line
    rows = ~groups.equal[line]
    if limit is None:
        return rows
    place = torch.arange(len(line), device=line.device)
    first = torch.full((len(groups.table),), len(line), device=line.device)
    first = first.scatter_reduce(0, line[rows], place[rows], "amin")  # B: nothing to learn here
    kept = first.argsort()[:limit]
    return rows & torch.isin(line, kept)


def overlong_filter(response_mask: Tensor, truncated: Tensor) -> Tensor:
    r"""The mask without the responses that the length limit cut: they no longer enter the loss.

    ``response_mask`` (B, T); ``truncated`` (B,), bool, true where the response ended without a stop
    token; returns (B, T), bool, with the truncated rows empty.  Give it to the loss with
    ``allow_empty=True``, after the advantages were taken from ALL rows: the reward of a truncated
    response still shapes the statistics of its group.

    Source: DAPO, arXiv 2503.14476, sec. 3.4 (overlong filtering).  Its divisor is that of what is
    left.  TRL's ``mask_truncated_completions`` still divides by all rows with
    ``loss_type="grpo"`` (give ``total`` to do the same), by the tokens left with ``"dapo"``.

    ValueError: a mask that is not one (empty rows are allowed), ``truncated`` not of shape (B,) or
    not booleans.
    """
    mask = read_mask(response_mask, allow_empty=True)
    if not is_dense(truncated) or truncated.shape != mask.shape[:1]:
        raise ValueError(
            f"truncated must be a tensor of shape {tuple(mask.shape[:1])}, one per row of "
            f"response_mask; got {describe(truncated)}"
        )
    if truncated.dtype != torch.bool:
        raise ValueError(f"truncated must hold booleans; got {describe(truncated)}")
    if truncated.device != mask.device:
        raise ValueError(
            f"truncated must be on {mask.device}, as response_mask; got {truncated.device}"
        )
    return mask & ~truncated[:, None]


class Refill(NamedTuple):
    """What dynamic sampling does next: see ``refill``."""

    prompts: int  # how many new prompts to sample groups for, 0 when it stops
    stop: bool  # True: the batch is full, or this was the last round


def refill(kept: int, wanted: int, rounds: int, *, max_rounds: int | None) -> Refill:
    r"""What dynamic sampling does next, after ``rounds`` rounds that left ``kept`` prompts.

    ``kept``: prompts whose rewards are not all equal, over all rounds of this step; ``wanted``: how
    many the step trains on; ``max_rounds``: the most rounds for one step, ``None`` for no limit.
    While fewer than ``wanted`` are kept, ``wanted`` new prompts are sampled; then it stops, and
    ``informative_rows(..., wanted=wanted)`` drops the surplus, first come, first kept.

    After ``max_rounds`` it stops with what there is (``kept < wanted``, maybe 0): the step trains
    on fewer prompts.

    Source: DAPO, arXiv 2503.14476, sec. 3.2 and algorithm 1, which samples on without a limit.  In
    verl's recipe reaching the limit (``max_num_gen_batches``) is an error that ends the run, and a
    round may hold more prompts than the step trains on (``gen_batch_size``).

    ValueError: counts that are not integers, ``kept`` or ``rounds`` < 0, ``wanted`` or
    ``max_rounds`` < 1.
    """
    kept = check_count("kept", kept, at_least=0)
    wanted = check_count("wanted", wanted)
    rounds = check_count("rounds", rounds, at_least=0)
    limit = None if max_rounds is None else check_count("max_rounds", max_rounds)
    stop = kept >= wanted or (limit is not None and rounds >= limit)
    return Refill(prompts=0 if stop else wanted, stop=stop)
