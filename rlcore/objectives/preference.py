r"""Preferences without a reward model: DPO and its family.

Every method answers three questions about a pair, a chosen response $y_w$ and a rejected $y_l$:

1. Which score $s(y)$ does a response get?  ``score``
2. By which margin must the chosen one win?  ``gamma`` (and the link's own: 1, or $1/(2\beta)$)
3. Through which link does the difference become a loss?  ``link``, ``label_smoothing``

The rows of answers, from DPO to ORPO, are in ``rlcore.preferences``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    Slots,
    as_numbers,
    check_choice,
    check_number,
    describe,
    read_mask,
    read_tokens,
)
from rlcore.objectives._pairs import (
    MAX_FACTOR,
    check_counts,
    check_size,
    log_sigmoid_loss,
    mean_of,
    read_divisor,
)

SCORES = ("log_ratio_sum", "log_ratio_mean", "logprob_mean", "log_odds")
LINKS = ("sigmoid", "hinge", "square")
SMOOTHINGS = ("conservative", "robust")


def preference_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    ref_chosen_logprobs: Tensor | None = None,
    ref_rejected_logprobs: Tensor | None = None,
    score: str = "log_ratio_sum",
    link: str = "sigmoid",
    beta: float = 0.1,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
    smoothing: str = "conservative",
    weight: float = 1.0,
    nll_coef: float = 0.0,
    total: Any = None,
    token_total: Any = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""The mean over pairs of $\ell(h)$, $h = s(y_w) - s(y_l)$ the difference of two scores.

    chosen_logprobs, chosen_mask, ref_chosen_logprobs (B, T) and their rejected twins (B, S): the
    log-probs of the response's tokens (not the prompt's), in nats, row i of both sides an answer to
    the same prompt.  Returns the loss, float32 or wider, to MINIMISE, and its statistics, scalars
    without gradient.  The gradient flows through chosen_logprobs and rejected_logprobs only.

    score, what $s(y)$ is:

    - ``"log_ratio_sum"``: $\sum_t \log\pi_\theta(y_t) - \log\pi_{ref}(y_t)$ (DPO, IPO, hinge);
    - ``"log_ratio_mean"``: the same divided by $|y|$ (length-normalised DPO, IPO as TRL has it);
    - ``"logprob_mean"``: $\frac1{|y|}\sum_t \log\pi_\theta(y_t)$, no reference (SimPO);
    - ``"log_odds"``: $\log\frac{P}{1-P}$ of $P = \exp(\frac1{|y|}\log\pi_\theta(y))$ (ORPO).

    link, what $\ell(h)$ is, with the margin $\gamma$:

    - ``"sigmoid"``: $-\log\sigma(\beta h - \gamma)$;
    - ``"hinge"``: $\max(0, 1 + \gamma - \beta h)$;
    - ``"square"``: $(h - \frac1{2\beta})^2$, where $\beta$ is IPO's $\tau$ and $\gamma$ must be 0.

    label_smoothing, the probability $\varepsilon$ that a label is wrong; a wrong label has
    $\ell(-h)$, the loss of the pair the other way round:

    - ``smoothing="conservative"``: $(1-\varepsilon)\,\ell(h) + \varepsilon\,\ell(-h)$ (cDPO);
    - ``smoothing="robust"``: $\frac{(1-\varepsilon)\,\ell(h) - \varepsilon\,\ell(-h)}
      {1-2\varepsilon}$ (rDPO), whose mean over wrong labels is the loss without them.

    weight multiplies all this (ORPO's $\lambda$); nll_coef adds that many times the negative
    log-likelihood of the chosen responses, mean over their tokens (ORPO's $L_{SFT}$).
    total, token_total: the pairs, and the chosen responses' tokens, of the whole step when this
    call sees a part of it; the parts then add up to the whole.  With nll_coef, one is not enough.
    allow_empty: a pair with an empty answer is left out of loss, likelihood and statistics, and
    counted in ``pairs_skipped``; else it is an error.

    Statistics, under TRL's names, means over the pairs of this call: ``rewards/chosen`` and
    ``rewards/rejected`` ($\beta s$; ``"square"`` compares $s$ itself), ``rewards/margins``,
    ``rewards/accuracies`` (share of pairs with a margin above 0); ``logps/chosen`` and
    ``logps/rejected`` (summed over tokens for the log-ratios, averaged for the other two scores);
    ``pairs_skipped``; with nll_coef, ``nll_loss``; with ``"log_odds"``, ``log_odds_chosen`` (the
    mean of $h$) and ``log_odds_ratio`` (of $\log\sigma(h)$).

    Source: DPO, arXiv 2305.18290, eq. 7; cDPO, Mitchell's note, eqs. 3 and 4; rDPO, arXiv
    2403.00409; IPO, arXiv 2310.12036, eq. 17; SimPO, arXiv 2405.14734, eqs. 4 to 6; ORPO, arXiv
    2403.07691, eqs. 3 to 7.  Differences: the rewards that TRL logs are $\beta$ times the summed
    log-ratio even where its loss averages, and $\lambda$ times the mean log-prob for ORPO; TRL
    smooths SimPO with $-\log\sigma(-(\beta h - \gamma))$, not the pair the other way round.
    In ``"log_odds"``, $P$ is kept below 1 by one unit of rounding, so that the odds stay finite.
    ValueError: an unknown choice, shapes that differ, log-probs not finite at a real token (or
    summing to more than 1e12), above 0 for ``"log_odds"``, a reference missing or not needed,
    beta <= 0 (< 1e-6 for ``"square"``), gamma or a weight < 0, label_smoothing outside [0, 0.5] (at
    0.5 for ``"robust"``), an empty answer, a total below the part's own, or one of two.
    """
    loss_of = link_function(link, beta, gamma)
    smooth = smoothing_function(smoothing, label_smoothing)
    weight = check_number("weight", weight, at_least=0, at_most=MAX_FACTOR)
    nll_coef = check_number("nll_coef", nll_coef, at_least=0, at_most=MAX_FACTOR)
    masks, kept = _read_masks(chosen_mask, rejected_mask, allow_empty)
    count = kept.sum()
    policy = {"chosen_logprobs": chosen_logprobs, "rejected_logprobs": rejected_logprobs}
    reference = (ref_chosen_logprobs, ref_rejected_logprobs)
    (chosen, rejected), logps = _scores(score, policy, reference, masks)

    price = torch.where(kept, smooth(loss_of, chosen - rejected), 0.0)
    tokens = _read_tokens_of_step(nll_coef, masks[0], total, token_total)
    loss = weight * price.sum() / read_divisor(total, int(count), "pairs")
    stats = _statistics(score, beta, (chosen, rejected), logps, kept, count)
    if nll_coef > 0:
        nll, stats["nll_loss"] = _likelihood(chosen_logprobs, masks[0], tokens)
        loss = loss + nll_coef * nll
    return loss, stats


