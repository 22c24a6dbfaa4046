"""Decoding with a cache: one token for every row of a batch at a time.

`start_decoding` reads the prompts, each once for its whole group, and gives a decoder; its `logits`
(rows, V) are those of the next token, `advance` appends one token to each row, and `keep` leaves
rows out. A model of transformers is called for each token. For a Llama whose arithmetic is known to
the last detail, the same layers are computed here from the model's own weights, by fewer calls:
queries, keys and values in one product, the weights of a norm in those that follow it, keys and
values written to their place instead of appended by copying all that came before, no mask where
there is no padding. That is where most of the time of a compact model goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.llama import angles, is_plain_llama, side_by_side
from rlcore.models import padding

BLOCK = 64  # columns by which a cache grows at least
WIDE = 16  # columns that a processor's softmax takes at once
PLAIN_LOOP = 400  # numbers in a matrix below which torch.bmm takes a plain loop, not a library

Attend = Callable[["_Layer", Tensor, Tensor], Tensor]
# Queries (rows, n, heads, D), keys and values (rows, n, 2, key heads, D) of a layer -> what the
# heads read, (rows, n, d).


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
    cache: Tensor  # (2, rows, key heads, columns, D), keys and values


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
        prompts, self.length = ids.shape
        self.longest = self.length + max_new_tokens
        self.turns = angles(model, self.longest)
        # Fewer columns than these take longer: so many are looked at, the last ones with weight 0.
        self.least = max(WIDE, -(-PLAIN_LOOP // self.head_dim))
        self.room = max(self.length + min(max_new_tokens, BLOCK), self.least)
        # In one tensor, whose memory a small run gets back at its next call without new pages.
        caches = self.embedding.new_empty(
            len(body.layers), 2, prompts * group_size, self.kv_heads, self.room, self.head_dim
        )
        caches[:, 1, ..., self.length : self.least, :] = 0  # 0 times NaN would be NaN
        self.layers = [self._read(*pair) for pair in zip(body.layers, caches, strict=True)]
        self.positions: Tensor | None = None  # (rows,), where rows differ
        self.mask: Tensor | None = None  # (rows, columns), added to the scores
        turns, seen = self.turns[: self.length, None], None
        if padding(mask):
            real = mask.bool()
            turns = self.turns[(mask.cumsum(1) - 1).clamp(min=0)][:, :, None]
            # A padded slot sees itself: what it computes is never looked at, but must not be NaN.
            own = torch.eye(self.length, dtype=torch.bool, device=ids.device)
            seen = ((real[:, None] | own) & own.new_ones(own.shape).tril())[:, None]
            self.positions = mask.sum(1).repeat_interleave(group_size, 0)
            hidden = F.pad(~real, (0, max_new_tokens)).repeat_interleave(group_size, 0)
            self.mask = torch.zeros_like(hidden, dtype=self.embedding.dtype)
            self.mask.masked_fill_(hidden, -torch.inf)

        def attend(layer: _Layer, queries: Tensor, both: Tensor) -> Tensor:
            both = both.permute(2, 0, 3, 1, 4)
            copies = layer.cache.unflatten(1, (prompts, group_size))
            copies[..., : self.length, :] = both[:, :, None]
            keys, values = both
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys,
                values,
                attn_mask=seen,
                is_causal=seen is None,
                scale=1.0,
                enable_gqa=self.heads != self.kv_heads,
            )
            return attended.transpose(1, 2).reshape(*ids.shape, -1)

        logits = self._forward(ids, turns, attend)
        self.logits = logits.repeat_interleave(group_size, 0)

    def _read(self, layer: Any, cache: Tensor) -> _Layer:
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
            cache=cache,
        )

    def _after_norm(self, weight: Tensor, norm: Tensor) -> Tensor:
        """A weight (outputs, d) that takes in what `_normed` leaves out."""
        return (weight * (norm * len(norm) ** 0.5)).t().contiguous()

    def _normed(self, x: Tensor) -> Tensor:
        """x / sqrt(|x|^2 + d eps): what a norm gives, but for its weights and sqrt(d)."""
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.least_norm)

    def _forward(self, ids: Tensor, turns: Tensor, attend: Attend) -> Tensor:
        """Logits (rows, V) at the last column of ids (rows, n)."""
        rows, columns = ids.shape
        tokens = rows * columns
        queries, rotated = self.heads, self.heads + self.kv_heads
        x = F.embedding(ids, self.embedding).view(tokens, -1)
        for layer in self.layers:
            qkv = torch.mm(self._normed(x), layer.qkv).view(rows, columns, -1, self.head_dim)
            pairs = qkv[:, :, :rotated].view(rows, columns, rotated, -1, 2)
            torch.view_as_complex(pairs).mul_(turns)
            both = qkv[:, :, queries:].unflatten(2, (2, -1))
            x.addmm_(attend(layer, qkv[:, :, :queries], both).view(tokens, -1), layer.output)
            normed = self._normed(x)
            gate, up = torch.mm(normed, layer.gate), torch.mm(normed, layer.up)
            x.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down)
        last = x.view(rows, columns, -1)[:, -1]
        return torch.mm(self._normed(last), self.head)

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows in the batch."""
        self._move(rows, self.room)
        if self.mask is not None and self.positions is not None:
            self.mask, self.positions = self.mask[rows], self.positions[rows]

    def _move(self, rows: Tensor | slice, room: int) -> None:
        """The cache of some rows, in tensors of `room` columns."""
        self.room, columns = room, max(self.length, self.least)
        for layer in self.layers:
            kept = layer.cache[:, :, :, :columns][:, rows]
            layer.cache = kept.new_empty(*kept.shape[:3], room, self.head_dim)
            layer.cache[:, :, :, :columns] = kept

    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row; `logits` (rows, V) are then those of the next one."""
        here = self.length
        if here == self.room:
            self._move(slice(None), min(here + max(BLOCK, here // 2), self.longest))
        self.length += 1
        columns = max(self.length, self.least)
        turns, mask = self.turns[here], None
        if self.mask is not None and self.positions is not None:
            turns = self.turns[self.positions][:, None, None]
            mask = self.mask[:, None, None, : self.length]
            self.positions = self.positions + 1

        def attend(layer: _Layer, queries: Tensor, both: Tensor) -> Tensor:
            layer.cache[:, :, :, here] = both[:, 0].transpose(0, 1)
            return _look_back(queries, layer.cache[:, :, :, :columns], self.length, mask)

        self.logits = self._forward(tokens[:, None], turns, attend)


def _look_back(queries: Tensor, cache: Tensor, length: int, mask: Tensor | None) -> Tensor:
    """Attention of one token per row: queries (rows, 1, heads, D), keys and values (2, rows, key
    heads, columns, D), of which the first `length` columns count, mask (rows, 1, 1, length) or
    None -> (rows * key heads, heads / key heads, D).

    torch's attention calls a product of matrices for each row and head; for a single query those
    calls cost more than what they compute. Here they are made many at once.
    """
    _, rows, kv_heads, columns, size = cache.shape
    keys, values = cache.flatten(1, 2)
    scores = torch.bmm(queries.reshape(rows * kv_heads, -1, size), keys.transpose(1, 2))
    if length < columns:
        scores[:, :, length:] = -torch.inf
    if mask is not None:
        scores.view(rows, kv_heads, -1, columns)[..., :length].add_(mask)
    return torch.bmm(scores.softmax(-1), values)
