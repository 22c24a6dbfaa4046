r"""Question 4: how much does each token count?  From per-token values to one number."""

from typing import Any

from torch import Tensor

from rlcore.objectives._checks import (
    Slots,
    check_choice,
    check_count,
    check_finite,
    check_number,
    describe,
    read_slots,
    read_tokens,
    scalar,
)

__all__ = ["AGGREGATIONS", "aggregate"]

AGGREGATIONS = ("sequence_mean", "token_mean", "constant", "sequence_sum", "only_token_mean")


def aggregate(
    token_values: Tensor,
    response_mask: Tensor,
    *,
    how: str = "sequence_mean",
    constant: float | None = None,
    total: Any = None,
    allow_empty: bool = False,
) -> Tensor:
    r"""The weighted sum $\sum_{g,t} w_{g,t}\,\ell_{g,t}$ over all real tokens of $B$ responses.

    ``how`` names the weight of a token:

    - ``"sequence_mean"``: $w_{g,t} = \frac{1}{B\,|y^{(g)}|}$, the mean over each response, then
      over responses (GRPO, GSPO, SAPO).
    - ``"token_mean"``: $w_{g,t} = \frac{1}{\sum_g |y^{(g)}|}$, all tokens alike (DAPO, CISPO,
      VAPO, SFT).
    - ``"constant"``: $w_{g,t} = \frac{1}{B\,L}$ with $L$ = ``constant``, the same for responses
      of every length (Dr. GRPO).
    - ``"sequence_sum"``: $w_{g,t} = \frac1B$, the sum over each response, then the mean over
      responses (REINFORCE, RLOO, LUSPO).
    - ``"only_token_mean"``: $w_{g,t} = \frac{1}{|y^{(g)}|}$, the mean over each response, then
      the SUM over responses (DCPO).

    ``token_values`` and ``response_mask`` are $(B, T)$; the result is a scalar in float32 or
    wider, through which the gradient flows to ``token_values``.

    ``total``: when the call sees a part of a step, the number of responses of the whole step (of
    tokens for ``"token_mean"``) takes the place of $B$ (of $\sum_g |y^{(g)}|$), so that the parts
    add up to the whole.  For ``"only_token_mean"`` it changes nothing: a sum has no divisor.

    ``allow_empty``: rows without a real token add 0 and are not counted in $B$; else they are an
    error.

    Sources: GRPO, arXiv 2402.03300, eq. 3; DAPO, arXiv 2503.14476, eq. 8; Dr. GRPO, arXiv
    2503.20783, listing 1; DCPO, arXiv 2509.02333, eq. 8.  What differs from them:

    - "Only-token-mean" has three meanings: DCPO's eq. 8, computed here, has no $1/G$; the project's
      Chinese README prints $\frac1G \sum_g \sum_t$ without the lengths; the released code takes the
      token mean over the micro-batch.
    - DAPO's paper writes the token mean over one group, TRL and rlcore take it over the batch.
    - TRL's ``"bnpo"`` is the token mean over the local micro-batch: without ``total``, the parts
      of a step do not add up to the whole.
    - TRL's ``"grpo"`` divides by all $B$ rows, the empty ones too: pass that number as ``total``.

    ValueError: an unknown ``how``, shapes that differ, values not finite at a real token, an empty
    response, ``constant`` missing, below 1e-6 or given to another ``how``, ``total`` below the
    part's own count; a result beyond the range of its dtype.
    """
    check_constant(how, constant)
    slots = read_slots(response_mask, token_values, allow_empty=allow_empty)
    values = read_tokens("token_values", token_values, slots)
    result = weigh(values, slots, how, constant, total, padded=False)
    check_finite(result, slots, token_values=token_values)
    return result


def check_constant(how: str, constant: float | None) -> None:
    """That ``how`` is known and comes with a ``constant`` where, and only where, it needs one."""
    check_choice("how", how, AGGREGATIONS)
    if how == "constant":
        if constant is None:
            raise ValueError("constant must be given to aggregate over a constant; got None")
        check_number("constant", constant, at_least=1e-6)  # dividing must not overflow
    elif constant is not None:
        raise ValueError(f'constant is for "constant" only; got {describe(constant)} with "{how}"')


def weigh(
    values: Tensor,
    slots: Slots,
    how: str,
    constant: float | None = None,
    total: Any = None,
    padded: bool = True,
    *,
    sign: int = 1,
) -> Tensor:
    """``aggregate``, of arguments that are already checked, times ``sign``.  ``values`` are
    $(B, T)$, finite in padded slots too (and 0 unless ``padded``), or $(B, 1)$ where all tokens of
    a response have the same."""
    if values.shape[1] < slots.real.shape[1]:
        sums = values[:, 0] * slots.lengths
    else:
        sums = values * slots.real if padded else values
        if how != "token_mean":  # all tokens alike need no sum of their own for each response
            sums = sums.sum(dim=1)
    count = slots.tokens if how == "token_mean" else slots.responses
    whole = max(count, 1) if total is None else check_count("total", total)
    if whole < count:
        what = "tokens" if how == "token_mean" else "responses"
        raise ValueError(f"total must be at least the {count} {what} of this part; got {whole}")
    if how in ("sequence_mean", "only_token_mean"):
        sums = sums / slots.lengths.clamp(min=1)
    elif constant is not None:
        sums = sums / float(constant)
    if how == "only_token_mean":
        whole = 1
    return sums.sum() / scalar(sign * whole, sums)
