"""Decoding with a cache: one token for every row of a batch at a time.

`start_decoding` reads the prompts, each once for its whole group, and gives a decoder; its `logits`
(rows, V) are those of the next token, `advance` appends one token to each row, and `keep` leaves
rows out. A model of transformers is called for each token. For a Llama whose arithmetic is known to
the last detail, the same layers are computed here from the model's own weights: queries, keys and
values in one product, keys and values written to their place instead of appended by copying all
that came before, no mask where there is no padding. That is where most of the time of a compact
model goes.
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
PLAIN_LOOP = (
    400  # numbers in a matrix up to which torch.bmm takes a plain loop instead of a library
)

Attend = Callable[["_Layer", Tensor, Tensor, Tensor], Tensor]
# Queries, keys and values (rows, n, heads, D) of a layer -> what the heads read, (rows, n, d).


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
    """The weights of a layer as decoding uses them; all but `qkv` are the model's own."""

    input_norm: Tensor
    qkv: Tensor  # (query, key and value heads * D, d)
    output: Tensor
    feed_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    keys: Tensor  # (rows, key heads, columns, D)
    values: Tensor


class LlamaDecoder:
    """The layers of a Llama, for one new token per row.

    The scale of the scores is in the query weights.
    """

    def __init__(
        self, model: Any, ids: Tensor, mask: Tensor, group_size: int, max_new_tokens: int
    ) -> None:
        config, body = model.config, model.model
        self.eps = config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = body.layers[0].self_attn.head_dim
        self.embedding, self.norm, self.head = (
            body.embed_tokens.weight,
            body.norm.weight,
            model.lm_head.weight,
        )
        prompts, self.length = ids.shape
        self.longest = self.length + max_new_tokens
        self.turns = angles(model, self.longest)
        room = self.length + min(max_new_tokens, BLOCK)
        self.shape = (prompts * group_size, self.kv_heads, room, self.head_dim)
        self.layers = [self._read(layer) for layer in body.layers]
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

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
            for cache, part in ((layer.keys, keys), (layer.values, values)):
                cache.unflatten(0, (prompts, group_size))[..., : self.length, :] = part[:, None]
            attended = F.scaled_dot_product_attention(
                queries,
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

    def _read(self, layer: Any) -> _Layer:
        attention, feed = layer.self_attn, layer.mlp
        pairs = [
            side_by_side(weight, self.head_dim)
            for weight in (attention.q_proj.weight * attention.scaling, attention.k_proj.weight)
        ]
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=torch.cat([*pairs, attention.v_proj.weight]),
            output=attention.o_proj.weight,
            feed_norm=layer.post_attention_layernorm.weight,
            gate=feed.gate_proj.weight,
            up=feed.up_proj.weight,
            down=feed.down_proj.weight,
            keys=self.embedding.new_empty(self.shape),
            values=self.embedding.new_empty(self.shape),
        )

    def _forward(self, ids: Tensor, turns: Tensor, attend: Attend) -> Tensor:
        """Logits (rows, V) at the last column of ids (rows, n)."""
        rows, columns = ids.shape
        tokens, size = rows * columns, self.embedding.shape[1:]
        queries, rotated = self.heads, self.heads + self.kv_heads
        x = F.embedding(ids, self.embedding).view(tokens, -1)
        for layer in self.layers:
            normed = torch.rms_norm(x, size, layer.input_norm, self.eps)
            qkv = F.linear(normed, layer.qkv).view(rows, columns, -1, self.head_dim)
            pairs = qkv[:, :, :rotated].view(rows, columns, rotated, -1, 2)
            torch.view_as_complex(pairs).mul_(turns)
            heads = qkv[:, :, :queries], qkv[:, :, queries:rotated], qkv[:, :, rotated:]
            x = torch.addmm(x, attend(layer, *heads).view(tokens, -1), layer.output.t())
            normed = torch.rms_norm(x, size, layer.feed_norm, self.eps)
            fed = F.silu(F.linear(normed, layer.gate)).mul_(F.linear(normed, layer.up))
            x = torch.addmm(x, fed, layer.down.t())
        last = x.view(rows, columns, -1)[:, -1]
        return F.linear(torch.rms_norm(last, size, self.norm, self.eps), self.head)

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows in the batch."""
        self._move(rows, self.shape[2])
        if self.mask is not None and self.positions is not None:
            self.mask, self.positions = self.mask[rows], self.positions[rows]

    def _move(self, rows: Tensor | slice, room: int) -> None:
        """The cache of some rows, in tensors of `room` columns."""
        for layer in self.layers:
            for name in ("keys", "values"):
                kept = getattr(layer, name)[:, :, : self.length][rows]
                self.shape = (len(kept), self.kv_heads, room, self.head_dim)
                moved = kept.new_empty(self.shape)
                moved[:, :, : self.length] = kept
                setattr(layer, name, moved)

    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row; `logits` (rows, V) are then those of the next one."""
        here, room = self.length, self.shape[2]
        if here == room:
            self._move(slice(None), min(room + max(BLOCK, room // 2), self.longest))
        self.length += 1
        turns, mask = self.turns[here], None
        if self.mask is not None and self.positions is not None:
            turns = self.turns[self.positions][:, None, None]
            mask = self.mask[:, None, None, : self.length]
            self.positions = self.positions + 1

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            layer.keys[:, :, here] = keys[:, 0]
            layer.values[:, :, here] = values[:, 0]
            seen = layer.keys[:, :, : self.length], layer.values[:, :, : self.length]
            return _look_back(queries, *seen, mask)

        self.logits = self._forward(tokens[:, None], turns, attend)


def _look_back(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of one token per row: queries (rows, 1, heads, D), keys and values (rows, key
    heads, S, D), mask (rows, 1, 1, S) or None -> (rows * key heads, heads / key heads, D).

    torch's attention calls a product of matrices for each row and head; for a single query those
    calls cost more than what they compute. Here they are made many at once.
    """
    rows, kv_heads, columns, size = keys.shape
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    queries = queries.reshape(rows * kv_heads, -1, size)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if mask is not None:
        scores.view(rows, kv_heads, -1, columns).add_(mask)
    if columns < WIDE:  # torch goes through rows that short number by number
        weights = scores.view(-1, columns).t().contiguous().softmax(0).t().view(scores.shape)
    else:
        weights = scores.softmax(-1)
    if queries.shape[1] == 1 and columns * size <= PLAIN_LOOP:
        return (weights.transpose(1, 2) * values).sum(1)
    return torch.bmm(weights, values)
