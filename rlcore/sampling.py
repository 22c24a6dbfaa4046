"""Groups of responses from a policy, with the log-probs of the distribution sampled from.

Less work for the same samples: a prompt is read once for its whole group, keys and values are
kept, and finished rows leave the batch. None of it changes a sample, since each row
has its own stream of random numbers, drawn before the first token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.checks import check_temperature, check_whole, shown
from rlcore.decoding import start_decoding
from rlcore.graph_decoding import GraphDecoder, check_cuda_graph
from rlcore.llama import can_share, is_plain_llama, shared_prompt_logits
from rlcore.models import (
    check_length,
    check_response,
    check_vocabulary,
    decode,
    encode,
    eos_ids,
    evaluating,
    padding,
    read_batch,
)
from rlcore.objectives.logprobs import token_logprobs

# Finished rows leave once no more than this share of a batch is running: to move what is kept costs
# about as much as a token for all of them.
WORTH_A_MOVE = 0.75
WAITING = 2**20  # logits that wait at most to be made log-probs


@dataclass
class Samples:
    """B responses; P prompt columns (padded on the left), T response columns (on the right).

    The terminal token is part of the response where it was sampled: it is scored and trained.
    """

    prompts: list[str]  # one per row
    texts: list[str]  # the response without its terminal token
    input_ids: Tensor  # (B, P+T)
    attention_mask: Tensor  # (B, P+T), 1 on real tokens
    response_mask: Tensor  # (B, T), True on response tokens, the terminal one included
    logprobs: Tensor  # (B, T) float32, of the distribution sampled from; 0 on padding
    entropy: Tensor  # (B, T) float32, nats, of that distribution; 0 on padding
    group_ids: Tensor  # (B,), the number of the row's prompt in the call
    lengths: Tensor  # (B,), response tokens, the terminal one included
    truncated: Tensor  # (B,), True where max_new_tokens came before the terminal token

    def __len__(self) -> int:
        return len(self.texts)

    def check_finite(self) -> None:
        """ValueError where a log-prob is not finite."""
        if not bool(self.logprobs.isfinite().all()):
            raise ValueError(
                "model: found log-probs that are not finite; wanted weights without NaN or infinity"
            )


@torch.no_grad()  # not inference_mode: its tensors could not be used in a loss later
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    drop_finished: bool = True,
    cuda_graph: bool = False,
) -> Samples:
    """Sample `group_size` responses to each prompt; rows of one prompt follow each other.

    The distribution of each token is softmax(logits / temperature), then cut to the `top_k` most
    likely tokens (and those tied with the last), then to the fewest most likely ones that hold
    `top_p` of what is left, then renormalised. Nothing else touches the logits.
    greedy: the most likely token; its log-prob is 0, as it is chosen with certainty.
    generator: a `torch.Generator`, which is advanced; needed unless greedy. Same state, same
    machine, same thread count: same samples.
    drop_finished: leave finished rows out of the batch, many at once (same samples, less work).
    cuda_graph: on a GPU, one recorded step for all tokens, see `graph_decoding.py`: quicker where
    starting the kernels takes longer than computing. Finished rows then stay in the batch.

    Raises ValueError for an empty list of prompts or an empty prompt, characters without a token,
    a group_size or max_new_tokens below 1, temperature <= 0 (use greedy=True), a top_k or top_p
    out of range, where prompt and max_new_tokens are more than the model has positions for, for a
    tokenizer with more ids than the model has embeddings, and a cuda_graph for a model that is not
    on a CUDA device or cannot have its step recorded.
    """
    _check(prompts, group_size, max_new_tokens, temperature, top_k, top_p, greedy, generator)
    check_cuda_graph(cuda_graph, model)
    check_vocabulary(model, tokenizer)
    device = next(model.parameters()).device
    prompt_ids, prompt_mask = _encode_prompts(tokenizer, prompts, device)
    check_length(model, prompt_ids.shape[1] + max_new_tokens)
    rows, pad = len(prompts) * group_size, tokenizer.pad_token_id
    ends = torch.tensor(eos_ids(model, tokenizer), device=device)
    uniforms = torch.zeros(max_new_tokens, rows, dtype=torch.float64, device=device)
    if generator is not None and not greedy:
        uniforms = draw_uniforms(rows, max_new_tokens, generator).t().contiguous().to(device)
    written = _Written(max_new_tokens, rows, pad, device)

    with evaluating(model):
        start = GraphDecoder if cuda_graph else start_decoding
        step = start(model, prompt_ids, prompt_mask, group_size, max_new_tokens)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)  # of the rows that are left
        for t in range(max_new_tokens):
            logits = step.logits.float()
            if greedy:
                tokens = logits.argmax(-1)
                written.add(tokens)
            else:
                logits = logits if temperature == 1 else logits / temperature
                scores = _cut(logits, top_k, top_p).double()
                below = scores - scores.amax(-1, keepdim=True)
                weights = below.exp()
                tokens = _draw(weights, uniforms[t])
                written.add(tokens, below, weights)
            ended = ended | _among(tokens, ends)
            left = len(ended) - int(ended.sum())
            if left == 0 or t + 1 == max_new_tokens:
                break
            worth_it = drop_finished and left <= WORTH_A_MOVE * len(ended)
            if worth_it and not isinstance(step, GraphDecoder):
                keep = (~ended).nonzero()[:, 0]
                tokens, ended, uniforms = tokens[keep], ended[keep], uniforms[:, keep]
                written.keep(keep)
                step.keep(keep)
            step.advance(tokens)
        written.flush()

    last = _among(written.tokens, ends)
    drawn = last.cumsum(0) - last.long() == 0  # none came before
    lengths, finished = drawn.sum(0), last.any(0)
    width = int(lengths.max())
    mask, response, logprobs, entropies = (
        table[:width].t().contiguous()
        for table in (
            drawn,
            written.tokens.masked_fill(~drawn, pad),
            written.logprobs,
            written.entropies,
        )
    )
    beyond = ~mask
    answers = zip(response.tolist(), lengths.tolist(), finished.tolist(), strict=True)
    texts = decode(tokenizer, [ids[: n - int(end)] for ids, n, end in answers])
    return Samples(
        prompts=[prompt for prompt in prompts for _ in range(group_size)],
        texts=texts,
        input_ids=torch.cat([prompt_ids.repeat_interleave(group_size, 0), response], 1),
        attention_mask=torch.cat(
            [prompt_mask.repeat_interleave(group_size, 0), mask.to(prompt_mask.dtype)], 1
        ),
        response_mask=mask,
        logprobs=logprobs.masked_fill(beyond, 0.0),
        entropy=entropies.masked_fill(beyond, 0.0),
        group_ids=torch.arange(len(prompts), device=device).repeat_interleave(group_size),
        lengths=lengths,
        truncated=~finished,
    )


def draw_uniforms(rows: int, max_new_tokens: int, generator: torch.Generator) -> Tensor:
    """The random numbers (rows, max_new_tokens) of as many responses, on the generator's device.

    In float64, one after the other: those of several calls are those of one call for all rows.
    """
    return torch.rand(
        (rows, max_new_tokens), dtype=torch.float64, generator=generator, device=generator.device
    )


def response_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_length: int,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probs (B, T), float32, of the last T = `response_length` columns of input_ids (B, P+T).

    One forward pass, gradients on, dropout off (a ratio taken with dropout on is noise); where the
    model is a plain Llama, rows with one prompt that follow each other share it. With the
    temperature of `sample` these are the log-probs that it returned (without top-k and top-p).
    What stands on masked positions is unspecified.
    Raises ValueError as `token_values` of `rlcore.models`, and for a response_length or a mask
    that `response_values` does not take.
    """
    ids, mask = read_batch(model, input_ids, attention_mask)
    logits = _logits(model, ids, mask, response_length)
    return token_logprobs(logits, ids[:, -response_length - 1 :], temperature=temperature)


