r"""Question 2 with a critic: worth more than what a value head $V(x, y_{<t})$ expected?

The same everywhere in this file:

- Everything per token is ``(B, T)``; masked slots may hold anything and give 0.
- The real tokens of a row are the steps, in their order.  A slot that the mask leaves out is no
  step, also between two real tokens (the output of a tool): it neither decays nor delays anything.
- float32 or wider; float64 where an argument per token is.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.objectives._checks import (
    MAX_WEIGHT,
    check_choice,
    check_ddof,
    check_number,
    describe,
    is_dense,
    read_lengths,
    read_mask,
    read_tokens,
    to_float,
)
from rlcore.objectives._groups import rounding
from rlcore.objectives.aggregation import AGGREGATIONS, aggregate, check_constant


class CriticEstimates(NamedTuple):
    """What a critic's values say about a batch: see ``generalized_advantages``."""

    advantages: Tensor  # (B, T) for the policy, not whitened
    returns: Tensor  # (B, T) for the critic: what it should have said


def generalized_advantages(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap_values: Tensor | None = None,
    allow_empty: bool = False,
) -> CriticEstimates:
    r"""GAE: $\hat A_t = \delta_t + \gamma\lambda\hat A_{t+1}$ over the real tokens of a response.

    $$
    \delta_t = r_t + \gamma V_{t+1} - V_t,\qquad
    \hat A_t = \sum_{k\ge 0} (\gamma\lambda)^k\,\delta_{t+k},\qquad
    V^{targ}_t = \hat A_t + V_t
    $$

    ``token_rewards``, ``values``, ``response_mask`` are ``(B, T)``; both results are ``(B, T)``,
    0 in masked slots, and carry no gradient.  The returns are those of the advantages as they
    stand here, before any whitening.

    - ``lam``: $\lambda$ in $[0, 1]$, one number or one per row ``(B,)`` (VAPO).  With the true
      values every $\lambda$ gives the true policy gradient ($\gamma=1$).  With values that are off
      by $e$ the advantage is off by
      $-e_t + \gamma(1-\lambda)\sum_{k\ge1}(\gamma\lambda)^{k-1} e_{t+k}$: the first term is a
      baseline and does no harm, the sum is the bias; $\lambda=1$ has none.
    - ``bootstrap_values``: ``(B,)``, $V_{T+1}$ after the last real token.  None, and 0 in a row:
      the response ended there, so nothing follows.  For a row that was cut by the length limit the
      critic's value of what would have come is the other choice, and it is taken only if given.
    - ``allow_empty``: rows without a real token get 0; else they are an error.

    Source: GAE, arXiv 1506.02438; PPO, arXiv 1707.06347, eqs. 11 and 12 (there
    $\gamma=0.99$, $\lambda=0.95$, for games).  verl puts the score on the last token, as here.
    TRL's last PPO trainer (1.12) puts it one slot after the last token of a row that is shorter
    than the batch and leaves the value there as it is, so that the last token sees $\lambda R$.
    ValueError: shapes that differ, numbers not finite at a real token or so large that a sum of
    them could overflow, an empty response, ``gamma`` or ``lam`` outside $[0, 1]$.
    """
    gamma = check_number("gamma", gamma, at_least=0, at_most=1)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    rewards = read_tokens("token_rewards", token_rewards, mask).detach()
    value = read_tokens("values", values, mask).detach()
    dtype = torch.promote_types(rewards.dtype, value.dtype)
    limit = torch.finfo(dtype).max / (8 * mask.shape[1])
    _check_size("token_rewards", rewards, limit)
    _check_size("values", value, limit)
    decay = gamma * _read_lam(lam, mask).to(dtype)

    steps = _Steps(mask)
    value = steps.pack(value.to(dtype))
    following = torch.nn.functional.pad(value[:, 1:], (0, 1))  # V_{t+1}; 0 after the last token
    if bootstrap_values is not None:
        after = _read_rows("bootstrap_values", bootstrap_values, mask)
        _check_size("bootstrap_values", after, limit)
        following = torch.where(steps.last, after.to(dtype)[:, None], following)
    delta = steps.pack(rewards.to(dtype)) + gamma * following - value
    advantages = _decayed_sums(delta, decay)
    return CriticEstimates(steps.unpack(advantages), steps.unpack(advantages + value))


