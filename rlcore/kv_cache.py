"""Keys and values of the tokens that a decoder has read, and how a new token of each row sees them.

Two layouts. `RowCache` keeps a matrix for each row and head, and multiplies all of them by one
call; a processor's library takes some time for each, however small it is. `ColumnCache` keeps the
rows side by side: a number of a head is next to the same number of the other rows, and all is done
by sums of products of such lines. That goes through memory more often, and is the quicker way while
little has been read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Columns up to which, and rows from which on, rows are kept side by side: where the two layouts
# were as quick as each other, with head dimensions 16 and 32 on a processor with AVX2.
FEW, MANY = 48, 96
BLOCK = 64  # columns by which a `RowCache` grows at least
WIDE = 16  # columns that a processor's softmax takes at once
PLAIN_LOOP = 400  # numbers in a matrix below which torch.bmm takes a plain loop, not a library


@dataclass(frozen=True)
class Sizes:
    """Of a cache: its layers and their key heads, each of so many numbers; prompts, responses to
    each, tokens of a prompt, and of a whole row at most."""

    layers: int
    kv_heads: int
    head_dim: int
    prompts: int
    group: int
    start: int
    longest: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group


def kv_cache(sizes: Sizes, like: Tensor) -> RowCache | ColumnCache:
    """The quicker cache, in the dtype and on the device of `like`."""
    side_by_side = sizes.longest <= FEW and sizes.rows >= MANY and like.device.type == "cpu"
    return ColumnCache(sizes, like) if side_by_side else RowCache(sizes, like)


class ColumnCache:
    """Of each layer (columns, 2, key heads, D, rows)."""

    def __init__(self, sizes: Sizes, like: Tensor) -> None:
        self.sizes, self.length = sizes, sizes.start
        self.products: Tensor | None = None  # room for them: new memory takes longer than the sums
        # In one tensor, whose memory a small run gets back at its next call without new pages.
        self.layers = list(
            like.new_empty(
                sizes.layers, sizes.longest, 2, sizes.kv_heads, sizes.head_dim, sizes.rows
            )
        )

    def fill(self, layer: int, both: Tensor) -> None:
        """The keys and values (prompts, start, 2, key heads, D) of the prompts, for all rows."""
        copies = self.layers[layer].unflatten(-1, (self.sizes.prompts, self.sizes.group))
        copies[: self.length] = both.permute(1, 2, 3, 4, 0)[..., None]

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows."""
        self.products = None
        for number, layer in enumerate(self.layers):
            kept = layer.new_empty(*layer.shape[:-1], len(rows))
            torch.index_select(layer[: self.length], -1, rows, out=kept[: self.length])
            self.layers[number] = kept

    def grow(self) -> None:
        """Make room for one more column."""
        self.length += 1

    def newest(self, layer: int) -> Tensor:
        """Where keys and values of the new tokens are written, (2 * key heads * D, rows)."""
        return self.layers[layer][self.length - 1].flatten(0, 2)

    def look_back(self, layer: int, queries: Tensor, mask: Tensor | None) -> Tensor:
        """What the new token of each row reads, (rows, heads * D).

        queries (heads * D, rows) are its own; a query times a key is a score in bits: a weight is 2
        to the power of it. mask: None or (rows, columns), added to the scores.
        """
        keys, values = self.layers[layer][: self.length, :, :, None].unbind(1)
        queries = queries.view(self.sizes.kv_heads, -1, *keys.shape[-2:])
        if self.products is None:
            self.products = queries.new_empty(self.sizes.longest, *queries.shape)
        products = self.products[: self.length]
        scores = torch.mul(keys, queries, out=products).sum(3)
        if mask is not None:
            scores.add_(mask.t()[:, None, None])
        weights = scores.sub_(scores.amax(0)).exp2_()
        read = torch.mul(values, weights[:, :, :, None], out=products).sum(0)
        return read.div_(weights.sum(0)[:, :, None]).flatten(0, 2).t()


class RowCache:
    """Of each layer (2, rows, key heads, columns, D)."""

    def __init__(self, sizes: Sizes, like: Tensor) -> None:
        self.sizes, self.length = sizes, sizes.start
        # Fewer columns than these take longer: so many are looked at, the last ones with weight 0.
        self.least = max(WIDE, -(-PLAIN_LOOP // sizes.head_dim))
        self.room = max(min(sizes.longest, sizes.start + BLOCK), self.least)
        # In one tensor, whose memory a small run gets back at its next call without new pages.
        caches = like.new_empty(
            sizes.layers, 2, sizes.rows, sizes.kv_heads, self.room, sizes.head_dim
        )
        caches[:, 1, ..., self.length : self.least, :] = 0  # 0 times NaN would be NaN
        self.layers = list(caches)

    def fill(self, layer: int, both: Tensor) -> None:
        """As `ColumnCache.fill`."""
        copies = self.layers[layer].unflatten(1, (self.sizes.prompts, self.sizes.group))
        copies[..., : self.length, :] = both.permute(2, 0, 3, 1, 4)[:, :, None]

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows."""
        self._move(rows, self.room)

    def _move(self, rows: Tensor | slice, room: int) -> None:
        """The cache of some rows, in tensors of `room` columns."""
        self.room, columns = room, max(self.length, self.least)
        for number, layer in enumerate(self.layers):
            kept = layer[:, :, :, :columns][:, rows]
            self.layers[number] = kept.new_empty(*kept.shape[:3], room, self.sizes.head_dim)
            self.layers[number][:, :, :, :columns] = kept

    def grow(self) -> None:
        """Make room for one more column."""
        if self.length == self.room:
            more = max(BLOCK, self.length // 2)
            self._move(slice(None), min(self.length + more, self.sizes.longest))
        self.length += 1

    def look_back(self, layer: int, queries: Tensor, both: Tensor, mask: Tensor | None) -> Tensor:
        """What the new token of each row reads, (rows, heads * D).

        queries (rows, 1, heads, D), keys and values (rows, 1, 2, key heads, D) are its own, the
        last two are appended. mask: None or (rows, columns), added to the scores.

        torch's attention calls a product of matrices for each row and head; for a single query
        those calls cost more than what they compute. Here they are made many at once.
        """
        cache, rows = self.layers[layer], len(queries)
        cache[:, :, :, self.length - 1] = both[:, 0].transpose(0, 1)
        keys, values = cache[:, :, :, : max(self.length, self.least)].flatten(1, 2)
        asked = queries.reshape(len(keys), -1, self.sizes.head_dim)
        scores = torch.bmm(asked, keys.transpose(1, 2))
        if self.length < self.least:
            scores[:, :, self.length :] = -torch.inf
        if mask is not None:
            parts = scores.view(rows, self.sizes.kv_heads, -1, scores.shape[-1])
            parts[..., : self.length].add_(mask[:, None, None])
        return torch.bmm(scores.softmax(-1), values).view(rows, -1)
