"""Question 4: how much does each token count?  From per-token values to one number."""

from typing import Any

from torch import Tensor

from rlcore.objectives._checks import (
    check_choice,
    check_count,
    check_number,
    read_mask,
    read_tokens,
)

AGGREGATIONS = ("sequence_mean", "token_mean", "constant", "sequence_sum")


def aggregate(
    token_values: Tensor,
    response_mask: Tensor,
    *,
    how: str = "sequence_mean",
    constant: float | None = None,
    total: Any = None,
    allow_empty: bool = False,
) -> Tensor:
    """The weighted sum of l_{g,t} over all real tokens, with the weight that `how` names:

    "sequence_mean"  1 / (B |y^(g)|)  mean per response, then over responses (GRPO)
    "token_mean"     1 / sum_g |y^(g)|  all tokens alike (DAPO, SFT)
    "constant"       1 / (B L)  L = `constant`, the same for all lengths (Dr. GRPO)
    "sequence_sum"   1 / B  sum per response, mean over responses (REINFORCE, RLOO)

    token_values, response_mask (B, T) -> scalar, in float32 or wider.
    total: when the call sees a part of a step, the number of responses of the whole step (of
    tokens for "token_mean") replaces B (the token count), so that the parts add up to the whole.
    allow_empty: rows without a real token add 0 and are not counted in B; else they are an error.
    ValueError: an unknown `how`, shapes that differ, values not finite at a real token, an empty
    response, `constant` missing, < 1e-6 or given to another `how`, `total` below the part's count.
    """
    check_choice("how", how, AGGREGATIONS)
    if how == "constant":
        if constant is None:
            raise ValueError("constant must be given to aggregate over a constant; got None")
        constant = check_number("constant", constant, at_least=1e-6)  # dividing must not overflow
    elif constant is not None:
        raise ValueError(f'constant is for "constant" only; got {constant} with "{how}"')
    mask = read_mask(response_mask, allow_empty=allow_empty)
    values = read_tokens("token_values", token_values, mask)

    lengths = mask.sum(dim=1)
    count = int(lengths.sum() if how == "token_mean" else (lengths > 0).sum())
    if total is not None and check_count("total", total) < count:
        what = "tokens" if how == "token_mean" else "responses"
        raise ValueError(f"total must be at least the {count} {what} of this part; got {total}")
    responses = values.sum(dim=1)
    if how == "sequence_mean":
        responses = responses / lengths.clamp(min=1)
    elif constant is not None:
        responses = responses / constant
    return responses.sum() / (max(count, 1) if total is None else int(total))
