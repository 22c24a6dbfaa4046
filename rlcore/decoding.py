"""Decoding with a cache: one token for every row of a batch at a time.

`start_decoding` reads the prompts, each once for its whole group, and gives a decoder; its `logits`
(rows, V) are those of the next token, `advance` appends one token to each row, and `keep` leaves
rows out. A model of transformers is called for each token. For a Llama whose arithmetic is known to
the last detail, the same layers are computed here from the model's own weights, by fewer calls:
queries, keys and values in one product, the weights of a norm in those that follow it, keys and
values written to their place (`kv_cache.py`) instead of appended by copying all that came before,
no mask where there is no padding. That is where most of the time of a compact model goes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.kv_cache import ColumnCache, RowCache, Sizes, kv_cache
from rlcore.llama import angles, is_plain_llama, side_by_side
from rlcore.models import padding

Attend = Callable[[int, Tensor], Tensor]
# Number of a layer, its normed input (tokens, d) -> what its heads read, (tokens, heads * D).


def start_decoding(
    model: Any, ids: Tensor, mask: Tensor, group_size: int, max_new_tokens: int
) -> LlamaDecoder | ModelDecoder:
    """A decoder whose rows are `group_size` copies of each prompt (N, P), padded on the left.

    The model must be in evaluation mode, and gradients off.
    """
    if is_plain_llama(model):
        return LlamaDecoder(model, ids, mask, group_size, max_new_tokens)
    return ModelDecoder(model, ids, mask, group_size)


class ModelDecoder:
    """One call of a model of transformers per token."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, group_size: int) -> None:
        from transformers import DynamicCache

        self.model, self.cache = model, DynamicCache()
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.mask: Tensor | None = None
        left = padding(mask)
        out = self._forward(ids, left)
        self.cache.batch_repeat_interleave(group_size)
        self.logits = out.repeat_interleave(group_size, 0)
        self.positions = mask.sum(1).repeat_interleave(group_size, 0)
        if left:
            self.mask = mask.repeat_interleave(group_size, 0)

    def _forward(self, ids: Tensor, places: dict[str, Tensor]) -> Tensor:
        inputs = {"input_ids": ids, "use_cache": True, self.cache_name: self.cache, **places}
        logits: Tensor = self.model(**inputs, logits_to_keep=1).logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows in the batch."""
        self.cache.batch_select_indices(rows)
        self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]

    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row; `logits` (rows, V) are then those of the next one."""
        places = {"position_ids": self.positions[:, None]}
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
            places["attention_mask"] = self.mask
        self.logits = self._forward(tokens[:, None], places)
        self.positions = self.positions + 1