def link_function(link: str, beta: float, gamma: float) -> Callable[[Tensor], Tensor]:
    r"""$h \mapsto \ell(h)$, margin included.  ValueError as ``preference_loss``."""
    check_choice("link", link, LINKS)
    gamma = check_number("gamma", gamma, at_least=0, at_most=MAX_FACTOR)
    if link == "square":
        tau = check_number("beta", beta, at_least=1e-6, at_most=MAX_FACTOR)
        if gamma > 0:
            raise ValueError(f'gamma must be 0 with link="square"; got {gamma}')
        return lambda h: (h - 1 / (2 * tau)).square()
    beta = check_number("beta", beta, above=0, at_most=MAX_FACTOR)
    if link == "hinge":
        return lambda h: (1 + gamma - beta * h).relu()
    return lambda h: log_sigmoid_loss(beta * h - gamma)


def smoothing_function(
    smoothing: str, label_smoothing: float
) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    r"""$\ell, h \mapsto$ the loss when labels may err, of $\ell(h)$ and $\ell(-h)$, that of the
    pair the other way round.  ValueError as ``preference_loss``."""
    check_choice("smoothing", smoothing, SMOOTHINGS)
    wrong = check_number("label_smoothing", label_smoothing, at_least=0, at_most=0.5)
    if wrong == 0:
        return lambda loss, h: loss(h)
    if smoothing == "conservative":
        return lambda loss, h: (1 - wrong) * loss(h) + wrong * loss(-h)
    if wrong == 0.5:
        raise ValueError('label_smoothing must be below 0.5 with smoothing="robust"; got 0.5')
    return lambda loss, h: ((1 - wrong) * loss(h) - wrong * loss(-h)) / (1 - 2 * wrong)


def _read_masks(
    chosen_mask: Tensor, rejected_mask: Tensor, allow_empty: bool
) -> tuple[list[Tensor], Tensor]:
    """Both masks, empty on both sides where a pair misses one of its answers, and which pairs do
    not, (B,)."""
    chosen = read_mask(chosen_mask, name="chosen_mask", allow_empty=allow_empty)
    rejected = read_mask(rejected_mask, name="rejected_mask", allow_empty=allow_empty)
    if len(chosen) != len(rejected):
        raise ValueError(
            f"rejected_mask must have {len(chosen)} rows, as chosen_mask; got {len(rejected)}"
        )
    if chosen.device != rejected.device:
        raise ValueError(
            f"rejected_mask must be on {chosen.device}, as chosen_mask; got {rejected.device}"
        )
    if not allow_empty:
        return [chosen, rejected], chosen.new_ones(len(chosen))
    kept = chosen.any(dim=1) & rejected.any(dim=1)
    return [chosen & kept[:, None], rejected & kept[:, None]], kept