def response_logits(
    model: Any, input_ids: Tensor, attention_mask: Tensor, response_length: int
) -> Tensor:
    """Logits (B, T+1, V) at the last T+1 columns: those that predict the response, and one more,
    which is unspecified.

    The forward pass of `response_logprobs`, for what else its logits say (`entropy`).
    """
    ids, mask = read_batch(model, input_ids, attention_mask)
    return _logits(model, ids, mask, response_length)


def _logits(model: Any, ids: Tensor, mask: Tensor, response_length: int) -> Tensor:
    check_response(response_length, mask)
    with evaluating(model):
        if is_plain_llama(model) and can_share(mask, response_length):
            return shared_prompt_logits(model, ids, mask, response_length)
        logits: Tensor = model(
            input_ids=ids, use_cache=False, logits_to_keep=response_length + 1, **padding(mask)
        ).logits
    return logits


class _Written:
    """Tokens, log-probs and entropies in tables (steps, rows): a step's numbers side by side.

    What a step gives waits, and is put into the tables many steps at once.
    """

    def __init__(self, steps: int, rows: int, pad: int, device: torch.device) -> None:
        self.tokens = torch.full((steps, rows), pad, device=device)
        self.logprobs, self.entropies = torch.zeros(
            2, steps, rows, dtype=torch.float32, device=device
        )
        self.active = torch.arange(rows, device=device)
        self.steps = 0
        self.waiting: list[tuple[Tensor, ...]] = []

    def add(self, tokens: Tensor, *chances: Tensor) -> None:
        """The next tokens (n,) of the active rows; where they were drawn, also the logits (n, V)
        less the greatest, and their exp.
        """
        self.waiting.append((tokens, *chances))
        if chances and len(self.waiting) * chances[0].numel() > WAITING:
            self.flush()

    def keep(self, rows: Tensor) -> None:
        """Of the active rows only these have a next token."""
        self.flush()
        self.active = self.active[rows]

    def flush(self) -> None:
        """Put into the tables what waits."""
        if not self.waiting:
            return
        tokens, *chances = map(torch.stack, zip(*self.waiting, strict=True))
        place = slice(self.steps, self.steps + len(tokens)), self.active
        self.tokens[place] = tokens
        if chances:
            below, weights = chances
            below.clamp_(min=torch.finfo(below.dtype).min)  # -inf: 0 log 0 is 0 in the entropy
            total = weights.sum(-1)
            logprobs = below.gather(-1, tokens[:, :, None])[:, :, 0] - total.log()
            self.logprobs[place] = logprobs.float()
            entropies = total.log() - torch.linalg.vecdot(weights, below) / total
            self.entropies[place] = entropies.float()
        self.steps, self.waiting = self.steps + len(tokens), []


