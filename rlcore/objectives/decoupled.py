r"""Question 2 with several rewards: each is compared apart, then they are added up.  (GDPO)"""

import math
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_WEIGHT,
    check_ddof,
    check_number,
    describe,
    is_dense,
    read_lengths,
)
from rlcore.objectives._groups import by_prompt, z_scores

CANCELLED = 1e-12  # of the size of its terms: a sum below this is what rounding left of 0


def decoupled_advantages(
    rewards: Tensor | Sequence[Sequence[float | None]],
    group_ids: Tensor | Sequence[int],
    *,
    weights: Tensor | Sequence[float] | None = None,
    ddof: int = 1,
    eps: float = 0.0,
    batch_ddof: int | None = None,
    batch_eps: float = 1e-4,
    scale_batch: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    r"""GDPO's advantage: a z-score per reward, their weighted sum, scaled over the batch.

    $$
    A_k = \frac{r_k - \mathrm{mean}_{group}\,r_k}{\mathrm{std}_{group}\,r_k + \epsilon},\qquad
    A_{sum} = \sum_{k=1}^{n} w_k A_k,\qquad
    \hat A = \frac{A_{sum} - \mathrm{mean}_{batch}\,A_{sum}}
    {\mathrm{std}_{batch}\,A_{sum} + \epsilon_{batch}}
    $$

    GRPO would add up the rewards first and divide once; different combinations then become one.

    - ``rewards``: ``(B, n)``, a tensor or B lists of n numbers.  NaN (None in a list) is a missing
      reward: it is left out of its group's statistics and of its row's sum.  A row that misses all
      of them is left out of the batch's statistics too, and gets 0.
    - ``group_ids``: ``(B,)``, as in ``group_advantages``, which makes the n z-scores.
    - ``weights``: $w_k$, n numbers, 1 if None.  They multiply the normalised advantages: before
      the z-score they would cancel.
    - ``ddof``, ``eps``: of the groups' std.  ``batch_ddof`` (None: as ``ddof``), ``batch_eps``: of
      the batch's.  ``scale_batch=False`` returns $A_{sum}$.
    - ``lengths``: ``(B,)``; None counts every response once.  Given, each response counts as often
      as it has tokens, and the divisor is $\sqrt{s^2 + \epsilon_{batch}^2}$: whitening over tokens.

    A group's z-scores add up to 0, so the batch mean of $A_{sum}$ is 0 unless ``lengths`` weigh it;
    it is subtracted only then.  So a group in which every reward is all equal gets exactly 0
    without ``lengths``, and with them less the mean, like every row.  A row without tokens gets 0,
    and so do all rows if $A_{sum}$ is the same in all that have some.
    Statistics are in float64.  Returns ``(B,)``, float64 for float64 rewards (and lists), else
    float32, without gradient.

    Source: GDPO, arXiv 2601.05242, eqs. 4 to 7.  The paper does not state the std; the numbers
    that it prints are those of the sample std (``ddof=1``).  It has an epsilon at the batch only;
    TRL (``normalize_then_sum``) and the authors' TRL fork add 1e-4 at both.
    TRL skips missing rewards, as here; the authors' fork turns them into 0 first.
    The authors' verl branch whitens over the response tokens (``lengths``), with 1e-6 at the group.
    For a reward that counts only if another one is earned (eq. 8): ``conditioned_rewards``, before.
    ValueError: as ``group_advantages``; rewards not ``(B, n)``, weights not n finite numbers,
    ``lengths`` not integers >= 0 or given with ``scale_batch=False``.
    """
    ddof = check_ddof(ddof)
    batch_ddof = ddof if batch_ddof is None else _read_batch_ddof(batch_ddof)
    eps = check_number("eps", eps, at_least=0)
    batch_eps = check_number("batch_eps", batch_eps, at_least=0)
    table = _read_table(rewards)
    weight = _read_weights(weights, table)
    apart = [_compare(column, group_ids, ddof, eps) for column in table.unbind(dim=1)]
    terms = weight * torch.stack(apart, dim=1)
    total = terms.sum(dim=1)
    total = torch.where(total.abs() <= CANCELLED * terms.abs().sum(dim=1), 0.0, total)
    if scale_batch:
        known = ~table.isnan().all(dim=1)
        total = _scale(total, known, _read_counts(lengths, known), batch_ddof, batch_eps)
    elif lengths is not None:
        raise ValueError(
            f"lengths is for scale_batch=True only; got {describe(lengths)} with False"
        )
    return total.to(torch.float64 if table.dtype == torch.float64 else torch.float32)


def _compare(rewards: Tensor, group_ids: Tensor | Sequence[int], ddof: int, eps: float) -> Tensor:
    """``group_advantages`` of one reward, in float64 whatever its dtype."""
    groups = by_prompt(rewards, group_ids)
    return groups.cells(z_scores(groups, ddof, eps))


def _scale(total: Tensor, known: Tensor, count: Tensor | None, ddof: int, eps: float) -> Tensor:
    """A_sum over its std in the batch.  Terms are added in ascending order, so that shuffling the
    rows changes no bit; they are divided by the largest before they are squared."""
    weighed = count is not None
    if count is None:
        count, centred = known, total  # the mean is 0
    else:
        count = count * known
        centred = _centre_counted(total, count)
    largest = centred.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    squares = (count * (centred / largest).square()).sort().values.sum()
    std = largest * (squares / (count.sum() - ddof).clamp(min=1)).sqrt()
    divisor = torch.hypot(std, std.new_tensor(eps)) if weighed else std + eps
    return torch.where(centred == 0, 0.0, centred / divisor)


def _centre_counted(total: Tensor, count: Tensor) -> Tensor:
    """A_sum less its mean, each row counted so often; 0 in rows that do not count, and everywhere
    if those that do are equal.  Measured from the lowest, so that equal ones give zeros."""
    counted = count > 0
    lowest = torch.where(counted, total, torch.inf).amin()
    above = torch.where(counted, total - lowest, 0.0)
    largest = torch.where(counted, total.abs(), 0.0).amax()
    if above.amax() <= CANCELLED * largest:
        return torch.zeros_like(total)
    mean = (count * above).sort().values.sum() / count.sum()
    return torch.where(counted, above - mean, 0.0)


def _read_batch_ddof(batch_ddof: int) -> int:
    try:
        return check_ddof(batch_ddof)
    except ValueError as error:
        raise ValueError(f"batch_{error}") from None


def _read_table(rewards: Tensor | Sequence[Sequence[float | None]]) -> Tensor:
    """(B, n), with NaN for None."""
    if not isinstance(rewards, Tensor):
        try:
            for row in (rewards, *rewards):
                if isinstance(row, Mapping | Set | bytes | bytearray):
                    raise TypeError("no order of rewards, or no rewards")
            numbers = [[math.nan if r is None else float(+r) for r in row] for row in rewards]
            rewards = torch.tensor(numbers, dtype=torch.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                "rewards must be a tensor or B lists of n numbers (None: missing); got "
                f"{describe(rewards)}"
            ) from None
    real = is_dense(rewards) and not rewards.is_complex()
    if not real or rewards.dim() != 2 or rewards.numel() == 0:
        raise ValueError(
            f"rewards must be real and of shape (B, n), B and n >= 1; got {describe(rewards)}"
        )
    if rewards.is_meta:
        raise ValueError(
            "rewards must be real and of shape (B, n), B and n >= 1, and hold data; got "
            f"{describe(rewards)}"
        )
    if rewards.is_floating_point() and rewards.itemsize == 1:
        rewards = rewards.float()  # torch knows few operations of float8
    if rewards.isinf().any():
        row, column = rewards.isinf().nonzero()[0].tolist()
        raise ValueError(
            f"rewards must be finite or missing (NaN); got {rewards[row, column].item()} in row "
            f"{row}, column {column}"
        )
    return rewards.detach()


def _read_weights(weights: Tensor | Sequence[float] | None, table: Tensor) -> Tensor:
    """(n,) in float64."""
    size = table.shape[1]
    if weights is None:
        return table.new_ones(size, dtype=torch.float64)
    try:
        values = weights
        if not isinstance(values, Tensor):  # torch moves a tensor to the default device
            values = torch.as_tensor(values, dtype=torch.float64, device=table.device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"weights must be {size} numbers; got {describe(weights)}") from None
    real = is_dense(values) and not values.is_complex() and not values.is_meta
    if not real or values.shape != (size,):
        raise ValueError(
            f"weights must be real and of shape ({size},), one per reward; got {describe(values)}"
        )
    values = values.detach().double().to(table.device)
    bad = ~(values.abs() <= MAX_WEIGHT)
    if bad.any():
        place = int(bad.nonzero()[0])
        raise ValueError(
            f"weights must be finite and at most {MAX_WEIGHT:g} in size; got "
            f"{values[place].item():g} at index {place}"
        )
    return values


def _read_counts(lengths: Tensor | Sequence[int] | None, known: Tensor) -> Tensor | None:
    if lengths is None:
        return None
    counts = read_lengths(lengths, known.device)
    if counts.shape != known.shape:
        raise ValueError(
            f"lengths must be of shape {tuple(known.shape)}, one per row; got {describe(counts)}"
        )
    return counts.to(known.device)
