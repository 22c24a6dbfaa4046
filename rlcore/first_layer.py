"""The first layer of a Llama with few tokens in its vocabulary, by tables.

What enters that layer is which token stands in a column, and nothing of what stands before it. So a
token has one value wherever it stands, and the score of a query with a key depends on two tokens
and on how many columns they are apart. All of these are computed once for a batch. A new token then
looks its scores up, and adds each value once, times the weights of all columns in which it stands.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Tokens of a vocabulary up to which, and rows from which on, tables are the quicker way.
FEW_TOKENS, MANY_ROWS = 48, 32
LARGEST = 2**20  # scores that a processor's cache holds


def worth_tables(
    vocabulary: int, heads: int, rows: int, longest: int, device: torch.device
) -> bool:
    """Whether tables are the quicker way, and give the same bits each time: on a GPU, sums over
    tokens are taken in no fixed order."""
    few = vocabulary <= FEW_TOKENS and heads * vocabulary**2 * longest <= LARGEST
    return few and rows >= MANY_ROWS and device.type == "cpu"


class FirstLayer:
    """What the new token of each row reads in the first layer."""

    def __init__(
        self, queries: Tensor, keys: Tensor, values: Tensor, turns: Tensor, ids: Tensor
    ) -> None:
        """queries (V, heads, D), keys and values (V, key heads, D) of every token, with the numbers
        that are rotated together side by side; turns (longest, D/2), as `rlcore.llama.angles` gives
        them; ids (start, rows), what has been read."""
        self.vocabulary, self.heads = queries.shape[:2]
        self.longest, self.length = len(turns), len(ids)
        keys, values = (
            part.repeat_interleave(self.heads // part.shape[1], 1) for part in (keys, values)
        )
        asked = _turned(queries * math.log2(math.e), turns[:, None, None])  # in bits
        scores = torch.einsum("tahd,bhd->hatb", asked, _turned(keys, turns[0]))
        self.scores = scores.flatten(1)  # of tokens a and b, t columns apart, (heads, V * t * V)
        self.values = values.permute(1, 2, 0).contiguous()  # (heads, D, V)
        self.ids = ids.new_empty(self.longest, ids.shape[1])
        self.ids[: self.length] = ids

    def keep(self, rows: Tensor) -> None:
        """Leave only these rows."""
        self.ids = self.ids[:, rows]

    def look_back(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """What the new token of each row reads, (rows, heads * D); `tokens` (rows,) are appended.

        mask: None or (rows, columns), added to the scores.
        """
        self.ids[self.length] = tokens
        self.length += 1
        ids = self.ids[: self.length]
        apart = torch.arange(self.length - 1, -1, -1, device=ids.device)[:, None]
        place = ((tokens * self.longest + apart) * self.vocabulary).add_(ids)
        scores = self.scores.gather(1, place.view(1, -1).expand(self.heads, -1))
        scores = scores.view(self.heads, *ids.shape)
        if mask is not None:
            scores.add_(mask.t())
        weights = scores.sub_(scores.amax(1, keepdim=True)).exp2_()
        of_tokens = weights.new_zeros(self.heads, self.vocabulary, len(tokens))
        of_tokens.scatter_add_(1, ids.expand_as(weights), weights)
        read = torch.bmm(self.values, of_tokens)
        return read.div_(weights.sum(1)[:, None]).flatten(0, 1).t()


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)