def _among(tokens: Tensor, ends: Tensor) -> Tensor:
    return (tokens[..., None] == ends).any(-1)


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative probability exceeds `uniform`, in float64.

    uniform * total, rounded, stays below total, since uniform is at most 1 - 2^-53.
    """
    cumulative = probabilities.cumsum(-1)
    return (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1)


def _cut(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """-inf outside the top k, then outside the top p, as transformers orders them."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.softmax(-1).sort(-1, descending=True)
        out = ordered.cumsum(-1) - ordered >= top_p  # the mass before this token is enough
        out[:, 0] = False  # a top_p that float32 rounds to 0 still leaves the most likely one
        logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, index, out), -math.inf)
    return logits


def _encode_prompts(
    tokenizer: Any, prompts: Sequence[str], device: torch.device
) -> tuple[Tensor, Tensor]:
    encoded = encode(tokenizer, prompts)
    empty = [i for i, ids in enumerate(encoded) if not ids]
    if empty:
        raise ValueError(f"prompts: number {empty[0]} is empty; wanted at least one token")
    width = max(map(len, encoded))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=device)
    mask = torch.tensor(
        [[0] * (width - len(row)) + [1] * len(row) for row in encoded], device=device
    )
    return ids, mask


def _check(
    prompts: Sequence[str],
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    greedy: bool,
    generator: torch.Generator | None,
) -> None:
    texts = isinstance(prompts, Sequence) and all(isinstance(text, str) for text in prompts)
    if not texts or isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError(f"prompts: found {shown(prompts)}; wanted a non-empty list of strings")
    check_whole(1, group_size=group_size, max_new_tokens=max_new_tokens)
    check_temperature(temperature)
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(
            f"top_k: found {shown(top_k)}; wanted None or a whole number of at least 1"
        )
    if top_p is not None and not (isinstance(top_p, int | float) and 0 < top_p <= 1):
        raise ValueError(f"top_p: found {shown(top_p)}; wanted None or 0 < top_p <= 1")
    if not greedy and not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator: found {shown(generator)}; wanted a torch.Generator, or greedy=True"
        )
