r"""The objective of RLHF itself, on whole distributions over $Y$ outcomes, and its exact solution.

$$
J(\pi) = \mathbb{E}_{y \sim \pi}\left[ R(x, y) - \beta \log \frac{\pi(y \mid x)}{\pi_{ref}(y \mid
x)} \right]
$$

Nothing here is sampled: where the outcomes can be listed (the answers of a toy, the tokens of one
step) these functions are the truth that every estimator of the book is measured against.
An outcome that $\pi_{ref}$ never produces has log-probability ``-inf``; its reward may be anything.

Source: InstructGPT, arXiv 2203.02155, eq. 2 (without its pretraining term); the solution is DPO,
arXiv 2305.18290, eqs. 4 and 5.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_WEIGHT,
    check_number,
    describe,
    is_dense,
    to_float,
)


class OptimalPolicy(NamedTuple):
    """The solution of the regularised objective: see ``optimal_policy``."""

    logprobs: Tensor  # (..., Y) log pi*
    log_partition: Tensor  # (...) log Z


def optimal_policy(ref_logprobs: Tensor, rewards: Tensor, *, beta: float) -> OptimalPolicy:
    r"""The policy that maximises $J$: the reference, tilted by the reward.

    $$
    \pi^*(y \mid x) = \frac{\pi_{ref}(y \mid x)\, e^{R(x, y) / \beta}}{Z(x)}, \qquad
    Z(x) = \sum_y \pi_{ref}(y \mid x)\, e^{R(x, y) / \beta}
    $$

    ``ref_logprobs`` (..., Y), a distribution over the last axis, in nats; ``rewards`` (..., Y), in
    units of reward; ``beta`` > 0, reward per nat.  Returns $\log \pi^*$ (..., Y) and $\log Z$
    (...), float32 or wider, without gradient.  $J(\pi^*) = \beta \log Z$, and any other policy
    falls short of it by $\beta\,KL(\pi \| \pi^*)$.

    ValueError: shapes that differ, log-probs that are not those of a distribution, a reward that is
    not finite where $\pi_{ref} > 0$, ``beta`` outside [1e-30, 1e30], rewards beyond $10^{30}
    \beta$.
    """
    beta = check_number("beta", beta, at_least=1 / MAX_WEIGHT, at_most=MAX_WEIGHT)
    reference = _read_distribution("ref_logprobs", ref_logprobs).detach()
    worth = _read_outcomes(rewards, reference)
    if (worth.double().abs() > MAX_WEIGHT * beta).any():
        largest = worth.abs().max().item()
        raise ValueError(f"rewards must be at most 1e30 beta in size; got {largest:g}, beta={beta}")
    # measured from the best outcome: exp overflows nowhere, and a tiny beta keeps pi_ref's ratios
    best = torch.where(reference.isinf(), -torch.inf, worth).amax(dim=-1, keepdim=True)
    below = worth.double() - best.double()  # a difference that float32 may not hold
    tilted = reference + (below / beta).to(torch.promote_types(reference.dtype, worth.dtype))
    log_partition = tilted.logsumexp(dim=-1, keepdim=True)
    return OptimalPolicy(tilted - log_partition, (log_partition + best / beta).squeeze(-1))


def implied_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    beta: float,
    log_partition: float | Tensor = 0.0,
) -> Tensor:
    r"""The reward for which a policy is the optimal one.

    $$
    R(x, y) = \beta \log \frac{\pi(y \mid x)}{\pi_{ref}(y \mid x)} + \beta \log Z(x)
    $$

    ``logprobs``, ``ref_logprobs`` of one shape (...), of any outcomes, whole distributions or the
    responses at hand; ``log_partition``, $\log Z$: a number, a tensor of that shape, or one without
    its last axis (as ``optimal_policy`` returns it).  Returns (...), float32 or wider; the gradient
    flows through ``logprobs``.  Without $\log Z$ the rewards of one prompt are right up to a
    constant, and their differences are exact: this is the reward that DPO trains.  An outcome that
    neither policy produces implies no reward: NaN (missing).

    ValueError: shapes that differ, log-probs that are NaN or above 0, an outcome that one policy
    produces and the other does not, ``beta`` outside [1e-30, 1e30], ``log_partition`` not finite, a
    reward beyond the range of its dtype.
    """
    beta = check_number("beta", beta, at_least=1 / MAX_WEIGHT, at_most=MAX_WEIGHT)
    policy = _read_logprobs("logprobs", logprobs)
    reference = _read_logprobs("ref_logprobs", ref_logprobs, policy).detach()
    absent = policy.isinf()
    _same_support(absent, reference.isinf(), "logprobs", "ref_logprobs")
    shift = _read_log_partition(log_partition, policy)
    ratio = policy.masked_fill(absent, 0.0) - reference.masked_fill(absent, 0.0)
    implied = beta * ratio + beta * shift
    _check_range("rewards", implied, beta * ratio, beta)
    return implied.masked_fill(absent, torch.nan)


def regularized_value(
    logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, *, beta: float
) -> Tensor:
    r"""The objective $J(\pi)$ itself, exactly, to MAXIMISE.

    $$
    J(\pi) = \sum_y \pi(y \mid x)
    \left( R(x, y) - \beta \log \frac{\pi(y \mid x)}{\pi_{ref}(y \mid x)} \right)
    $$

    ``logprobs``, ``ref_logprobs`` (..., Y), distributions over the last axis; ``rewards`` (..., Y);
    returns (...), float32 or wider.  The gradient flows through ``logprobs`` only, as a function of
    all of them: give ``log_softmax`` of what is optimised.  Outcomes of probability 0 count 0,
    whatever their reward.

    Source: InstructGPT, arXiv 2203.02155, eq. 2, without its pretraining term.

    ValueError: shapes that differ, log-probs that are not those of a distribution, a reward that is
    not finite where $\pi > 0$, an outcome with $\pi > 0$ and $\pi_{ref} = 0$ (its KL is infinite),
    ``beta`` negative, a value beyond the range of its dtype.
    """
    beta = check_number("beta", beta, at_least=0, at_most=MAX_WEIGHT)
    policy = _read_distribution("logprobs", logprobs)
    reference = _read_distribution("ref_logprobs", ref_logprobs, policy).detach()
    absent = policy.isinf()
    _same_support(absent, absent | reference.isinf(), "logprobs", "ref_logprobs")
    worth = _read_outcomes(rewards, policy)
    inside = policy.masked_fill(absent, 0.0)
    gain = worth - beta * (inside - reference.masked_fill(absent, 0.0))  # 0 where absent
    value = (inside.exp() * gain).sum(dim=-1)
    _check_range("value", value, value, beta)
    return value


def _read_logprobs(name: str, values: Tensor, like: Tensor | None = None) -> Tensor:
    """Log-probs of outcomes, -inf allowed, in float32 or wider."""
    wanted = "at least 1 axis and 1 outcome" if like is None else f"shape {tuple(like.shape)}"
    if like is None:
        fits = is_dense(values) and values.dim() > 0 and values.numel() > 0 and not values.is_meta
    else:
        fits = is_dense(values) and values.shape == like.shape
    if not fits or values.is_complex():
        raise ValueError(f"{name} must be a real tensor of {wanted}; got {describe(values)}")
    if like is not None and values.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, as logprobs; got {values.device}")
    values = to_float(values)
    bad = values.isnan() | (values > 1e-3)  # rounding may leave log 1 a little above 0
    if bad.any():
        raise ValueError(f"{name} must hold log-probabilities, <= 0; got {values[bad][0].item()}")
    return values


def _read_distribution(name: str, values: Tensor, like: Tensor | None = None) -> Tensor:
    """Log-probs whose last axis sums to probability 1, as far as their dtype can tell."""
    coarse = isinstance(values, Tensor) and values.itemsize < 4
    values = _read_logprobs(name, values, like)
    total = values.detach().logsumexp(dim=-1)
    off = total.abs() > (0.05 if coarse else 1e-3)
    if off.any():
        raise ValueError(
            f"{name} must be a distribution over its last axis, probabilities that sum to 1; got a "
            f"sum of {total[off][0].exp().item():g}"
        )
    return values


def _read_outcomes(rewards: Tensor, logprobs: Tensor) -> Tensor:
    """The reward of every outcome, 0 for those that cannot happen, in the wider dtype."""
    if not is_dense(rewards) or rewards.shape != logprobs.shape or rewards.is_complex():
        raise ValueError(
            f"rewards must be a real tensor of shape {tuple(logprobs.shape)}, one per outcome; got "
            f"{describe(rewards)}"
        )
    if rewards.device != logprobs.device:
        raise ValueError(f"rewards must be on {logprobs.device}; got {rewards.device}")
    worth = to_float(rewards.detach()).masked_fill(logprobs.isinf(), 0.0)
    if not worth.isfinite().all():
        found = worth[~worth.isfinite()][0].item()
        raise ValueError(f"rewards must be finite for every possible outcome; got {found}")
    return worth


def _same_support(absent: Tensor, other: Tensor, name: str, other_name: str) -> None:
    if not torch.equal(absent, other):
        lacking, having = (other_name, name) if (other & ~absent).any() else (name, other_name)
        raise ValueError(
            f"{lacking} must be finite wherever {having} is (else their ratio is 0 or infinite); "
            "got -inf"
        )


def _check_range(what: str, results: Tensor, without_partition: Tensor, beta: float) -> None:
    """What finite arguments may still take out of the range of the dtype."""
    bad = ~results.detach().isfinite()
    if not bad.any():
        return
    found = results.detach()[bad][0].item()
    wanted = f"must be so near to ref_logprobs that the {what} fit"
    if what == "value":
        raise ValueError(f"logprobs {wanted}s {results.dtype}; got {found}, beta={beta:g}")
    if without_partition.detach()[bad].isfinite().all():
        raise ValueError(
            f"log_partition must be so small that beta times it fits {results.dtype}; got a reward "
            f"of {found}, beta={beta:g}"
        )
    raise ValueError(f"logprobs {wanted} {results.dtype}; got {found}, beta={beta:g}")


def _read_log_partition(log_partition: float | Tensor, logprobs: Tensor) -> float | Tensor:
    if not isinstance(log_partition, Tensor):
        return check_number("log_partition", log_partition)
    fits = log_partition.shape in (logprobs.shape, logprobs.shape[:-1])
    real = is_dense(log_partition) and not log_partition.is_complex() and not log_partition.is_meta
    if not real or not fits or not to_float(log_partition).isfinite().all():
        raise ValueError(
            f"log_partition must be a finite number or tensor of shape {tuple(logprobs.shape)} or "
            f"{tuple(logprobs.shape[:-1])}; got {describe(log_partition)}"
        )
    shift = to_float(log_partition.detach()).to(logprobs.device)
    return shift if shift.dim() == logprobs.dim() else shift[..., None]