def whiten(
    values: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-8, shift_mean: bool = True
) -> Tensor:
    r"""$(v - \mu) / \sqrt{s^2 + \epsilon}$ over all real tokens of the batch; 0 in masked slots.

    ``values``, ``mask`` ``(B, T)`` -> ``(B, T)``, without gradient.

    - ``ddof``: 1, the sample variance, as TRL and verl; 0, the population variance.
    - ``eps``: $\epsilon$, added to the variance (to its root it would be $10^{-4}$).
    - ``shift_mean``: False puts the mean back afterwards (whitened rewards).

    One real token, or real tokens that are all equal (up to rounding: no further apart than 8 times
    the machine epsilon of the largest), have no spread: they get exactly 0 (with
    ``shift_mean=False`` they stay as they are).  No real token: all 0.
    PPO's paper does not whiten; TRL and verl do, each process its own tokens in TRL 1.12.
    ValueError: shapes that differ, numbers not finite at a real token or so large that their sum
    could overflow, ``ddof`` not 0 or 1, ``eps`` negative.
    """
    ddof, eps = check_ddof(ddof), check_number("eps", eps, at_least=0)
    real = read_mask(mask, name="mask", allow_empty=True)
    numbers = read_tokens("values", values, real).detach()
    _check_size("values", numbers, torch.finfo(numbers.dtype).max / (4 * numbers.numel()))
    chosen = numbers[real].double()
    # measured from one of them, so that equal numbers give zeros whatever rounding does to a mean
    above = chosen - chosen[:1]
    mean = above.sum() / max(len(above), 1)
    centred = above - mean
    if len(above) and above.amax() - above.amin() <= rounding(numbers.dtype) * chosen.abs().amax():
        centred = torch.zeros_like(above)
    divisor = torch.hypot(_std(centred, ddof), centred.new_tensor(math.sqrt(eps)))
    white = torch.where(centred == 0, 0.0, centred / divisor)
    if not shift_mean:
        white = white + (chosen[:1] + mean)
    return torch.zeros_like(numbers).masked_scatter(real, white.to(numbers.dtype))


