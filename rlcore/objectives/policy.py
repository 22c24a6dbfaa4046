r"""The loss of every online algorithm in this book: the five stages, strung together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.objectives import surrogates
from rlcore.objectives._checks import (
    MAX_LOG_RATIO,
    MAX_WEIGHT,
    Slots,
    check_choice,
    check_count,
    check_finite,
    check_number,
    describe,
    is_dense,
    read_difference,
    read_rows,
    read_slots,
    read_tokens,
    to_float,
)
from rlcore.objectives.aggregation import AGGREGATIONS, check_constant, weigh
from rlcore.objectives.kl import KL_ESTIMATORS, kl_of
from rlcore.objectives.ratios import (
    CLIP_RANGES,
    RATIO_LEVELS,
    dynamic_range_of,
    fixed_clip_range,
    ratio_of,
)
from rlcore.objectives.surrogates import SURROGATES, USE_RANGE, USE_RATIO

Ends = tuple[float | Tensor, float | Tensor, float | None]  # low, high, ratio_max
Statistics = dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    surrogate: str = "clip",
    ratio_level: str = "token",
    clip_range: str = "fixed",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    ratio_max: float | None = None,
    max_log_ratio: float = 20.0,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    aggregation: str = "sequence_mean",
    constant: float | None = None,
    total: Any = None,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance_weighted: bool = False,
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
    token_total: Any = None,
    allow_empty: bool = False,
) -> tuple[Tensor, Statistics]:
    r"""The loss of one update, to MINIMISE: minus the average of what the tokens gain.

    $$
    \mathcal L = -\operatorname{agg}_{g,t}\big( s(\rho_{g,t}, A^{(g)}) - \beta\, k_{g,t} \big)
    - c\, \bar H
    $$

    ``logprobs``, ``old_logprobs``, ``ref_logprobs`` (nats, of the tokens that were sampled),
    ``entropies`` (nats) and ``response_mask`` are $(B, T)$; ``advantages`` is $(B,)$, one for all
    tokens of a response, or $(B, T)$.  The result is the loss and its statistics: scalars, the
    statistics without gradient.  The gradient flows through ``logprobs`` and ``entropies`` only.

    ``surrogate``, $s$, is what a token gains (each is a function in ``surrogates``):

    - ``"clip"``: $\min(\rho A, \mathrm{clip}(\rho) A)$ (PPO, GRPO, DAPO, DCPO, GSPO, VAPO).
    - ``"reinforce"``: $A \log\pi_\theta$, no ratio (REINFORCE, SCST, RLOO).
    - ``"capped"``: $\mathrm{sg}[\mathrm{clip}(\rho)]\,A \log\pi_\theta$ (CISPO).
    - ``"soft"``: $\frac4\tau\sigma(\tau(\rho - 1))\,A$, with ``tau_positive`` where $A > 0$ and
      ``tau_negative`` elsewhere (SAPO).
    - ``"gamma"``: $\mathrm{sg}[\phi(W)]\,A \log\pi_\theta$, $W$ the ratio of ``"sequence_sum"``
      (VESPO).

    ``ratio_level``: which ratio, see ``importance_ratio``.  ``clip_range``: ``"fixed"``, from
    $1 - \epsilon_{low}$ to $1 + \epsilon_{high}$; ``"dynamic"``, DCPO's range for each token, from
    the same two arguments (0.16 and 0.20 there), at level ``"token"`` only.  ``ratio_max``: with
    ``"clip"``, the cap on $\rho$ where $A < 0$, no gradient beyond it; in the dynamic range it caps
    the upper end too (None: 10 there, no cap in the fixed one).

    ``max_log_ratio``: $\log\rho$ is limited to $\pm$ that many nats before the exponential, and so
    is the exponent of ``"k3"``; beyond it they have no gradient.  It keeps them finite
    ($e^{20} = 5 \cdot 10^8$); at most 80.

    ``aggregation``, ``constant``, ``total``: how much each token counts, see ``aggregate``.

    ``beta``, ``kl_estimator``: the weight and kind of the KL term, see ``kl_per_token``; it is
    averaged as the gain is.  ``kl_importance_weighted``: $\rho\,k$ in place of $k$.  With ``beta``
    0, ``ref_logprobs`` only measures the KL.

    ``entropies``: $H$ of the policy at each token, from ``entropy``; $\bar H$ is their mean over
    real tokens whatever the aggregation, its weight is ``entropy_coef`` (0: measured only).
    ``token_total``: when the call sees a part of a step, the real tokens of the whole step (for
    ``"token_mean"`` that is ``total``).

    Statistics, under TRL's names: ``clip_ratio/low_mean``, ``clip_ratio/high_mean`` and
    ``clip_ratio/region_mean`` (either), the share of tokens that the range leaves without a
    gradient; ``clip_ratio/max_mean``, that beyond ``ratio_max`` where there is one; ``ratio_mean``;
    ``kl`` and, naming the estimator, ``kl/k3``; ``entropy``; for ``"capped"``
    ``cispo_clip_ratio``, the share of weights cut above where $A > 0$; for ``"gamma"``
    ``vespo/phi_seq_mean``.  They are means over tokens, or over responses where a response has one
    ratio.

    Sources: PPO, arXiv 1707.06347, eqs. 7 and 9; GRPO, arXiv 2402.03300, eq. 3; DCPO, arXiv
    2509.02333, eqs. 4 and 8; the rest in the functions named above.  What differs in TRL:

    - GRPO's paper is ``loss_type="grpo"`` with ``use_bias_correction_kl=False``; the default
      ``loss_type`` is DAPO's, and the default KL term is $\rho\,k_3$.
    - The statistic ``kl`` is that of $\rho\,k$ there when the term is.
    - For CISPO, ``epsilon_high`` is the cap itself, not an offset from 1.
    - SAPO's and GRPO's means divide by all rows, rows left out by the mask too.
    - With one update per batch of samples its old log-probs are the policy's own, so that all
      ratios are 1 and clipping never acts.

    And in DCPO's released code: see ``dynamic_clip_range`` and ``aggregate``.

    ValueError: as the functions named; an unknown choice, or choices that do not go together
    (``"gamma"`` without ``"sequence_sum"``, ``"dynamic"`` at another level than ``"token"`` or for
    a surrogate without a range, ``ratio_max`` where nothing reads it); ``beta`` or
    ``entropy_coef`` > 0 without its tensor; ``total`` without ``token_total`` where the entropy
    needs it; a loss or statistic beyond the range of its dtype.
    """
    _check_choices(surrogate, ratio_level, clip_range, aggregation, constant, kl_estimator)
    slots = read_slots(response_mask, logprobs, allow_empty=allow_empty)
    moves = surrogate in USE_RATIO or kl_importance_weighted
    ratio, new = _ratio(logprobs, old_logprobs, slots, ratio_level, moves, max_log_ratio)
    advantage = _per_token(advantages, slots)
    ends = _ends(surrogate, clip_range, old_logprobs, slots, epsilon_low, epsilon_high, ratio_max)
    gain = _gain(surrogate, ratio, new, advantage, slots, ends, (tau_positive, tau_negative))
    kl, kl_stats = _kl(logprobs, ref_logprobs, slots, beta, kl_estimator, max_log_ratio)
    gain = _less(gain, beta, kl, ratio if kl_importance_weighted else None)
    loss = weigh(gain, slots, aggregation, constant, total, surrogate in USE_RATIO, sign=-1)
    bonus, stats = _entropy(entropies, entropy_coef, slots, aggregation, total, token_total)
    stats |= kl_stats | _statistics(surrogate, ratio_level, ratio, advantage, ends, slots)
    return _finish(loss, bonus, stats, slots, logprobs=logprobs, advantages=advantages, beta=beta)


def _check_choices(
    surrogate: str,
    ratio_level: str,
    clip_range: str,
    aggregation: str,
    constant: float | None,
    kl_estimator: str,
) -> None:
    """That each choice is known, and that they go together."""
    check_choice("surrogate", surrogate, SURROGATES)
    check_choice("ratio_level", ratio_level, RATIO_LEVELS)
    check_choice("clip_range", clip_range, CLIP_RANGES)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    check_constant(aggregation, constant)
    if surrogate == "gamma" and ratio_level != "sequence_sum":
        raise ValueError(
            'ratio_level must be "sequence_sum" with surrogate="gamma", whose weight is that of a '
            f"whole response; got {ratio_level!r}"
        )
    if clip_range == "dynamic" and surrogate not in USE_RANGE:
        raise ValueError(
            f'clip_range must be "fixed" with surrogate="{surrogate}", which has no range; got '
            f"{clip_range!r}"
        )
    if clip_range == "dynamic" and ratio_level != "token":
        raise ValueError(
            'ratio_level must be "token" with clip_range="dynamic", a range for each token; got '
            f"{ratio_level!r}"
        )


def _ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    slots: Slots,
    level: str,
    moves: bool,
    max_log_ratio: float,
) -> tuple[Tensor, Tensor]:
    """The importance ratio, with a gradient if it ``moves``, and the log-probs, finite in all
    slots."""
    limit = check_number("max_log_ratio", max_log_ratio, above=0, at_most=MAX_LOG_RATIO)
    policy = logprobs if moves or not is_dense(logprobs) else logprobs.detach()
    difference = read_difference(("logprobs", "old_logprobs"), policy, old_logprobs, slots)
    ratio = ratio_of(difference, slots, level, limit)
    if difference.clean:
        return ratio, to_float(logprobs)
    return ratio, read_tokens("logprobs", logprobs, slots)


def _per_token(advantages: Tensor, slots: Slots) -> Tensor:
    """(B,) -> (B, 1), (B, T) -> (B, T); without gradient, 0 where there is no real token."""
    shape = slots.real.shape
    if not is_dense(advantages) or advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"advantages must be of shape {tuple(shape[:1])} or {tuple(shape)}; got "
            f"{describe(advantages)}"
        )
    advantages = advantages.detach()
    if advantages.dim() == 1:  # one a response: no need to write it out for each token
        values = read_rows("advantages", advantages, slots)
    else:
        values = read_tokens("advantages", advantages, slots)
    return values.to(slots.real.dtype)


def _ends(
    surrogate: str,
    clip_range: str,
    old_logprobs: Tensor,
    slots: Slots,
    epsilon_low: float,
    epsilon_high: float,
    ratio_max: float | None,
) -> Ends:
    """The ends of the range, and the cap on ratios that the range leaves alone."""
    low, high = fixed_clip_range(epsilon_low, epsilon_high)
    if clip_range == "dynamic":
        ratio_max = 10.0 if ratio_max is None else ratio_max
        ratio_max = check_number("ratio_max", ratio_max, at_least=1, at_most=MAX_WEIGHT)
        old = read_tokens("old_logprobs", old_logprobs, slots)
        return *dynamic_range_of(old, epsilon_low, epsilon_high, ratio_max), ratio_max
    if ratio_max is not None:
        if surrogate != "clip":
            raise ValueError(
                f'ratio_max is for surrogate="clip" or clip_range="dynamic" only; got '
                f'{describe(ratio_max)} with "{surrogate}"'
            )
        ratio_max = check_number("ratio_max", ratio_max, at_least=high, at_most=MAX_WEIGHT)
    return low, high, ratio_max


def _gain(
    surrogate: str,
    ratio: Tensor,
    logprobs: Tensor,
    advantage: Tensor,
    slots: Slots,
    ends: Ends,
    taus: tuple[float, float],
) -> Tensor:
    """What each token contributes, (B, T) or (B, 1)."""
    # up to 1e6: tau rho stays in the range
    positive = check_number("tau_positive", taus[0], at_least=1e-6, at_most=1e6)
    negative = check_number("tau_negative", taus[1], at_least=1e-6, at_most=1e6)
    low, high, ratio_max = ends
    if surrogate == "clip":
        return surrogates.clip(ratio, advantage, low, high, ratio_max)
    if surrogate == "soft":
        return surrogates.soft(ratio, advantage, positive, negative)
    if surrogate == "gamma":  # its weight is that of a response, and so must its advantage be
        return surrogates.gamma(ratio, logprobs * slots.real, advantage)
    advantage = advantage * slots.real  # 0 in padded slots, and so are the gain and its gradient
    if surrogate == "capped":
        return surrogates.capped(ratio, logprobs, advantage, low, high)
    return surrogates.reinforce(logprobs, advantage)


def _kl(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    slots: Slots,
    beta: float,
    estimator: str,
    max_log_ratio: float,
) -> tuple[Tensor | float, Statistics]:
    """KL per token, with a gradient where it has a weight; 0 without a reference."""
    check_number("beta", beta, at_least=0, at_most=MAX_WEIGHT)
    if ref_logprobs is None:
        if beta > 0:
            raise ValueError(f"ref_logprobs must be given when beta > 0; got None with beta={beta}")
        return 0.0, {}
    policy = logprobs if beta > 0 else logprobs.detach()
    difference = read_difference(("logprobs", "ref_logprobs"), policy, ref_logprobs, slots)
    kl = kl_of(difference, estimator, max_log_ratio)
    mean = weigh(kl.detach(), slots, "token_mean", padded=False)
    check_finite(mean, slots, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return kl, {"kl": mean, f"kl/{estimator}": mean}


def _less(gain: Tensor, beta: float, kl: Tensor | float, ratio: Tensor | None) -> Tensor:
    """What a token gains, less the KL term (times the ratio, if that is given)."""
    if beta > 0:
        gain = gain - float(beta) * (kl if ratio is None else ratio * kl)
    return gain


def _entropy(
    entropies: Tensor | None,
    coef: float,
    slots: Slots,
    aggregation: str,
    total: Any,
    token_total: Any,
) -> tuple[Tensor | None, Statistics]:
    """The mean entropy per real token, times its weight, if it has one."""
    check_number("entropy_coef", coef, at_least=0, at_most=MAX_WEIGHT)
    if token_total is None and aggregation == "token_mean":
        token_total = total
    tokens = slots.tokens
    if token_total is not None and check_count("token_total", token_total) < tokens:
        raise ValueError(
            f"token_total must be at least the {tokens} tokens of this part; got {token_total}"
        )
    if entropies is None:
        if coef > 0:
            raise ValueError(
                f"entropies must be given when entropy_coef > 0; got None with entropy_coef={coef}"
            )
        return None, {}
    if coef > 0 and token_total is None and total is not None:
        raise ValueError(
            f"token_total must be given with total={total}: the entropy is a mean over all tokens "
            "of the step; got None"
        )
    values = entropies if coef > 0 or not is_dense(entropies) else entropies.detach()
    values = read_tokens("entropies", values, slots)
    mean = weigh(values, slots, "token_mean", padded=False)
    share = 1.0 if token_total is None else max(tokens, 1) / int(token_total)
    bonus = float(coef) * share * mean if coef > 0 else None
    finished = mean if bonus is None else bonus
    check_finite(finished, slots, entropies=entropies, entropy_coef=coef)
    return bonus, {"entropy": mean.detach()}


def _finish(
    loss: Tensor,
    bonus: Tensor | None,
    stats: Statistics,
    slots: Slots,
    **arguments: Tensor | float,
) -> tuple[Tensor, Statistics]:
    """The loss less the bonus, and the statistics: finite, or ``arguments`` are to blame."""
    loss = loss if bonus is None else loss - bonus
    for result in (loss, stats["ratio_mean"]):
        check_finite(result, slots, **arguments)
    return loss, stats


def _share(
    compare: Callable[..., Tensor],
    ratio: Tensor,
    end: float | Tensor,
    rows: Tensor,
    slots: Slots,
    how: str,
) -> Tensor:
    """The share of tokens whose ratio lies beyond an end of the range, where ``rows``, 0 or 1 of
    shape (B, T) or (B, 1), is 1 as well.

    In padded slots the ratio is 1, which no range leaves out, so the mask has no part in it.  A
    comparison gives numbers, not booleans: torch is several times quicker at making and at adding
    them."""
    flags = compare(ratio, end, out=torch.empty_like(ratio))
    return weigh(flags * rows, slots, how, padded=False)


def _statistics(
    surrogate: str, ratio_level: str, ratio: Tensor, advantage: Tensor, ends: Ends, slots: Slots
) -> Statistics:
    """Under TRL's names: the mean ratio, and the share of tokens (of responses, where they have one
    ratio each) that the clip leaves without a gradient: below the range with A < 0, above it with
    A > 0.  Only "clip" does that; "capped" has its own share, of weights that were cut."""
    how = "token_mean" if ratio_level == "token" else "sequence_mean"
    ratio, (low, high, ratio_max) = ratio.detach(), ends
    none = advantage.new_zeros(())
    good = torch.heaviside(advantage, none)  # 1 where A > 0, else 0
    below = above = either = none
    stats = {}
    if surrogate == "clip":
        bad = torch.heaviside(-advantage, none)
        below = _share(torch.lt, ratio, low, bad, slots, how)
        above = _share(torch.gt, ratio, high, good, slots, how)
        either = below + above
        if ratio_max is not None:
            stats["clip_ratio/max_mean"] = _share(torch.gt, ratio, ratio_max, bad, slots, how)
    if surrogate == "capped":
        stats["cispo_clip_ratio"] = _share(torch.gt, ratio, high, good, slots, how)
    if surrogate == "gamma":
        weight = surrogates.gamma_weight(ratio, advantage)
        stats["vespo/phi_seq_mean"] = weigh(weight, slots, how)
    return {
        "clip_ratio/low_mean": below,
        "clip_ratio/high_mean": above,
        "clip_ratio/region_mean": either,
        **stats,
        "ratio_mean": weigh(ratio, slots, how),
    }
