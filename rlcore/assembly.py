r"""A row at work: from rewards to advantages, from log-probs to the loss.

The arithmetic is in ``rlcore.objectives``; here a row's choices pick the functions, and nothing is
computed twice.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.choices import Algorithm
from rlcore.objectives import (
    RewardHistory,
    batch_mean_advantages,
    beta_normalized_advantages,
    decoupled_advantages,
    generalized_advantages,
    group_advantages,
    kl_penalized_rewards,
    kl_shaped_rewards,
    leave_one_out_advantages,
    length_adaptive_lam,
    overlong_filter,
    overlong_penalty,
    policy_loss,
    self_critical_advantages,
    sft_loss,
    smoothed_advantages,
    value_loss,
    whiten,
)
from rlcore.objectives._checks import (
    Rewards,
    check_count,
    describe,
    is_dense,
    read_mask,
    read_rewards,
    to_float,
)
from rlcore.objectives._groups import read_ids
from rlcore.objectives._pairs import check_counts, read_divisor

OF_POLICY_LOSS = (  # fields of a row that are arguments of policy_loss, under the same name
    "surrogate",
    "ratio_level",
    "clip_range",
    "epsilon_low",
    "epsilon_high",
    "ratio_max",
    "tau_positive",
    "tau_negative",
    "aggregation",
    "kl_estimator",
    "kl_importance_weighted",
    "entropy_coef",
)


class Estimates(NamedTuple):
    """What is known of a batch before its first update: see compute_advantages."""

    advantages: Tensor  # (B,), or (B, T) with a critic; no gradient
    returns: Tensor | None = None  # (B, T), the critic's targets
    history: RewardHistory | None = None  # the rewards of all visits, this one included


def compute_advantages(
    algorithm: Algorithm,
    rewards: Any,
    group_ids: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    response_mask: Tensor | None = None,
    max_length: int | None = None,
    greedy_rewards: Tensor | None = None,
    reward_weights: Tensor | None = None,
    history: RewardHistory | None = None,
    values: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> Estimates:
    r"""Questions 1 and 2: ``rewards`` (B,), of several their sum, or (B, n) where they are compared
    apart (``"decoupled"``), and ``group_ids`` (B,), the prompts' ids -> Estimates.

    What a row needs besides, and other rows do not look at:

    - its KL term in the reward, with ``beta`` > 0: ``old_logprobs``, ``ref_logprobs`` and
      ``response_mask`` (B, T).
    - ``overlong="penalty"``: ``response_mask``, and ``max_length``, the longest response allowed,
      in tokens.
    - ``"greedy"``: ``greedy_rewards`` (B,), the reward of the greedy answer to each row's prompt.
    - ``"decoupled"``: may take ``reward_weights`` (n,), which multiply the normalised advantages.
    - ``"smoothed"``: may take ``history``, that of the last step (None: no prompt was seen yet),
      and returns the new one.  There ``group_ids`` must name a prompt in every step alike.
    - ``"gae"``: ``response_mask``, ``values`` (B, T) of the sampling time, and may take
      ``bootstrap_values`` (B,), what a truncated response is worth after its last token.

    A missing reward (NaN) gets advantage 0; its row is to be left out of the update.

    ValueError: something that the row needs is None; the rest as the functions of
    ``rlcore.objectives``.
    """
    _check_row(algorithm)
    if algorithm.overlong == "penalty":
        rewards = _with_penalty(algorithm, rewards, response_mask, max_length)
    if algorithm.advantage == "gae":
        _check_ids(group_ids, rewards)
        return _by_critic(
            algorithm, rewards, old_logprobs, ref_logprobs, response_mask, values, bootstrap_values
        )
    if algorithm.kl == "reward" and algorithm.beta > 0:
        tensors = _kl_tensors(algorithm, old_logprobs, ref_logprobs, response_mask)
        rewards = kl_penalized_rewards(rewards, *tensors, beta=algorithm.beta)
    if algorithm.advantage == "smoothed":
        smoothed = smoothed_advantages(rewards, group_ids, history, ddof=algorithm.ddof)
        return Estimates(smoothed.advantages, history=smoothed.history)
    if algorithm.advantage == "decoupled":
        return Estimates(
            decoupled_advantages(
                rewards,
                group_ids,
                weights=reward_weights,
                ddof=algorithm.ddof,
                eps=algorithm.eps,
                batch_eps=algorithm.batch_eps,
            )
        )
    if algorithm.advantage == "greedy":
        _check_ids(group_ids, rewards)
        greedy = _needed(algorithm, "advantage", greedy_rewards=greedy_rewards)
        return Estimates(self_critical_advantages(rewards, *greedy))
    return Estimates(_by_group(algorithm, rewards, group_ids))


def _by_group(row: Algorithm, rewards: Rewards, group_ids: Tensor) -> Tensor:
    """Baselines that are made of the rewards alone."""
    if row.advantage == "batch_mean":
        _check_ids(group_ids, rewards)
        return batch_mean_advantages(rewards)
    if row.advantage == "leave_one_out":
        return leave_one_out_advantages(rewards, group_ids)
    if row.advantage == "beta_normalized":
        return beta_normalized_advantages(rewards, group_ids)
    scale = {"group_zscore": "group", "batch_zscore": "batch", "group_mean": "none"}[row.advantage]
    return group_advantages(rewards, group_ids, scale=scale, ddof=row.ddof, eps=row.eps)


def _by_critic(
    row: Algorithm,
    rewards: Rewards,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    response_mask: Tensor | None,
    values: Tensor | None,
    bootstrap_values: Tensor | None,
) -> Estimates:
    """GAE over the rewards of each token; a row without a reward takes no part."""
    mask, values = _needed(row, "advantage", response_mask=response_mask, values=values)
    mask = read_mask(mask)
    old = reference = torch.zeros_like(mask, dtype=torch.float32)
    if row.kl == "reward" and row.beta > 0:
        old, reference, _ = _kl_tensors(row, old_logprobs, ref_logprobs, mask)
    known = ~read_rewards(rewards).isnan().to(mask.device)
    token_rewards = kl_shaped_rewards(
        rewards, old, reference, mask, beta=row.beta if row.kl == "reward" else 0.0
    )
    lam: float | Tensor = row.lam
    if row.length_alpha is not None:
        lam = length_adaptive_lam(mask.sum(dim=1), alpha=row.length_alpha)

    def estimate(lam: float | Tensor) -> Any:
        return generalized_advantages(
            token_rewards, values, mask, gamma=row.gamma, lam=lam, bootstrap_values=bootstrap_values
        )

    policy = estimate(lam)
    critic = policy if row.lam_critic is None else estimate(row.lam_critic)
    taking_part = mask & known[:, None]
    advantages = torch.where(taking_part, policy.advantages, 0.0)
    if row.whiten:
        advantages = whiten(advantages, taking_part)
    return Estimates(advantages, torch.where(taking_part, critic.returns, 0.0))


def _check_ids(group_ids: Any, rewards: Rewards) -> None:
    """ValueError for ids that are none, also where no row is compared with its group."""
    read_ids(group_ids, read_rewards(rewards))


def _with_penalty(
    row: Algorithm, rewards: Rewards, response_mask: Tensor | None, max_length: int | None
) -> Tensor:
    """The reward plus DAPO's soft overlong punishment; a missing reward stays missing."""
    mask, longest = _needed(row, "overlong", response_mask=response_mask, max_length=max_length)
    values = read_rewards(rewards)
    real = read_mask(mask)
    if values.shape != real.shape[:1]:
        raise ValueError(
            f"rewards must be of shape {tuple(real.shape[:1])}, one per row of response_mask; got "
            f"{describe(values)}"
        )
    longest = check_count("max_length", longest)
    penalty = overlong_penalty(
        real.sum(dim=1), max_length=longest, cache_length=round(row.overlong_cache * longest)
    )
    return to_float(values) + penalty.to(values.device)