def value_loss(
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    old_values: Tensor | None = None,
    epsilon: float | None = None,
    aggregation: str = "token_mean",
    constant: float | None = None,
    total: Any = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Half the squared error of the critic, clipped if asked for, to be minimised.

    $$
    \mathcal L^{VF} = \tfrac12\,\mathrm{agg}_t\,\max\big((V_t - V^{targ}_t)^2,\;
    (\mathrm{clip}(V_t,\,V^{old}_t - \epsilon,\,V^{old}_t + \epsilon) - V^{targ}_t)^2\big)
    $$

    ``values``, ``returns``, ``old_values``, ``response_mask`` ``(B, T)``.  The gradient flows
    through ``values`` only; where the clipped error is the larger one, it is 0.

    - ``epsilon``: how far a value may move from ``old_values``, in units of the reward; None does
      not clip, and ``old_values`` is then not looked at.
    - ``aggregation``, ``constant``, ``total``, ``allow_empty``: as in ``aggregate``.

    Returns the loss and its statistics, scalars without gradient: ``val/vf_clipfrac``, the share
    of tokens whose clipped error is the larger one (TRL: ``val/clipfrac_avg``, verl:
    ``critic/vf_clipfrac``); ``val/explained_variance``,
    $1 - \mathrm{Var}(V^{targ} - V)/\mathrm{Var}(V^{targ})$, 0 where the returns do not vary (or by
    no more than rounding: their std is within 8 times the machine epsilon of the largest value or
    return);
    ``val/vpred_mean`` and ``val/return_mean``.
    Source: PPO, arXiv 1707.06347, eq. 9, which has the mean squared error without the 1/2 and does
    not clip; the half and the clip are how implementations do it (OpenAI's, TRL, verl).
    TRL 1.12 takes the mean over one more slot per row here than in its policy loss.
    ValueError: shapes that differ, numbers not finite at a real token or so large that a sum of
    squares could overflow, ``epsilon`` negative or without ``old_values``; and as ``aggregate``.
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    check_constant(aggregation, constant)
    mask = read_mask(response_mask, allow_empty=allow_empty)
    divisor = 1.0 if constant is None else float(constant)
    predicted = _read_squarable("values", values, mask, divisor)
    target = _read_squarable("returns", returns, mask, divisor).detach()

    error = clipped_error = (predicted - target).square()
    if epsilon is not None:
        epsilon = check_number("epsilon", epsilon, at_least=0, at_most=MAX_WEIGHT)
        if old_values is None:
            raise ValueError(f"old_values must be given to clip; got None with epsilon={epsilon:g}")
        old = _read_squarable("old_values", old_values, mask, divisor).detach()
        near = predicted.clamp(old - epsilon, old + epsilon)
        clipped_error = (near - target).square()
    loss = aggregate(
        torch.maximum(error, clipped_error) / 2,
        mask,
        how=aggregation,
        constant=constant,
        total=total,
        allow_empty=True,
    )
    clipped = clipped_error > error
    return loss, _statistics(predicted.detach(), target, clipped, mask)


def length_adaptive_lam(lengths: Tensor | Sequence[int], *, alpha: float = 0.05) -> Tensor:
    r"""VAPO's $\lambda = 1 - \frac{1}{\alpha\,|y|}$, one per response, limited to $[0, 1]$.

    Chosen so that $\sum_t \lambda^t \approx 1/(1-\lambda)$ is the share ``alpha`` of the response:
    the longer it is, the further the rewards are carried back.

    ``lengths`` ``(B,)``: the number of real tokens, integers; ``alpha`` > 0.  Returns ``(B,)`` in
    float64, the ``lam`` of ``generalized_advantages``.
    Source: VAPO, arXiv 2504.05118, eqs. 3 to 10, with $\alpha=0.05$.  For responses shorter than
    $1/\alpha$ (20 tokens) the paper's formula is negative and the paper silent; here it is 0.
    ValueError: lengths that are not integers >= 0, ``alpha`` not positive.
    """
    alpha = check_number("alpha", alpha, above=0)
    return (1 - 1 / (alpha * read_lengths(lengths).double())).clamp(0, 1)


class _Steps:
    """The real tokens of each row moved together, to its left end, and back again."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.row, self.slot = mask.nonzero(as_tuple=True)
        count = mask.sum(dim=1, keepdim=True)
        self.place = mask.cumsum(dim=1)[self.row, self.slot] - 1
        self.width = max(int(count.max()), 1)
        self.last = torch.arange(self.width, device=mask.device) == count - 1

    def pack(self, values: Tensor) -> Tensor:
        packed = values.new_zeros(len(self.mask), self.width)
        packed[self.row, self.place] = values[self.row, self.slot]
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        values = packed.new_zeros(self.mask.shape)
        values[self.row, self.slot] = packed[self.row, self.place]
        return values


def _decayed_sums(delta: Tensor, decay: Tensor) -> Tensor:
    """A_t = delta_t + decay A_{t+1}, for all t at once.

    A holds the sum of the first `span` terms decay^k delta_{t+k}; the next `span` terms are
    decay^span times what A holds `span` slots on.  log2(T) steps over (B, T) instead of T."""
    sums, span = delta, 1
    while span < delta.shape[1]:
        sums = sums + decay**span * torch.nn.functional.pad(sums[:, span:], (0, span))
        span *= 2
    return sums


def _std(centred: Tensor, ddof: int) -> Tensor:
    """Of deviations (N,), 0-d.  Divided by the largest before they are squared, so that no square
    leaves the range of float64."""
    if not len(centred):
        return centred.new_zeros(())
    largest = centred.abs().amax()
    unit = centred / largest.clamp(min=torch.finfo(torch.float64).tiny)
    return largest * (unit.square().sum() / max(len(centred) - ddof, 1)).sqrt()


def _statistics(
    predicted: Tensor, target: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    def mean(values: Tensor) -> Tensor:
        return aggregate(values, mask, how="token_mean", allow_empty=True)

    some = mask.flatten().byte().argmax()  # a real token, if there is one

    def variance(values: Tensor) -> Tensor:
        # measured from one of them, so that equal numbers have none whatever rounding does
        above = torch.where(mask, values - values.flatten()[some], 0.0)
        return mean((above - mean(above)).square())

    spread = variance(target)
    largest = torch.maximum(target.abs().amax(), predicted.abs().amax())
    varies = spread.sqrt() > rounding(target.dtype) * largest
    unexplained = variance(target - predicted) / torch.where(varies, spread, 1.0)
    return {
        "val/vf_clipfrac": mean(clipped),
        "val/explained_variance": torch.where(varies, 1 - unexplained, 0.0),
        "val/vpred_mean": mean(predicted),
        "val/return_mean": mean(target),
    }


def _check_size(name: str, values: Tensor, limit: float) -> None:
    if values.abs().amax() > limit:
        place = (values.abs() > limit).nonzero()[0]
        where = "row {}, slot {}" if len(place) == 2 else "row {}"
        raise ValueError(
            f"{name} must be at most {limit:.3g} in size, so that no sum overflows; got "
            f"{values[tuple(place)].item():g} in {where.format(*place.tolist())}"
        )


def _read_squarable(name: str, values: Tensor, mask: Tensor, divisor: float) -> Tensor:
    """Per-token values whose squared differences can be added up over the batch and divided."""
    numbers = read_tokens(name, values, mask)
    room = min(divisor, 1.0) * torch.finfo(numbers.dtype).max
    _check_size(name, numbers.detach(), math.sqrt(room / mask.numel()) / 8)
    return numbers


def _read_rows(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """One finite number per row of the mask, (B,), float32 or wider, without gradient."""
    if not is_dense(values) or values.shape != mask.shape[:1] or values.is_complex():
        raise ValueError(
            f"{name} must be real and of shape {tuple(mask.shape[:1])}, one per row of "
            f"response_mask; got {describe(values)}"
        )
    if values.device != mask.device:
        raise ValueError(f"{name} must be on {mask.device}, as the mask; got {values.device}")
    values = to_float(values).detach()
    if not values.isfinite().all():
        row = int((~values.isfinite()).nonzero()[0])
        raise ValueError(f"{name} must be finite; got {values[row].item()} in row {row}")
    return values


def _read_lam(lam: float | Tensor, mask: Tensor) -> Tensor:
    """(B, 1) or (1, 1), in float64 or as it came."""
    if not isinstance(lam, Tensor):
        number = check_number("lam", lam, at_least=0, at_most=1)
        return torch.full((1, 1), number, dtype=torch.float64, device=mask.device)
    each = _read_rows("lam", lam, mask)
    outside = (each < 0) | (each > 1)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(f"lam must be in [0, 1]; got {each[row].item():g} in row {row}")
    return each[:, None]
