"""Compact causal language models and their tokenizers, in the format of `transformers`.

A compact model is a Llama of the published architecture, only small. It is saved by
`save_pretrained` and read back by `AutoModelForCausalLM` and `AutoTokenizer`, so whatever works on
a large model works on it. `transformers` takes seconds to import and is imported on first use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcore.checks import brief, check_seed
from rlcore.devices import choose_device, choose_dtype

PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Size:
    """The shape of a compact Llama; the input and output embeddings are one matrix."""

    hidden_size: int
    layers: int
    heads: int
    feed_forward: int


SIZES = {
    "nano": Size(hidden_size=32, layers=1, heads=2, feed_forward=64),
    "tiny": Size(hidden_size=64, layers=2, heads=4, feed_forward=256),
    "small": Size(hidden_size=128, layers=4, heads=4, feed_forward=512),
    "medium": Size(hidden_size=256, layers=6, heads=8, feed_forward=1024),
}


def build_tokenizer(symbols: str) -> Any:
    """A tokenizer with one token per character of `symbols`, and `<pad>` and `<eos>`.

    `<pad>` (id 0) and `<eos>` (id 1) differ: where they are one token, a mask made from token ids
    hides the end of the answer too, and the model never learns to stop. Padding is on the left, as
    sampling needs it. A character outside `symbols` is an error when it is encoded, never a silent
    `<unk>`.

    Raises ValueError for no symbols or a repeated one.
    """
    if not isinstance(symbols, str) or not symbols:
        raise ValueError(f"symbols: found {symbols!r}; wanted a non-empty string")
    repeated = sorted({s for s in symbols if symbols.count(s) > 1})
    if repeated:
        raise ValueError(f"symbols: {repeated} occur more than once in {symbols!r}")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *symbols])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(
    size: str,
    tokenizer: Any,
    *,
    seed: int,
    max_length: int = 64,
    dropout: float = 0.0,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> Any:
    """A Llama of a named size with random weights, the same ones for the same seed.

    size: a name of `SIZES`. max_length: the most positions, prompt and response together.
    dropout: on the attention weights, during SFT only. The global random state is left as it was.
    Raises ValueError for an unknown size (the error lists the names) or a max_length below 2.
    """
    if size not in SIZES:
        raise ValueError(f"size: found {size!r}; wanted one of {', '.join(SIZES)}")
    if not isinstance(max_length, int) or max_length < 2:
        raise ValueError(f"max_length: found {max_length!r}; wanted a whole number of at least 2")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: found {dropout!r}; wanted 0 <= dropout < 1")
    if not hasattr(tokenizer, "pad_token_id"):
        raise ValueError(f"tokenizer: found {tokenizer!r}; wanted one of build_tokenizer")
    check_seed(seed)
    chosen_device, chosen_dtype = choose_device(device), choose_dtype(dtype, device)
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SIZES[size]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=max_length,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    return model.to(device=chosen_device, dtype=chosen_dtype).eval()


def save(model: Any, tokenizer: Any, path: str | os.PathLike[str]) -> Path:
    """Write model and tokenizer to a folder, whole or not at all: an older one stays until then."""
    folder = Path(path)
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    with quiet():
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[Any, Any]:
    """Read (model, tokenizer) from a folder that `save` or `save_pretrained` wrote.

    Nothing is ever downloaded. Raises ValueError when the folder or its config.json is missing, and
    when tokenizer or weights cannot be read or are not whole.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"path: {str(folder)!r} is not a model folder (it has no config.json)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chosen_device, chosen_dtype = choose_device(device), choose_dtype(dtype, device)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, padding_side="left"
            )
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=chosen_dtype, output_loading_info=True
            )
    except Exception as error:  # a damaged file fails in as many ways as there are bytes
        message = f"path: the model in {str(folder)!r} cannot be read ({brief(error)})"
        raise ValueError(message) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"path: the model in {str(folder)!r} has no weights for {missing[0]}")
    return model.to(chosen_device).eval(), tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar of transformers for files that take milliseconds."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_length(model: Any, length: int) -> None:
    """ValueError where a sequence of `length` tokens is longer than the model has positions for."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"length: prompt and response may have {length} tokens together; "
            f"the model has {limit} positions (max_length of build_model)"
        )


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, no special tokens added.

    Raises ValueError naming the text and the characters that the tokenizer does not know.
    """
    if len(texts) == 0:
        return []
    try:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    except Exception as error:  # the Rust backend raises a bare Exception for an unknown token
        known = set(tokenizer.get_vocab())
        for text in texts:
            if unknown := sorted(set(text) - known):
                message = f"text: {text!r} has characters without a token: {unknown}"
                raise ValueError(message) from error
        raise
    return ids