@dataclass
class _Layer:
    """Copies of a layer's weights, (inputs, outputs); those of a norm are in what follows it."""

    qkv: Tensor  # (d, query, key and value heads * D)
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class LlamaDecoder:
    """The layers of a Llama, for one new token per row.

    The scale of the scores is in the query weights.
    """

    def __init__(
        self, model: Any, ids: Tensor, mask: Tensor, group_size: int, max_new_tokens: int
    ) -> None:
        config, body = model.config, model.model
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = body.layers[0].self_attn.head_dim
        self.embedding = body.embed_tokens.weight
        self.least_norm = self.embedding.new_tensor(
            (self.embedding.shape[1] * config.rms_norm_eps) ** 0.5
        )
        self.head = self._after_norm(model.lm_head.weight, body.norm.weight)
        prompts, start = ids.shape
        longest = start + max_new_tokens
        self.turns = angles(model, longest)
        self.layers = [self._read(layer) for layer in body.layers]
        self.cache = kv_cache(
            Sizes(
                layers=len(self.layers),
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                prompts=prompts,
                group=group_size,
                start=start,
                longest=longest,
            ),
            like=self.embedding,
        )
        self.in_bits = self.embedding.new_ones(self.heads + self.kv_heads, 1, 1)
        self.in_bits[: self.heads] = math.log2(math.e)
        self.positions: Tensor | None = None  # (rows,), where rows differ
        self.mask: Tensor | None = None  # (rows, columns), added to the scores
        turns, seen = self.turns[:start, None], None
        if padding(mask):
            real = mask.bool()
            turns = self.turns[(mask.cumsum(1) - 1).clamp(min=0)][:, :, None]
            # A padded slot sees itself: what it computes is never looked at, but must not be NaN.
            own = torch.eye(start, dtype=torch.bool, device=ids.device)
            seen = ((real[:, None] | own) & own.new_ones(own.shape).tril())[:, None]
            self.positions = mask.sum(1).repeat_interleave(group_size, 0)
            hidden = F.pad(~real, (0, max_new_tokens)).repeat_interleave(group_size, 0)
            self.mask = torch.zeros_like(hidden, dtype=self.embedding.dtype)
            self.mask.masked_fill_(hidden, -torch.inf)

        def attend(number: int, normed: Tensor) -> Tensor:
            queries, both = self._project(number, normed, len(ids), turns)
            self.cache.fill(number, both)
            keys, values = both.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys,
                values,
                attn_mask=seen,
                is_causal=seen is None,
                scale=1.0,
                enable_gqa=self.heads != self.kv_heads,
            )
            return attended.transpose(1, 2).reshape(ids.numel(), -1)

        logits = self._forward(ids, attend)
        self.logits = logits.repeat_interleave(group_size, 0)

    def _read(self, layer: Any) -> _Layer:
        attention, feed = layer.self_attn, layer.mlp
        pairs = [
            side_by_side(weight, self.head_dim)
            for weight in (attention.q_proj.weight * attention.scaling, attention.k_proj.weight)
        ]
        before, between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return _Layer(
            qkv=self._after_norm(torch.cat([*pairs, attention.v_proj.weight]), before),
            output=attention.o_proj.weight.t().contiguous(),
            gate=self._after_norm(feed.gate_proj.weight, between),
            up=self._after_norm(feed.up_proj.weight, between),
            down=feed.down_proj.weight.t().contiguous(),
        )

    def _after_norm(self, weight: Tensor, norm: Tensor) -> Tensor:
        """A weight (outputs, d) that takes in what `_normed` leaves out."""
        return (weight * (norm * len(norm) ** 0.5)).t().contiguous()

    def _normed(self, x: Tensor) -> Tensor:
        """x / sqrt(|x|^2 + d eps): what a norm gives, but for its weights and sqrt(d)."""
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.least_norm)

    def _forward(self, ids: Tensor, attend: Attend) -> Tensor:
        """Logits (rows, V) at the last column of ids (rows, n)."""
        x = F.embedding(ids, self.embedding).flatten(0, 1)
        for number, layer in enumerate(self.layers):
            x.addmm_(attend(number, self._normed(x)), layer.output)
            normed = self._normed(x)
            gate, up = torch.mm(normed, layer.gate), torch.mm(normed, layer.up)
            x.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down)
        last = x.view(*ids.shape, -1)[:, -1]
        return torch.mm(self._normed(last), self.head)

    def _project(
        self, number: int, normed: Tensor, rows: int, turns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries (rows, n, heads, D), and keys and values (rows, n, 2, key heads, D)."""
        rotated = self.heads + self.kv_heads
        qkv = torch.mm(normed, self.layers[number].qkv).view(
            rows, -1, rotated + self.kv_heads, self.head_dim
        )
        pairs = qkv[:, :, :rotated].unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs).mul_(turns)
        return qkv[:, :, : self.heads], qkv[:, :, self.heads :].unflatten(2, (2, -1))

    def _project_columns(
        self, number: int, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries (heads, D, rows), keys and values (key heads, D, rows), of one token per row."""
        qkv = torch.mm(self.layers[number].qkv.t(), normed.t())
        heads = qkv.view(-1, self.head_dim, len(normed))
        rotated = heads[: -self.kv_heads]
        real, imaginary = rotated.unflatten(1, (-1, 2)).unbind(2)
        turned = torch.empty_like(rotated)
        to_real, to_imaginary = turned.unflatten(1, (-1, 2)).unbind(2)
        torch.mul(real, cos, out=to_real).addcmul_(imaginary, sin, value=-1)
        torch.mul(imaginary, cos, out=to_imaginary).addcmul_(real, sin)
        return turned[: self.heads], turned[self.heads :], heads[-self.kv_heads :]

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows in the batch."""
        self.cache.keep(rows)
        if self.mask is not None and self.positions is not None:
            self.mask, self.positions = self.mask[rows], self.positions[rows]

    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row; `logits` (rows, V) are then those of the next one."""
        turns, mask = self.turns[self.cache.length], None
        self.cache.grow()
        if self.mask is not None and self.positions is not None:
            turns = self.turns[self.positions]
            mask = self.mask[:, : self.cache.length]
            self.positions = self.positions + 1
        if isinstance(self.cache, ColumnCache):
            attend = self._attend_columns(self.cache, turns, mask)
        else:
            attend = self._attend_rows(self.cache, turns, mask)
        self.logits = self._forward(tokens[:, None], attend)

    def _attend_rows(self, cache: RowCache, turns: Tensor, mask: Tensor | None) -> Attend:
        turns = turns.view(-1, 1, 1, turns.shape[-1])

        def attend(number: int, normed: Tensor) -> Tensor:
            queries, both = self._project(number, normed, len(normed), turns)
            return cache.look_back(number, queries, both, mask)

        return attend

    def _attend_columns(self, cache: ColumnCache, turns: Tensor, mask: Tensor | None) -> Attend:
        # (query and key heads, D/2, rows or 1); those of a query also make its scores bits.
        turns = self.in_bits * turns.view(-1, turns.shape[-1]).t()
        cos, sin = turns.real.contiguous(), turns.imag.contiguous()

        def attend(number: int, normed: Tensor) -> Tensor:
            queries, keys, values = self._project_columns(number, normed, cos, sin)
            return cache.look_back(number, queries, keys, values, mask)

        return attend
