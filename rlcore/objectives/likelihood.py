r"""Supervised fine-tuning: the likelihood of demonstrations."""

from typing import Any

from torch import Tensor

from rlcore.objectives._checks import check_choice, check_finite, read_slots, read_tokens
from rlcore.objectives.aggregation import weigh


def sft_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token_mean",
    total: Any = None,
    entropies: Tensor | None = None,
    allow_empty: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""$\mathcal L = -\operatorname{mean} \log\pi_\theta(y_t \mid x, y_{<t})$ over the tokens to be
    learned, to MINIMISE.

    ``logprobs`` (nats) and ``mask`` are $(B, T)$.  ``mask`` is true at the tokens of the
    demonstrated response (the end-of-sequence token too, so that the model learns to stop), false
    at prompt and padding.  The gradient flows to ``logprobs``; the result is the loss and its
    statistics, scalars in float32 or wider, the statistics without gradient.

    ``aggregation``:

    - ``"token_mean"``: all tokens alike (TRL, transformers), so long responses count more.
    - ``"sequence_mean"``: the mean of the responses' own means.

    ``total``: as in ``aggregate``, the tokens (or responses) of the whole step when the call sees a
    part of it; a mean of the parts' means would be another loss.  ``allow_empty``: rows without a
    token to be learned are left out; if all are, the loss is 0.

    Statistics, of this call's tokens alone: ``nll_loss``, their mean $-\log\pi_\theta$ whatever the
    aggregation; ``num_tokens``; ``entropy``, where ``entropies`` (nats, $(B, T)$) are given: they
    are only measured.

    This is also the likelihood term of VAPO (arXiv 2504.05118, sec. 5.1): ``mask`` true in the rows
    of correct answers only, ``allow_empty=True``, the result times $\mu = 0.1$.

    What differs elsewhere: TRL excludes the prompt only for prompt/completion data or with
    ``assistant_only_loss``; transformers' ``ForCausalLMLoss`` computes in float32 always.

    ValueError: as ``aggregate``.
    """
    check_choice("aggregation", aggregation, ("token_mean", "sequence_mean"))
    slots = read_slots(mask, logprobs, name="mask", allow_empty=allow_empty)
    values = read_tokens("logprobs", logprobs, slots)
    loss = weigh(values, slots, aggregation, total=total, padded=False, sign=-1)
    stats = {
        "nll_loss": weigh(values.detach(), slots, "token_mean", padded=False, sign=-1),
        "num_tokens": slots.mask.sum(),
    }
    if entropies is not None:
        measured = read_tokens("entropies", entropies, slots).detach()
        stats["entropy"] = weigh(measured, slots, "token_mean", padded=False)
    total_of_all = loss.detach() + stats["nll_loss"] + stats.get("entropy", 0.0)
    check_finite(total_of_all, slots, logprobs=logprobs, entropies=entropies)
    return loss, stats
