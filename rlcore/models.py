r"""Compact causal language models and their tokenizers, in the format of `transformers`.

A compact model is a Llama of the published architecture, only small. It is saved by
`save_pretrained` and read back by `AutoModelForCausalLM` and `AutoTokenizer`, so whatever works on
a large model works on it. `transformers` takes seconds to import and is imported on first use.

A scalar model is such a model with a head of one number instead of one of words: a reward model
reads it at the last token (`response_rewards`), a critic at every token (`response_values`). It is
the same class that `AutoModelForSequenceClassification` reads, with one label, so a reward model
that somebody else trained works too.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.checks import brief, check_seed, shown
from rlcore.devices import choose_device, choose_dtype, drawing, forward_precision
from rlcore.files import sync, sync_folder, unwritten
from rlcore.lora import merged_state, without_lora
from rlcore.objectives._checks import describe, is_dense, read_mask
from rlcore.objectives.reward_model import last_token_values

PAD, EOS = "<pad>", "<eos>"
MAX_STD = 1000.0  # of the weights of a head: float16, the narrowest dtype, ends at 65504
UNKNOWN = "<unk>"  # no token has this name
HEAD = "score.weight"  # where transformers keeps the head of a class with labels


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


def build_tokenizer(symbols: str | tuple[str, ...]) -> Any:
    """A tokenizer with one token per symbol, and `<pad>` and `<eos>`.

    symbols: a str, whose characters are the symbols; or a tuple of words, and a text is then words
    with white space between them (one space each after decoding).
    `<pad>` (id 0) and `<eos>` (id 1) differ: where they are one token, a mask made from token ids
    hides the end of the answer too, and the model never learns to stop. Padding is on the left, as
    sampling needs it. A character or word outside `symbols` is an error when it is encoded, never a
    silent `<unk>`.

    Raises ValueError for no symbols, a repeated one, and a word that is empty or has white space.
    """
    if not isinstance(symbols, str | tuple) or not symbols:
        raise ValueError(
            f"symbols: found {shown(symbols)}; wanted a non-empty string or tuple of words"
        )
    for word in () if isinstance(symbols, str) else symbols:
        if not isinstance(word, str) or word.split() != [word] or word in (PAD, EOS, UNKNOWN):
            raise ValueError(f"symbols: found {shown(word)}; wanted words without white space")
    repeated = sorted({s for s in symbols if symbols.count(s) > 1})
    if repeated:
        raise ValueError(f"symbols: {repeated} occur more than once in {shown(symbols)}")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *symbols])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    if isinstance(symbols, str):
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:  # without a decoder, tokens are joined by a space
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
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
    if not isinstance(size, str) or size not in SIZES:
        raise ValueError(f"size: found {shown(size)}; wanted one of {', '.join(SIZES)}")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise ValueError(
            f"max_length: found {shown(max_length)}; wanted a whole number of at least 2"
        )
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: found {shown(dropout)}; wanted 0 <= dropout < 1")
    if not hasattr(tokenizer, "pad_token_id"):
        raise ValueError(f"tokenizer: found {shown(tokenizer)}; wanted one of build_tokenizer")
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
    with drawing(seed):
        model: Any = LlamaForCausalLM(config)
    return model.to(device=chosen_device, dtype=chosen_dtype).eval()


def save(model: Any, tokenizer: Any, path: str | os.PathLike[str]) -> Path:
    """Write model and tokenizer to a folder, whole or not at all.

    An older one stays until then; whenever the process dies, a whole one is there under this name
    or under this name and `.old`. LoRA matrices are added to the weights: what is
    written is a plain model. Raises WriteError naming the folder where it cannot be written.
    """
    folder = Path(path)
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    try:
        if old.exists() and not folder.exists():  # a save that died between its two last steps
            os.replace(old, folder)
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        new.mkdir(parents=True)
        with quiet():
            without_lora(model).save_pretrained(new)
            tokenizer.save_pretrained(new)
        usual = (new / "config.json").stat().st_mode
        for file in new.iterdir():
            file.chmod(usual)  # safetensors leaves the weights to their owner alone
            sync(file)
        sync_folder(new)
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
        sync_folder(folder.parent)
    except (
        Exception
    ) as error:  # safetensors and tokenizers have errors of their own for a full disk
        shutil.rmtree(new, ignore_errors=True)
        raise unwritten("model ", folder, error) from error
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
    model, found, tokenizer = _read(path, "AutoModelForCausalLM", device, dtype)
    if HEAD in found["unexpected_keys"]:
        raise ValueError(
            f"path: the model in {str(path)!r} has a scalar head, not one of words; wanted "
            "load_scalar_model"
        )
    return model, tokenizer


def build_scalar_model(model: Any, *, seed: int, std: float | None = None) -> Any:
    """A copy of a causal LM with a scalar head in place of its head of words.

    model: of `build_model` or `load`; it is left as it is, and shares no weight with the copy.
    The head is a linear map of the last hidden state, without bias, drawn from a normal of standard
    deviation `std`: 1/sqrt(hidden size + 1) by default (Stiennon et al. 2020, arXiv 2009.01325, for
    reward models); 0 gives a critic whose first values are all 0. The same weights for the same
    seed; the global random state is left as it was.
    Raises ValueError for a std outside 0 to 1000, and for a model that is no causal LM of
    transformers or for whose architecture transformers has no class with a score.
    """
    check_seed(seed)
    number = isinstance(std, int | float) and not isinstance(std, bool)
    if std is not None and not (number and 0 <= std <= MAX_STD):
        raise ValueError(f"std: found {shown(std)}; wanted None or a number from 0 to {MAX_STD:g}")
    if not hasattr(model, "config") or not hasattr(model, "lm_head"):
        raise ValueError(f"model: found {type(model).__name__}; wanted a causal LM of transformers")
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels = 1
    with drawing(seed):
        try:
            scalar: Any = AutoModelForSequenceClassification.from_config(config, dtype=model.dtype)
        except ValueError as error:
            raise ValueError(f"model: no scalar head for it ({brief(error)})") from error
        head = _head(scalar)
        std = 1 / math.sqrt(head.in_features + 1) if std is None else std
        drawn = torch.randn(head.weight.shape) * std
    scalar.base_model.load_state_dict(merged_state(model.base_model))
    with torch.no_grad():
        head.weight.copy_(drawn)
    return scalar.to(model.device).eval()


def load_scalar_model(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[Any, Any]:
    """Read (scalar model, tokenizer) from a folder that `save` wrote.

    Nothing is ever downloaded. Raises ValueError as `load`, and where the model has no scalar head
    or one with several numbers.
    """
    model, _, tokenizer = _read(path, "AutoModelForSequenceClassification", device, dtype)
    try:
        _head(model)
    except ValueError as error:
        raise ValueError(f"path: the model in {str(path)!r} is no scalar model ({error})") from None
    return model, tokenizer


def token_values(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    r"""One number per token: column i is read off the hidden state of token i.

    input_ids, attention_mask (B, L) -> (B, L). Column i has seen the tokens up to i, itself
    included, so it is the value of the state in which token i+1 is drawn.
    One forward pass, gradients on, dropout off (as for log-probs: a value taken with dropout on is
    noise). The padding may stand on either side, on both or inside a row, and hold any id:
    positions are counted over real tokens, so a row has the same values wherever it stands. A
    padded slot has the value 0 and no gradient.
    The head works in float32, or in the model's dtype where that is wider: in bfloat16 two rewards
    that differ by less than one part in 256 would be a tie.
    Raises ValueError for a model without a scalar head, shapes that differ, ids that are no
    integers or, at a real token, none of the model's, and a mask of other numbers than 0 and 1.
    """
    head = _head(model)
    ids, mask = read_batch(model, input_ids, attention_mask)
    with evaluating(model):
        hidden = model.base_model(input_ids=ids, use_cache=False, **padding(mask)).last_hidden_state
    wide = torch.promote_types(hidden.dtype, torch.float32)
    hidden = torch.where(
        mask.bool()[..., None], hidden.to(wide), 0.0
    )  # nothing of the padding, NaN or not
    return (hidden * head.weight[0].to(wide)).sum(dim=-1)  # unlike @, the same bits after loading


def response_values(
    model: Any, input_ids: Tensor, attention_mask: Tensor, response_length: int
) -> Tensor:
    r"""What a critic says BEFORE each token of the response is drawn, (B, T).

    input_ids, attention_mask (B, P+T), prompts padded on the left and responses on the right as
    `sample` gives them, T = `response_length`.
    Column t is $V(x, y_{<t})$, the value of the state in which $y_t$ is drawn: it stands beside the
    log-prob of $y_t$ in `response_logprobs`, and column 0 has seen the prompt alone. So $r_t +
    \gamma V_{t+1} - V_t$ is `rewards[:, t] + gamma * values[:, t + 1] - values[:, t]`. What stands
    on columns that are no token of the response is unspecified; there the mask decides.
    $V(x, y)$ after the last token, for responses that were cut off, is not among them: it is
    `last_token_values(token_values(model, input_ids, attention_mask), attention_mask)`.
    Raises ValueError as `token_values`, for a response_length outside 1 to P+T-1, and for a
    response with a padded slot between its tokens, or before them: V is read one column back.
    """
    _, mask = read_batch(model, input_ids, attention_mask)
    check_response(response_length, mask)
    return token_values(model, input_ids, attention_mask)[:, -response_length - 1 : -1]


def response_rewards(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    r"""What a reward model gives each row, $r_\phi(x, y)$, (B,): its last real token's.

    input_ids, attention_mask (B, L), prompt and response with its terminal token, padded on either
    side. Gradients and errors as `token_values`; a row without a real token is an error too.
    """
    return last_token_values(token_values(model, input_ids, attention_mask), attention_mask)


def _head(model: Any) -> torch.nn.Linear:
    """The scalar head of a model. ValueError where there is none."""
    head = getattr(model, HEAD.partition(".")[0], None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1 or head.bias is not None:
        found = "none" if head is None else str(head)
        raise ValueError(
            f"model: found {found} as the head of a {type(model).__name__}; wanted one number "
            "without bias (build_scalar_model)"
        )
    return head


def _read(
    path: str | os.PathLike[str],
    auto_class: str,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
) -> tuple[Any, dict[str, Any], Any]:
    """Model, what transformers says about its weights, and tokenizer."""
    if not os.fspath(path):
        raise ValueError("path: found ''; wanted the name of a model folder")
    folder = Path(path)
    if not (folder / "config.json").is_file():
        inside = (folder / "model" / "config.json").is_file()
        why = f"but {(folder / 'model').as_posix()!r} is" if inside else "it has no config.json"
        raise ValueError(f"path: {str(folder)!r} is not a model folder ({why})")
    import transformers

    chosen_device, chosen_dtype = choose_device(device), choose_dtype(dtype, device)
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, padding_side="left"
            )
            loaded: Any = getattr(transformers, auto_class).from_pretrained(
                folder, local_files_only=True, dtype=chosen_dtype, output_loading_info=True
            )
    except Exception as error:  # a damaged file fails in as many ways as there are bytes
        message = f"path: the model in {str(folder)!r} cannot be read ({brief(error)})"
        raise ValueError(message) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"path: the model in {str(folder)!r} has no weights for {missing[0]}")
    return model.to(chosen_device).eval(), found, tokenizer


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off inside the block, products as `using_precision` says; `model.training` is put
    back after it."""
    was_training = model.training
    model.eval()
    try:
        with forward_precision(model):
            yield
    finally:
        model.train(was_training)