def _kl_tensors(row: Algorithm, *tensors: Any) -> tuple[Any, ...]:
    if any(tensor is None for tensor in tensors):
        raise ValueError(
            f"old_logprobs, ref_logprobs and response_mask must be given: {row.name} has "
            f"its KL term in the reward (beta={row.beta}); got None"
        )
    return tensors


def _needed(row: Algorithm, field: str, **given: Any) -> list[Any]:
    """The arguments, none of which may be None for this row."""
    for name, value in given.items():
        if value is None:
            raise ValueError(
                f"{name} must be given: {row.name} has {field}={getattr(row, field)!r}; got None"
            )
    return list(given.values())


def step_totals(
    algorithm: Algorithm,
    response_mask: Tensor,
    *,
    known: Tensor | None = None,
    correct: Tensor | None = None,
    truncated: Tensor | None = None,
) -> dict[str, Any]:
    """What the terms of the loss divide by, counted over a whole step, for its parts to share.

    ``response_mask`` (B, T) of the whole step; ``known`` (B,) bool: rows with a reward (None: all);
    ``correct``, ``truncated`` (B,) bool, as in ``compute_loss``.  Returns ``total`` (responses, or
    tokens where the row's aggregation is ``"token_mean"``), ``token_total`` and ``correct_total``
    (tokens), each at least 1, to be passed to ``compute_loss``: then the losses and gradients of
    the parts add up to the step's.
    """
    _check_row(algorithm)
    mask = read_mask(response_mask, allow_empty=True)
    if known is not None:
        mask = mask & _flags("known", known, mask)[:, None]
    mask = _counted(algorithm, mask, truncated)
    tokens = int(mask.sum())
    responses = int(mask.any(dim=1).sum())
    right = mask if correct is None else mask & _flags("correct", correct, mask)[:, None]
    total = tokens if algorithm.aggregation == "token_mean" else responses
    counts = {"total": total, "token_total": tokens, "correct_total": int(right.sum())}
    return {name: max(count, 1) for name, count in counts.items()}


