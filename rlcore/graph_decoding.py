"""Decoding on a GPU by one recorded step: a CUDA graph.

A GPU computes a token of a compact model sooner than Python starts the kernels for it, one by one.
A graph starts all of them by one call; for that every tensor must keep its place and its shape from
token to token. So the cache has room for the longest response from the start, and finished rows
stay in the batch. Recording takes about as long as a few tokens, so each call of `sample` records
its own: weights that were trained, other prompts and another batch size ask for nothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rlcore.checks import shown
from rlcore.decoding import ModelDecoder
from rlcore.llama import STATIC_ROPE

WARM_UP = 2  # steps before the recording, in which libraries choose their kernels and take memory


def check_cuda_graph(cuda_graph: Any, model: Any) -> None:
    """ValueError for what is not True or False, and for True with a model that is not on a CUDA
    device or cannot have its step recorded."""
    if not isinstance(cuda_graph, bool):
        raise ValueError(f"cuda_graph: found {shown(cuda_graph)}; wanted True or False")
    if not cuda_graph:
        return
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ValueError(
            f"cuda_graph: found a model on {device}; wanted one on a CUDA device, or False"
        )
    check_recordable(model)


def check_recordable(model: Any) -> None:
    """ValueError for a model whose step is not the same for every token: angles that depend on the
    length, a window that slides over the cache."""
    from transformers.cache_utils import StaticCache, StaticLayer

    angles = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if angles not in STATIC_ROPE:
        raise ValueError(
            f"cuda_graph: found rotary angles of type {angles!r}; wanted ones that do not depend "
            "on the length, or False"
        )
    for layer in StaticCache(config=model.config, max_cache_len=1).layers:
        if type(layer) is not StaticLayer:
            raise ValueError(
                f"cuda_graph: found a cache of {type(layer).__name__}; wanted a model in which "
                "every token sees all before it, or False"
            )


class GraphDecoder:
    """A decoder as `start_decoding` gives it, but without `keep`. `logits` are overwritten by the
    next token's.

    On the CPU the same step is made without a graph (for tests: it costs more than another
    decoder's). ValueError as `check_recordable`.
    """

    def __init__(
        self, model: Any, ids: Tensor, mask: Tensor, group_size: int, max_new_tokens: int
    ) -> None:
        from transformers import StaticCache

        check_recordable(model)
        self.length = ids.shape[1]
        room = self.length + max_new_tokens
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.layers = cast(list[Any], self.cache.layers)
        start: Any = ModelDecoder(model, ids, mask, group_size)
        for read, layer in zip(start.cache.layers, self.layers, strict=True):
            layer.lazy_initialization(read.keys, read.values)
            layer.keys[:, :, : self.length] = read.keys
            layer.values[:, :, : self.length] = read.values
        self._go_to(self.length)
        self.model, self.cache_name = model, start.cache_name
        self.logits, self.positions = start.logits, start.positions[:, None]
        rows = len(self.logits)
        self.tokens = self.positions.new_zeros(rows, 1)
        seen = torch.zeros(rows, room, dtype=torch.bool, device=ids.device)
        seen[:, : self.length] = mask.bool().repeat_interleave(group_size, 0)
        # Four dimensions, in numbers: a mask that every model of transformers takes as it is.
        self.mask = torch.zeros(rows, 1, 1, room, dtype=model.dtype, device=ids.device)
        self.mask.masked_fill_(~seen[:, None, None], torch.finfo(model.dtype).min)
        self.graph: Any = None  # a torch.cuda.CUDAGraph

    def advance(self, tokens: Tensor) -> None:
        """Append one token to each row; `logits` (rows, V) are then those of the next one."""
        self.tokens.copy_(tokens[:, None])
        self.mask[..., self.length] = 0.0
        if tokens.is_cuda:
            if self.graph is None:
                self._record()
            self.graph.replay()
        else:
            self._step()
        self.length += 1
        self.positions.add_(1)

    def _step(self) -> None:
        inputs = {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "attention_mask": self.mask,
            "use_cache": True,
            self.cache_name: self.cache,
        }
        self.logits = self.model(**inputs, logits_to_keep=1).logits[:, -1]

    def _go_to(self, length: int) -> None:
        """Where the cache takes the next token."""
        for layer in self.layers:
            layer.cumulative_length.fill_(length)

    def _record(self) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self._step()
                self._go_to(self.length)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # records, computes nothing
            self._step()
