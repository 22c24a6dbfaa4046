"""Decoding with a cache: one token for every row of a batch at a time.

`start_decoding` reads the prompts, each once for its whole group, and gives a decoder; its `logits`
(rows, V) are those of the next token, `advance` appends one token to each row, and `keep` leaves
rows out. A model of transformers is called for each token. For a Llama whose arithmetic is known to
the last detail, the same layers are computed here from the model's own weights, by fewer calls:
queries, keys and values in one product, the weights of a norm in those that follow it, keys and
values written to their place (`kv_cache.py`) instead of appended by copying all that came before,
no mask where there is no padding, and the first layer of a small vocabulary from tables
(`first_layer.py`). That is where most of the time of a compact model goes.

There a token is rotated by the number of its column. Its position in the row is another, by the
padding before it; but scores depend on distances alone, and those are the same.
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

from rlcore.first_layer import FirstLayer, worth_tables
from rlcore.kv_cache import ColumnCache, RowCache, Sizes, kv_cache
from rlcore.llama import angles, is_plain_llama, side_by_side
from rlcore.models import padding

Attend = Callable[[int, Tensor], Tensor]
# Number of a layer, what enters it (tokens, d) -> what its heads read, (tokens, heads * D).


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
        self.tables = self._read_tables(ids, group_size)
        self.kept = 0 if self.tables is None else 1  # the first layer with a cache
        self.cache = kv_cache(
            Sizes(
                layers=len(self.layers) - self.kept,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                prompts=prompts,
                group=group_size,
                start=start,
                longest=longest,
            ),
            like=self.embedding,
        )
        if isinstance(self.cache, ColumnCache):
            self.turned = _Turned(self)
        self.mask: Tensor | None = None  # (rows, columns), added to the scores
        turns, seen = self.turns[:start, None], None
        if padding(mask):
            real = mask.bool()
            # A padded slot sees itself: what it computes is never looked at, but must not be NaN.
            own = torch.eye(start, dtype=torch.bool, device=ids.device)
            seen = ((real[:, None] | own) & own.new_ones(own.shape).tril())[:, None]
            hidden = F.pad(~real, (0, max_new_tokens)).repeat_interleave(group_size, 0)
            self.mask = torch.zeros_like(hidden, dtype=self.embedding.dtype)
            self.mask.masked_fill_(hidden, -torch.inf)

        def attend(number: int, x: Tensor) -> Tensor:
            queries, both = self._project(number, x, len(ids), turns)
            if number >= self.kept:
                self.cache.fill(number - self.kept, both)
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

    def _read_tables(self, ids: Tensor, group_size: int) -> FirstLayer | None:
        rows, longest = len(ids) * group_size, len(self.turns)
        if not worth_tables(len(self.embedding), self.heads, rows, longest, ids.device):
            return None
        qkv = torch.mm(self._normed(self.embedding), self.layers[0].qkv)
        if not bool(qkv.isfinite().all()):  # 0 times NaN: it would be in what every row reads
            return None
        heads = qkv.unflatten(1, (-1, self.head_dim))
        queries, keys, values = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        read = ids.t().repeat_interleave(group_size, 1)
        return FirstLayer(queries, keys, values, self.turns, read)

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
            x.addmm_(attend(number, x), layer.output)
            normed = self._normed(x)
            gate, up = torch.mm(normed, layer.gate), torch.mm(normed, layer.up)
            x.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down)
        last = x.view(*ids.shape, -1)[:, -1]
        return torch.mm(self._normed(last), self.head)

    def _project(self, number: int, x: Tensor, rows: int, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (rows, n, heads, D), and keys and values (rows, n, 2, key heads, D)."""
        rotated = self.heads + self.kv_heads
        qkv = torch.mm(self._normed(x), self.layers[number].qkv).view(
            rows, -1, rotated + self.kv_heads, self.head_dim
        )
        pairs = qkv[:, :, :rotated].unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs).mul_(turns)
        return qkv[:, :, : self.heads], qkv[:, :, self.heads :].unflatten(2, (2, -1))

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows in the batch."""
        self.cache.keep(rows)
        if self.tables is not None:
            self.tables.keep(rows)
        self.mask = None if self.mask is None else self.mask[rows]

    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row; `logits` (rows, V) are then those of the next one."""
        column = self.cache.length
        self.cache.grow()
        mask = None if self.mask is None else self.mask[:, : self.cache.length]
        if isinstance(self.cache, ColumnCache):
            from_cache = self._attend_columns(self.cache, column, mask)
        else:
            from_cache = self._attend_rows(self.cache, column, mask)

        def attend(number: int, x: Tensor) -> Tensor:
            if number == 0 and self.tables is not None:
                return self.tables.look_back(tokens, mask)
            return from_cache(number, x)

        self.logits = self._forward(tokens[:, None], attend)

    def _attend_rows(self, cache: RowCache, column: int, mask: Tensor | None) -> Attend:
        turns = self.turns[column]

        def attend(number: int, x: Tensor) -> Tensor:
            queries, both = self._project(number, x, len(x), turns)
            return cache.look_back(number - self.kept, queries, both, mask)

        return attend

    def _attend_columns(self, cache: ColumnCache, column: int, mask: Tensor | None) -> Attend:
        turned = self.turned
        turned.turn(column)

        def attend(number: int, x: Tensor) -> Tensor:
            normed, place = self._normed(x).t(), number - self.kept
            torch.mm(turned.both[number], normed, out=cache.newest(place))
            return cache.look_back(place, torch.mm(turned.queries[number], normed), mask)

        return attend


class _Turned:
    """Weights (outputs, d) of queries in bits, and of keys and values, turned to a column.

    All rows are at the same column, and a weight has fewer numbers than what it gives for many
    rows.
    """

    def __init__(self, decoder: LlamaDecoder) -> None:
        rotated = decoder.heads + decoder.kv_heads
        of_queries = decoder.heads * decoder.head_dim
        straight = torch.stack([layer.qkv.t() for layer in decoder.layers])
        straight[:, :of_queries].mul_(math.log2(math.e))
        turned = straight.clone()
        self.queries, self.both = turned[:, :of_queries].unbind(), turned[:, of_queries:].unbind()
        pairs = (rotated * decoder.head_dim // 2, 2)
        self.straight, self.turned = (
            weights[:, : rotated * decoder.head_dim].unflatten(1, pairs).unbind(2)
            for weights in (straight, turned)
        )
        turns = decoder.turns.repeat(1, rotated)[:, :, None]
        self.cos, self.sin = turns.real.contiguous(), turns.imag.contiguous()

    def turn(self, column: int) -> None:
        """Turn the weights to this column."""
        (real, imaginary), cos, sin = self.straight, self.cos[column], self.sin[column]
        torch.mul(real, cos, out=self.turned[0]).addcmul_(imaginary, sin, value=-1)
        torch.mul(imaginary, cos, out=self.turned[1]).addcmul_(real, sin)
