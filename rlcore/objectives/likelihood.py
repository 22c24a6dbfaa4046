"""Supervised fine-tuning: the likelihood of demonstrations."""

from typing import Any

from torch import Tensor

from rlcore.objectives._checks import check_choice, read_mask, read_tokens
from rlcore.objectives.aggregation import aggregate


def sft_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token_mean",
    total: Any = None,
    allow_empty: bool = False,
) -> Tensor:
    """L = -mean of log pi_theta(y_t | x, y_<t) over the tokens to be learned, to MINIMISE.

    logprobs, mask (B, T): mask is true at the tokens of the demonstrated response (the end-of-
    sequence token too, so that the model learns to stop), false at prompt and padding.
    aggregation: "token_mean" (TRL, transformers), all tokens alike; "sequence_mean", the mean of
    per-response means.  total: as in aggregate, the tokens (or responses) of the whole step.
    Returns a scalar, float32 or wider.  ValueError: as aggregate.
    """
    check_choice("aggregation", aggregation, ("token_mean", "sequence_mean"))
    real = read_mask(mask, name="mask", allow_empty=allow_empty)
    values = read_tokens("logprobs", logprobs, real)
    return aggregate(-values, real, how=aggregation, total=total, allow_empty=allow_empty)
