"""A model of SmolLM2's architecture, only small, with a byte-level BPE tokenizer and a template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.models import save

TEXT = (
    "The cat sat on the mat and the dog sat on the cat. What is 7 plus 5? The answer is 12.",
    "Sort these digits: 352041. Write them in ascending order, the smallest digit first.",
    "A policy writes a response, a verifier reads it, and the reward moves the policy.",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|stop|>")
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a small model<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PADDED = 8  # rows of the embedding that no token has


def build_bpe() -> Any:
    """Bytes and merges learned from TEXT; digits stand alone, as in SmolLM2. No padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_small(tokenizer: Any, seed: int = 0) -> Any:
    """SmolLM2's config, shrunk; with large weights, so that it is neither uniform nor certain."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer) + PADDED,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.normal_(std=0.15)
    model.generation_config.eos_token_id = [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<|stop|>"),
    ]
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as somebody else would have saved it."""
    tokenizer = build_bpe()
    return save(build_small(tokenizer), tokenizer, tmp_path_factory.mktemp("small") / "model")


@pytest.fixture
def load_small(folder: Path) -> Callable[..., tuple[Any, Any]]:
    """load_small(**arguments of load_pretrained) -> (model, tokenizer), on the CPU."""
    from rlcore.pretrained import load_pretrained

    return lambda **given: load_pretrained(folder, **{"device": "cpu", **given})