def compute_loss(
    algorithm: Algorithm,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    constant: float | None = None,
    total: Any = None,
    token_total: Any = None,
    correct_total: Any = None,
    entropies: Tensor | None = None,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    correct: Tensor | None = None,
    truncated: Tensor | None = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Questions 3 to 5: the loss to MINIMISE and its statistics, as policy_loss gives them.

    What a row needs besides log-probs and advantages, and other rows do not look at:

    - ``constant``: the $L$ of rows that aggregate over a constant (Dr. GRPO: the longest response
      allowed).
    - ``ref_logprobs`` (B, T): when the KL term is in the loss with ``beta`` > 0; for the other
      rows it only measures the KL.
    - ``entropies`` (B, T), of the policy, with gradient: when ``entropy_coef`` > 0; else only
      measured.
    - ``values`` (with gradient), ``old_values`` and ``returns`` (B, T): when ``value_coef`` > 0,
      ``old_values`` when the value is clipped.  The value loss is a mean over all tokens.
    - ``correct`` (B,) bool: when ``nll_coef`` > 0, the responses whose likelihood is raised, by a
      mean over their tokens.
    - ``truncated`` (B,) bool: when ``overlong="filter"``; those rows are left out of every term
      and every count.

    A call that sees a part of a step passes the counts of the whole step, those of step_totals:
    ``total`` for the policy's term, ``token_total`` for entropy and value, ``correct_total`` for
    the likelihood; then the parts add up to the whole.  All that the row's terms need must be
    given, or none (where the policy's term is a token mean, ``total`` may stand for
    ``token_total``).  Statistics are means over the call's own tokens or responses.

    ValueError: something that the row needs is None, some counts of the step are; the rest as
    policy_loss, value_loss and sft_loss.
    """
    _check_row(algorithm)
    token_total = _tokens_of_step(algorithm, total, token_total, correct_total)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    mask = _counted(algorithm, mask, truncated)
    if algorithm.entropy_coef > 0:
        _needed(algorithm, "entropy_coef", entropies=entropies)
    loss, stats = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        **{name: getattr(algorithm, name) for name in OF_POLICY_LOSS},
        beta=algorithm.beta if algorithm.kl == "loss" else 0.0,
        constant=constant if algorithm.aggregation == "constant" else None,
        total=total,
        token_total=token_total,
        ref_logprobs=ref_logprobs,
        entropies=entropies,
        allow_empty=True,
    )
    if algorithm.value_coef > 0:
        part, more = _critic_term(algorithm, values, old_values, returns, mask, token_total)
        loss, stats = loss + algorithm.value_coef * part, stats | more
    if algorithm.nll_coef > 0:
        (right,) = _needed(algorithm, "nll_coef", correct=correct)
        chosen = mask & _flags("correct", right, mask)[:, None]
        tokens = read_divisor(
            correct_total, int(chosen.sum()), "tokens of correct responses", "correct_total"
        )
        part, own = sft_loss(logprobs, chosen, total=tokens, allow_empty=True)
        loss, stats = loss + algorithm.nll_coef * part, stats | {"nll_loss": own["nll_loss"]}
    return loss, stats


def _check_row(algorithm: Any) -> None:
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"algorithm must be an Algorithm, a row of rlcore.algorithms; got {describe(algorithm)}"
        )


def _tokens_of_step(row: Algorithm, total: Any, token_total: Any, correct_total: Any) -> Any:
    """token_total, once it is certain that either all counts of the step are given or none."""
    if row.aggregation == "token_mean" and token_total is None:
        token_total = total
    counts = {"total": total, "token_total": token_total, "correct_total": correct_total}
    if row.aggregation == "only_token_mean" and total is None:
        del counts["total"]  # a sum over responses has no divisor
    if not (row.value_coef > 0 or row.entropy_coef > 0) and token_total is None:
        del counts["token_total"]
    if not row.nll_coef > 0:
        del counts["correct_total"]
    check_counts(**counts)
    return token_total


def _critic_term(
    row: Algorithm,
    values: Tensor | None,
    old_values: Tensor | None,
    returns: Tensor | None,
    mask: Tensor,
    token_total: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    if row.epsilon_value is not None:
        _needed(row, "epsilon_value", old_values=old_values)
    now, targets = _needed(row, "value_coef", values=values, returns=returns)
    return value_loss(
        now,
        targets,
        mask,
        old_values=None if row.epsilon_value is None else old_values,
        epsilon=row.epsilon_value,
        total=token_total,
        allow_empty=True,
    )


def _counted(row: Algorithm, mask: Tensor, truncated: Tensor | None) -> Tensor:
    """The mask of what counts in the loss: without truncated rows where the row filters them."""
    if row.overlong != "filter":
        return mask
    (cut,) = _needed(row, "overlong", truncated=truncated)
    return overlong_filter(mask, cut)


def _flags(name: str, flags: Tensor, mask: Tensor) -> Tensor:
    """(B,) booleans."""
    if not is_dense(flags) or flags.shape != mask.shape[:1] or flags.dtype != torch.bool:
        raise ValueError(
            f"{name} must be booleans of shape {tuple(mask.shape[:1])}; got {describe(flags)}"
        )
    return flags.to(mask.device)
