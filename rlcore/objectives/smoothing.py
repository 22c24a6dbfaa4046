r"""Question 2 with a memory: worth more than what this prompt has earned so far?  (DCPO)"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.objectives._checks import Rewards, check_ddof, describe, is_dense, read_rewards
from rlcore.objectives._groups import by_prompt, means, rounding, stds, z_scores

MAX_REWARD = 1e150  # its square is in the range of float64
MIN_VARIANCE = 1e-290  # below it squares lose digits: no spread


class RewardHistory(NamedTuple):
    """The rewards that prompts have had, summed up: see ``smoothed_advantages``.

    Four plain tensors, ``group_ids`` ascending.  ``history._asdict()`` is what a checkpoint keeps,
    ``RewardHistory(**saved)`` what it gives back, with the same bits.
    """

    group_ids: Tensor  # (P,) int64, the prompts visited so far
    visits: Tensor  # (P,) int64, how often each
    mean: Tensor  # (P,) float64, of the rewards of all visits
    variance: Tensor  # (P,) float64, the std of the rewards of all visits, squared

    @classmethod
    def empty(cls) -> "RewardHistory":
        """No prompt visited yet."""
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        return cls(none, none.clone(), none.double(), none.double())


class SmoothedAdvantages(NamedTuple):
    """See ``smoothed_advantages``."""

    advantages: Tensor  # (B,)
    history: RewardHistory  # with this batch in it


def smoothed_advantages(
    rewards: Rewards,
    group_ids: Tensor | Sequence[int],
    history: RewardHistory | None = None,
    *,
    ddof: int = 0,
) -> SmoothedAdvantages:
    r"""DCPO's advantage: the z-score in the group, smoothed with the one over all visits so far.

    At the $i$-th visit to a prompt, with the mean $\mu_{new}$ and std $\sigma_{new}$ of its rewards
    in this batch and those of the visits before, $\mu_{old}$ and $\sigma_{old}$:

    $$
    \mu_{tot} = \frac{\mu_{new} + (i-1)\mu_{old}}{i},\qquad
    \sigma_{tot}^2 = \frac1i\Big[\sigma_{new}^2 + (i-1)\sigma_{old}^2
    + \frac{i-1}{i}(\mu_{old} - \mu_{new})^2\Big]
    $$

    $$
    \hat A_{new} = \frac{R - \mu_{new}}{\sigma_{new}},\qquad
    \hat A_{tot} = \frac{R - \mu_{tot}}{\sigma_{tot}},\qquad
    \hat{SA}_{new} = \tfrac{i-1}{i}\hat A_{new} + \tfrac1i\hat A_{tot},\qquad
    \hat{SA}_{tot} = \tfrac1i\hat A_{new} + \tfrac{i-1}{i}\hat A_{tot}
    $$

    Each response gets the one of the two that is smaller in size, $\hat{SA}_{tot}$ if they tie.
    A term whose std is 0 counts as 0.  So the first visit gives GRPO's z-score; a group whose
    rewards are all equal, at a later visit, still gets $\frac1i\hat A_{tot}$; and a prompt that has
    only ever had one reward stays at exactly 0.

    ``rewards`` ``(B,)``, ``group_ids`` ``(B,)``: as in ``group_advantages``, errors included; all
    rows of a batch with one id are one visit.  Missing rewards (NaN, None) are left out and their
    advantage is 0; a prompt whose rewards are all missing is not visited.  Visits weigh alike,
    however many rewards each had.
    ``history``: what the call before returned, None at the start; it is not changed, and is moved
    to the device of the rewards if it lies elsewhere.  Statistics are in float64; the advantages
    are float64 for float64 rewards (and lists), else float32, and carry no gradient.

    Source: DCPO, arXiv 2509.02333, eqs. 5 to 7, 29 and 30.
    The paper has the population std (``ddof=0``), with which $\sigma_{tot}$ is the std of the
    rewards of all visits together; the released code has the sample std (``ddof=1``) in the same
    recursion, which is the std of nothing then.
    The released scripts leave ``use_old_mean`` off, so that every visit counts as the first.
    ValueError: also a reward above 1e150 in size, and a history that is none.  A std over all
    visits counts as 0 below 1e-145, and where it is no more than rounding makes of equal rewards
    (see ``group_advantages``).
    """
    ddof = check_ddof(ddof)
    given = read_rewards(rewards)
    groups = by_prompt(given, group_ids)
    table, prompts, line = groups.table, groups.names.long(), groups.line
    alike = groups.equal[:, None] & ~table.isnan()  # up to rounding
    values = groups.cells(torch.where(alike, groups.lowest, table))
    _check_size(given)
    past = _read_history(history, values.device)
    visited = ~table.isnan().all(dim=1)

    before, old_mean, old_variance = _look_up(past, prompts)
    visit = before + 1  # i
    new_mean = means(groups)
    mean = old_mean + (new_mean - old_mean) / visit  # exact where the two are equal
    spread = stds(groups, ddof).square() + before * old_variance
    variance = (spread + before / visit * (old_mean - new_mean).square()) / visit
    largest = torch.maximum(table.abs().nan_to_num(0.0).amax(dim=1), old_mean.abs())
    least = (rounding(given.dtype) * largest).square().clamp(min=MIN_VARIANCE)
    variance = torch.where(variance < least, 0.0, variance)

    new = groups.cells(z_scores(groups, ddof, 0.0))
    std = torch.where(variance > 0, variance, torch.inf).sqrt()  # a term without spread counts 0
    total = ((values - mean[line]) / std[line]).nan_to_num(0.0)  # and so does a missing reward
    total = torch.where(visit[line] == 1, new, total)
    share = (1 / visit)[line]
    smooth_new = (1 - share) * new + share * total
    smooth_total = share * new + (1 - share) * total
    advantages = torch.where(smooth_new.abs() < smooth_total.abs(), smooth_new, smooth_total)
    entry = RewardHistory(prompts, visit.long(), mean, variance)
    return SmoothedAdvantages(advantages.to(groups.dtype), _merge(past, entry, visited))


def _look_up(past: RewardHistory, prompts: Tensor) -> Tensor:
    """Visits, mean and variance of each of these prompts, (3, P); 0 for one never visited."""
    found = prompts.new_zeros(3, len(prompts), dtype=torch.float64)
    known = torch.isin(prompts, past.group_ids)
    place = torch.searchsorted(past.group_ids, prompts[known])
    for mine, theirs in zip(found, past[1:], strict=True):
        mine[known] = theirs[place].double()
    return found


def _merge(past: RewardHistory, entry: RewardHistory, visited: Tensor) -> RewardHistory:
    """The history with these prompts in it, those that were visited."""
    kept = ~torch.isin(past.group_ids, entry.group_ids[visited])
    order = torch.cat([past.group_ids[kept], entry.group_ids[visited]]).argsort()
    return RewardHistory(
        *(torch.cat([old[kept], new[visited]])[order] for old, new in zip(past, entry, strict=True))
    )


def _check_size(values: Tensor) -> None:
    huge = values.double().abs() > MAX_REWARD
    if huge.any():
        row = int(huge.nonzero()[0])
        raise ValueError(
            f"rewards must be at most {MAX_REWARD:g} in size, so that a variance can be kept; got "
            f"{values[row].item():g} in row {row}"
        )


def _read_history(history: RewardHistory | None, device: torch.device) -> RewardHistory:
    if history is None:
        history = RewardHistory.empty()
    if not isinstance(history, RewardHistory):
        raise ValueError(f"history must be a RewardHistory or None; got {describe(history)}")
    for name, values in history._asdict().items():
        wanted = torch.float64 if name in ("mean", "variance") else torch.int64
        held = is_dense(values) and not values.is_meta
        if not held or values.dim() != 1 or values.dtype != wanted:
            raise ValueError(
                f"history.{name} must be of shape (P,) and dtype {wanted}; got {describe(values)}"
            )
        if len(values) != len(history.group_ids):
            raise ValueError(
                f"history.{name} must be of shape ({len(history.group_ids)},), as its group_ids; "
                f"got {describe(values)}"
            )
    ids, visits, mean, variance = history
    right = {
        "group_ids must be ascending": torch.cat([ids[:1] == ids[:1], ids[1:] > ids[:-1]]),
        "visits must be >= 1": visits >= 1,
        f"mean must be at most {MAX_REWARD:g} in size": mean.abs() <= MAX_REWARD,
        f"variance must be in [0, {MAX_REWARD**2:g}]": (variance >= 0)
        & (variance <= MAX_REWARD**2),
    }
    for values, (rule, holds) in zip(history, right.items(), strict=True):
        if not holds.all():
            prompt = int((~holds).nonzero()[0])
            raise ValueError(f"history.{rule}; got {values[prompt].item():g} at index {prompt}")
    return RewardHistory(*(values.detach().to(device) for values in history))