def padding(mask: Tensor) -> dict[str, Tensor]:
    """Mask and positions for rows with a gap before a real token; nothing where no row has one.

    Padding on the right needs no mask: a causal model never looks ahead.
    """
    if bool(mask[:, 0].bool().all() & (mask[:, 1:] <= mask[:, :-1]).all()):
        return {}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def read_batch(model: Any, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, L) as a model takes them: a valid id in every padded slot, a mask of int64.

    Raises ValueError as `token_values`.
    """
    if not is_dense(input_ids) or input_ids.dim() != 2 or 0 in input_ids.shape or _odd(input_ids):
        raise ValueError(
            f"input_ids: found {describe(input_ids)}; wanted integers of shape (B, L), B and L >= 1"
        )
    if not is_dense(attention_mask) or attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: found {describe(attention_mask)}; wanted that of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    if attention_mask.device != input_ids.device:
        raise ValueError(
            f"attention_mask: found it on {attention_mask.device}; wanted {input_ids.device}, as "
            "input_ids"
        )
    mask = read_mask(attention_mask, name="attention_mask", allow_empty=True)
    ids = input_ids.long().masked_fill(~mask, 0)
    low, high = (int(end) for end in ids.aminmax())
    words = model.get_input_embeddings().num_embeddings
    if low < 0 or high >= words:
        raise ValueError(
            f"input_ids: found {low if low < 0 else high} at a real token; wanted ids from 0 to "
            f"{words - 1}"
        )
    return ids, mask.long()


def check_response(response_length: int, mask: Tensor) -> None:
    """ValueError unless it is a number of columns that leaves at least one to the prompt, and each
    token in them, but a row's first, stands right after the one from whose state it is drawn."""
    whole = isinstance(response_length, int) and not isinstance(response_length, bool)
    if not whole or not 1 <= response_length < mask.shape[1]:
        raise ValueError(
            f"response_length: found {shown(response_length)}; wanted 1 to "
            f"{mask.shape[1] - 1}, a whole number"
        )
    before = slice(-response_length - 1, -1)
    torn = (mask[:, -response_length:] > mask[:, before]) & (mask.cumsum(1)[:, before] > 0)
    if bool(torn.any()):
        row, slot = torn.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask: found a padded slot before token {slot} of the response in row {row};"
            " wanted every token of it right after the one before"
        )