def _scores(
    score: str,
    policy: dict[str, Tensor],
    reference: tuple[Tensor | None, Tensor | None],
    masks: list[Tensor],
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What the chosen and the rejected responses score, and the log-probs to report for them."""
    check_choice("score", score, SCORES)
    chosen, rejected = (
        _score(score, name, logprobs, ref_logprobs, mask)
        for (name, logprobs), ref_logprobs, mask in zip(
            policy.items(), reference, masks, strict=True
        )
    )
    return (chosen[0], rejected[0]), (chosen[1], rejected[1])


def _score(
    score: str, name: str, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """What the responses of one side score, (B,), and the log-probs to report for them, (B,)."""
    wide = isinstance(logprobs, Tensor) and logprobs.dtype == torch.float64
    slots = Slots(as_numbers(mask, torch.float64 if wide else torch.float32), mask)
    values = read_tokens(name, logprobs, slots)
    logps = values.sum(dim=1)
    check_size(name, logps, " when summed over a response")
    if score in ("logprob_mean", "log_odds"):
        if ref_logprobs is not None:
            raise ValueError(
                f'ref_{name} must be None with score="{score}", which has no reference; got '
                f"{describe(ref_logprobs)}"
            )
        mean = logps / slots.lengths.clamp(min=1)
        return (mean if score == "logprob_mean" else _log_odds(name, mean)), mean
    if ref_logprobs is None:
        raise ValueError(f'ref_{name} must be given with score="{score}"; got None')
    reference = read_tokens(f"ref_{name}", ref_logprobs, slots).detach()
    log_ratio = (values - reference).sum(dim=1)
    check_size(f"ref_{name}", log_ratio, " when the log-ratio is summed over a response")
    if score == "log_ratio_mean":
        log_ratio = log_ratio / slots.lengths.clamp(min=1)
    return log_ratio, logps


def _log_odds(name: str, mean: Tensor) -> Tensor:
    """log P - log(1 - P), where log P is the mean log-prob of a token.

    1 - P is -expm1(log P), which keeps its digits where P rounds to 1."""
    above = mean > 1e-3  # more than rounding explains
    if above.any():
        row = int(above.nonzero()[0])
        raise ValueError(
            f'{name} must be at most 0 with score="log_odds": they are logs of probabilities; got '
            f"a mean of {mean[row].item():g} in row {row}"
        )
    below_one = mean.clamp(max=-torch.finfo(mean.dtype).eps)
    return mean - (-torch.expm1(below_one)).log()


def _read_tokens_of_step(nll_coef: float, mask: Tensor, total: Any, token_total: Any) -> int:
    """What the likelihood is divided by: the chosen responses' tokens, of the whole step."""
    if nll_coef == 0 and token_total is None:  # nothing to divide, nothing to check
        return 1
    tokens = read_divisor(token_total, int(mask.sum()), "tokens", "token_total")
    if nll_coef > 0:
        check_counts(total=total, token_total=token_total)
    return tokens


def _likelihood(logprobs: Tensor, mask: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of the chosen responses: this part's share, and its own mean."""
    values = -read_tokens("chosen_logprobs", logprobs, mask)
    return values.sum() / tokens, values.detach().sum() / mask.sum().clamp(min=1)


def _statistics(
    score: str,
    beta: float,
    scores: tuple[Tensor, Tensor],
    logps: tuple[Tensor, Tensor],
    kept: Tensor,
    count: Tensor,
) -> dict[str, Tensor]:
    """Under TRL's names; scores and log-probs of both sides, (B,) each."""
    chosen, rejected = (beta * side for side in scores)
    stats = {
        "rewards/chosen": mean_of(chosen, kept, count),
        "rewards/rejected": mean_of(rejected, kept, count),
        "rewards/accuracies": mean_of((chosen > rejected).to(chosen.dtype), kept, count),
        "rewards/margins": mean_of(chosen - rejected, kept, count),
        "logps/chosen": mean_of(logps[0], kept, count),
        "logps/rejected": mean_of(logps[1], kept, count),
        "pairs_skipped": len(kept) - count,
    }
    if score == "log_odds":
        ratio = scores[0] - scores[1]
        stats["log_odds_chosen"] = mean_of(ratio, kept, count)
        stats["log_odds_ratio"] = mean_of(-log_sigmoid_loss(ratio), kept, count)
    return stats
