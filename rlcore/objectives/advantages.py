r"""Question 2: worth more than what?  From rewards $R^{(g)}$ to advantages $\hat A^{(g)}$.

A group is the set of responses $y^{(1)}, \ldots, y^{(G)}$ to one prompt $x$; it is known by the
prompt's id, never by position, so the order of the rows means nothing.

The same everywhere in this file:

- ``rewards`` (B,): a tensor of any real dtype, or a list of numbers.  ``NaN`` (``None`` in a list)
  is a missing reward, the verifier abstained: it is left out of the statistics and its own
  advantage is 0.  An infinite reward is an error, and so is one so large that a sum of B could
  overflow the result's dtype.
- ``group_ids`` (B,): integers, the id of the prompt that each row answers.  A group of one row is
  an error (there is nothing to compare with); a group with one reward that is not missing gets 0.
- Statistics are computed in float64.  The result is float64 for float64 rewards (and for lists),
  else float32, and carries no gradient.
- If all rewards of a group are equal, its advantages are exactly 0, in every dtype and for every
  setting (a mean of equal numbers can miss them by a bit: see ``_groups``).  Equal means up to
  rounding, as 0.1 + 0.2 and 0.3 are: no further apart than 8 times the machine epsilon of the
  rewards, float64's for float64 and lists, float32's for narrower floats, times the largest of them
  in size.  Integers are compared exactly.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    Rewards,
    check_choice,
    check_count,
    check_ddof,
    check_number,
    describe,
    is_dense,
    read_pair,
    read_rewards,
    to_float,
)
from rlcore.objectives._groups import by_prompt, centre, check_size, z_scores


def group_advantages(
    rewards: Rewards,
    group_ids: Tensor | Sequence[int],
    *,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 0.0,
) -> Tensor:
    r"""Above the mean of the group, in stds: $\hat A = (R^{(g)} - \bar R) / (\sigma_R + \epsilon)$.

    ``rewards`` (B,), ``group_ids`` (B,); returns (B,), in units of the std (with
    ``scale="none"``, of the reward).  ``scale`` says whose std divides:

    - ``"group"``: that of the same prompt's rewards (GRPO);
    - ``"batch"``: that of all rewards of the batch together;
    - ``"none"``: none, only the mean is subtracted (Dr. GRPO).

    ``ddof``: 0 for the population std, with which a lone success gets exactly $\sqrt{G-1}$; 1 for
    the sample std, $(G-1)/\sqrt{G}$.  The two differ by the factor $\sqrt{(G-1)/G}$.

    The mean contains the own reward; that scales the mean gradient by $(G-1)/G$ and does nothing
    else.  Dividing by the group's std does change what is optimised.  With rewards 0 and 1,
    ``ddof=0`` and ``eps=0``, a prompt with success rate $p$ adds the gradient of

    $$
    F_G(p) = \sum_{s=1}^{G-1} \frac{P(\mathrm{Bin}(G-1, p) \ge s)}{\sqrt{s (G-s)}}
    $$

    instead of that of $p$: $F_2 = p$, $F_3 = \sqrt{2}\,p$, and for large $G$
    $2 \arcsin \sqrt{p}$, whose slope $1/\sqrt{p(1-p)}$ favours prompts that are nearly always or
    nearly never solved.  With graded rewards no function at all has this mean gradient.

    Source: DeepSeekMath, arXiv 2402.03300, sec. 4.1.2, which states neither ``ddof`` nor ``eps``.
    TRL's ``scale_rewards`` ("group", "batch", "none") takes the sample std, ``ddof=1``, with
    ``eps=1e-4``; verl ``ddof=1`` with ``eps=1e-6``.  ``scale="none"``: Dr. GRPO, arXiv 2503.20783,
    sec. 3.2; TRL needs ``scale_rewards="none"`` set apart from ``loss_type="dr_grpo"``.

    ValueError: the top of this module; an unknown ``scale``, another ``ddof``, ``eps`` negative.
    """
    check_choice("scale", scale, ("group", "batch", "none"))
    ddof = check_ddof(ddof)
    eps = check_number("eps", eps, at_least=0)
    groups = by_prompt(rewards, group_ids)
    if scale == "none":
        return groups.rows(centre(groups))
    return groups.rows(z_scores(groups, ddof, eps, scale=scale))


def leave_one_out_advantages(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> Tensor:
    r"""Above the mean of the OTHER rewards of the group.

    $$
    \hat A^{(g)} = R^{(g)} - \frac{1}{G-1} \sum_{j \ne g} R^{(j)}
    = \frac{G}{G-1} (R^{(g)} - \bar R)
    $$

    ``rewards`` (B,), ``group_ids`` (B,); returns (B,), in units of reward.  The baseline does not
    depend on $y^{(g)}$, so the policy gradient is unbiased.

    Source: RLOO, Ahmadian et al., arXiv 2402.14740; $R$ there includes the KL penalty, which is
    ``kl_penalized_rewards``.  TRL's RLOOTrainer has the same advantages, and adds a clip of the
    whole response's ratio, which the paper removes.

    ValueError: the top of this module.
    """
    groups = by_prompt(rewards, group_ids)
    known = ~groups.table.isnan()
    size = known.sum(dim=1, keepdim=True).double()  # G, or fewer where some are missing
    return groups.rows(centre(groups, size / (size - 1).clamp(min=1)))


def batch_mean_advantages(rewards: Rewards) -> Tensor:
    r"""Above the mean of the batch, whatever the prompt: $\hat A_i = R_i - \frac1B \sum_j R_j$.

    ``rewards`` (B,); returns (B,), in units of reward.  The baseline contains $R_i$ itself, which
    shrinks the mean gradient by $(B-1)/B$, no more.

    Source: REINFORCE with a baseline, Williams 1992, where the baseline is any number that does not
    depend on the response.

    ValueError: a batch of one row; the top of this module.
    """
    values = read_rewards(rewards)
    if len(values) < 2:
        raise ValueError(f"rewards must hold at least 2 rows for a batch mean; got {len(values)}")
    return group_advantages(values, torch.zeros_like(values, dtype=torch.int64), scale="none")


def self_critical_advantages(rewards: Rewards, greedy_rewards: Rewards) -> Tensor:
    r"""Above the reward of the greedy answer $\hat y$: $\hat A = R(x, y) - R(x, \hat y)$.

    ``rewards`` (B,), of the sampled responses; ``greedy_rewards`` (B,), one per row: what the same
    policy's greedy answer to that row's prompt got.  Returns (B,), in units of reward, float64 if
    either is float64 (or a list), else float32.  If either is missing the advantage is 0.

    The greedy answer does not depend on the sample, so the policy gradient is unbiased; the policy
    is trained to beat what it would do at test time.  It costs one more answer per prompt.

    Source: SCST, Rennie et al. 2017, arXiv 1612.00563.  Not in TRL.  verl's ``remax`` takes
    the same baseline.

    ValueError: shapes or devices that differ, an infinite reward, one too large to be subtracted.
    """
    values, greedy = read_pair(rewards, "greedy_rewards", greedy_rewards)
    dtype = torch.promote_types(to_float(values).dtype, to_float(greedy).dtype)
    check_size("rewards", values, dtype)
    check_size("greedy_rewards", greedy, dtype)
    return (values.double() - greedy.double()).nan_to_num(nan=0.0).to(dtype)


class EqualGroups(NamedTuple):
    """Which groups teach nothing: see ``equal_groups``."""

    group_ids: Tensor  # (P,) the distinct prompt ids, ascending
    equal: Tensor  # (P,) bool
    share: Tensor  # 0-d float64: the fraction of groups that are all equal


def equal_groups(rewards: Rewards, group_ids: Tensor | Sequence[int]) -> EqualGroups:
    """Which groups have rewards that are all equal, so that every advantage is 0.

    ``rewards`` (B,), ``group_ids`` (B,); returns, for the P prompts in ascending order of their
    ids, whether each is all equal, and their share.  Missing rewards do not count; a group left
    with one reward or none is all equal.  The share is TRL's ``frac_reward_zero_std``.

    Who has the ``group_advantages`` of the same rewards can read it off them: with
    ``scale="group"`` a group's are all 0 if its rewards are all equal, and only then (unless
    ``eps`` is so large that they round to 0).

    ValueError: the top of this module.
    """
    groups = by_prompt(rewards, group_ids)
    return EqualGroups(groups.names, groups.equal, groups.equal.double().mean())


def probability_all_equal(p: float | Tensor, group_size: int) -> float | Tensor:
    r"""How often a group is all equal, if rewards are 0 or 1: $p^G + (1-p)^G$.

    ``p`` in [0, 1], the chance of a 1, a number or a tensor of any shape; the result is alike, in
    float32 or wider.  So many prompts give no gradient, and dynamic sampling draws
    $1/(1 - p^G - (1-p)^G)$ groups for one that does.

    ValueError: ``p`` outside [0, 1], ``group_size`` < 2.
    """
    check_count("group_size", group_size, at_least=2)
    given = p
    if isinstance(p, Tensor):
        inside = is_dense(p) and not p.is_complex() and not p.is_meta
        p = to_float(p) if inside else p
        inside = inside and bool(((p >= 0) & (p <= 1)).all())
    else:
        inside = isinstance(p, Real) and not isinstance(p, bool) and 0 <= p <= 1
        p = float(p) if inside else p
    if not inside:
        raise ValueError(f"p must be a probability, in [0, 1]; got {describe(given)}")
    return p**group_size + (1 - p) ** group_size


def largest_group_advantage(group_size: int, *, ddof: int = 0) -> float:
    r"""The bound on $|\hat A^{(g)}|$ of a z-scored group.

    $\sqrt{G-1}$ for ``ddof=0``, $(G-1)/\sqrt{G}$ for ``ddof=1``.  Met with equality by
    one success among $G-1$ failures (and by one failure among successes).
    It is Samuelson's inequality, or Cantelli's one-sided bound on the uniform law over the group:
    $1/G \le P(R - \bar R \ge k \sigma_R) \le 1/(1 + k^2)$.

    ValueError: ``group_size`` < 2, ``ddof`` not 0 or 1.
    """
    check_count("group_size", group_size, at_least=2)
    ddof = check_ddof(ddof)
    return math.sqrt(group_size - 1) if ddof == 0 else (group_size - 1) / math.sqrt(group_size)