def _odd(ids: Tensor) -> bool:
    """Of a dtype that is none of integers."""
    return ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool


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


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """ValueError where the tokenizer has ids for which the model has no embedding.

    Fewer than the model has are right: embeddings are often padded to a round number.
    """
    words = model.get_input_embeddings().num_embeddings
    # Ids without gaps, as ours are: to look at each takes 16 ms for 49,000, and every call of
    # `sample` asks. `load_pretrained`, which meets other people's, does look at each.
    if len(tokenizer) > words:
        raise ValueError(
            f"tokenizer: found ids up to {max(tokenizer.get_vocab().values())}; wanted those of "
            f"the model's vocabulary, below {words}"
        )


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's, then the others of generation_config.

    A chat model may have several, for the end of a turn and of a text. A response that is trained
    on is ended by the first.
    """
    config = getattr(model, "generation_config", None)
    more = getattr(config, "eos_token_id", None)
    more = more if isinstance(more, list | tuple) else [] if more is None else [more]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *more]))


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, no special tokens added.

    Raises ValueError naming the text and the characters or words that the tokenizer does not know.
    """
    if len(texts) == 0:
        return []
    try:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    except Exception as error:  # the Rust backend raises a bare Exception for an unknown token
        known = set(tokenizer.get_vocab())
        pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
        kind = "words" if any(len(token) > 1 for token in known - {PAD, EOS}) else "characters"
        for text in texts:
            if unknown := sorted({piece for piece, _ in pieces(text)} - known):
                message = f"text: {text!r} has {kind} without a token: {unknown}"
                raise ValueError(message) from error
        raise
    return ids


def decode(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """The text of each row of token ids, special tokens included: `tokenizer.batch_decode(rows)`.

    Where nothing is to be tidied up afterwards, the Rust backend is asked directly: transformers
    looks at every single id before it does that, four times the work.
    """
    if getattr(tokenizer, "is_fast", False) and not tokenizer.clean_up_tokenization_spaces:
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
        return texts
    return list(tokenizer.batch_decode(rows))
