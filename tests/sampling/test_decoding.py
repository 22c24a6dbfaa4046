"""Decoding with a cache: what `generate` gives, and what a full forward pass gives."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from rlcore import decoding, first_layer, graph_decoding, kv_cache, models, sampling
from rlcore.sampling import sample

PADDED = ["352041=", "0=", "98=", "123456=", "5="]
ONE_LENGTH = ["12=", "34=", "90="]
VOCABULARY = {"vocab_size": 13, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    **VOCABULARY,
}


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**SHAPE, **changes})


def rope(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **numbers}


LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
# Those for which the layers are computed here.
PLAIN = {
    **{f"our {size}": size for size in models.SIZES},
    "shared keys": llama(num_key_value_heads=2),
    "one key head": llama(num_key_value_heads=1),
    "own head": llama(tie_word_embeddings=False),
    "wide heads": llama(head_dim=16),
    "shape of SmolLM2": llama(
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=192,
        rms_norm_eps=1e-5,
        rope_parameters=rope("default", rope_theta=100_000.0),
    ),
    "linear angles": llama(rope_parameters=rope("linear", factor=2.0)),
    "angles of Llama 3": llama(rope_parameters=rope("llama3", **LLAMA3)),
    "angles of YaRN": llama(rope_parameters=rope("yarn", **YARN)),
    "eager attention": llama(attn_implementation="eager"),
}
# Those that are called as they are.
OTHERS = {
    "GPT-2": transformers.GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=256, **VOCABULARY),
    "Qwen2": transformers.Qwen2Config(**{**SHAPE, "num_key_value_heads": 2}),
    "Qwen3": transformers.Qwen3Config(**{**SHAPE, "num_key_value_heads": 2, "head_dim": 8}),
    "biases": llama(attention_bias=True),
    "biases of the feed-forward": llama(mlp_bias=True),
    "another activation": llama(hidden_act="gelu"),
    "angles by length": llama(rope_parameters=rope("dynamic", factor=2.0)),
}
ALL = {**PLAIN, **OTHERS}


def build(config: Any) -> tuple[Any, Any]:
    """A model with large random weights, so that it is neither uniform nor certain."""
    tokenizer = models.build_tokenizer("0123456789=")
    if isinstance(config, str):
        model = models.build_model(config, tokenizer, seed=0, max_length=256)
    else:
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config).eval()
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.5 / weight.shape[1] ** 0.5, generator=numbers)
            elif name.endswith("bias"):
                weight.normal_(std=0.1, generator=numbers)
            else:
                weight.uniform_(0.5, 1.5, generator=numbers)
    return model, tokenizer


# Of the cache: whether rows are kept side by side, and whether the first layer is read from tables.
LAYOUTS = {
    "rows apart": (False, False),
    "rows side by side": (True, False),
    "rows apart after tables": (False, True),
    "rows side by side after tables": (True, True),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the cache, whatever the numbers of rows and columns."""
    side_by_side, tables = LAYOUTS[request.param]
    monkeypatch.setattr(kv_cache, "FEW", 10**6 if side_by_side else 0)
    monkeypatch.setattr(kv_cache, "MANY", 0)
    monkeypatch.setattr(first_layer, "FEW_TOKENS", 10**6 if tables else 0)
    monkeypatch.setattr(first_layer, "MANY_ROWS", 0)
    monkeypatch.setattr(first_layer, "LARGEST", 10**9)
    return str(request.param)


@pytest.mark.parametrize(
    ("rows", "columns", "kept"), [(96, 48, "Column"), (95, 48, "Row"), (96, 49, "Row")]
)
def test_few_tokens_of_many_rows_lie_side_by_side(rows: int, columns: int, kept: str) -> None:
    sizes = kv_cache.Sizes(1, 2, 4, prompts=rows, group=1, start=3, longest=columns)
    assert type(kv_cache.kv_cache(sizes, torch.zeros(1))).__name__ == f"{kept}Cache"


@pytest.mark.parametrize(
    ("sizes", "worth_it"),
    [
        ((48, 4, 32, 113), True),
        ((49, 4, 32, 100), False),
        ((48, 4, 31, 113), False),
        ((48, 4, 32, 114), False),
    ],
)
def test_tables_are_for_few_tokens_many_rows_and_a_cache(sizes: tuple, worth_it: bool) -> None:
    """vocabulary, heads, rows, longest: 4 x 48 x 48 x 113 numbers are just below 2^20."""
    assert first_layer.worth_tables(*sizes, torch.device("cpu")) == worth_it
    assert not first_layer.worth_tables(*sizes, torch.device("cuda"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_that_never_stands_anywhere_changes_nothing(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its embedding is not finite: 0 times NaN would be NaN."""
    model, tokenizer = build(llama(tie_word_embeddings=False))

    def samples() -> Any:
        return sample(model, tokenizer, ONE_LENGTH, group_size=32, max_new_tokens=6, greedy=True)

    wanted = samples()
    absent = set(range(len(tokenizer))) - set(wanted.input_ids.flatten().tolist())
    with torch.no_grad():
        model.model.embed_tokens.weight[min(absent)] = value
    assert_same(samples(), wanted)


@pytest.mark.parametrize(
    ("name", "layout"),
    [*itertools.product(PLAIN, LAYOUTS), *((name, "rows apart") for name in OTHERS)],
    indirect=["layout"],
)
@pytest.mark.parametrize("prompts", [PADDED, ONE_LENGTH], ids=["padded", "one length"])
def test_greedy_is_generate_token_for_token(name: str, prompts: list[str], layout: str) -> None:
    """Past the first block of the cache too."""
    model, tokenizer = build(ALL[name])
    assert decoding.is_plain_llama(model) == (name in PLAIN)
    steps = kv_cache.BLOCK + 20
    out = sample(model, tokenizer, prompts, max_new_tokens=steps, greedy=True)
    encoded = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        expected = model.generate(**encoded, max_new_tokens=steps, do_sample=False)
    assert torch.equal(out.input_ids, expected)
    assert len(set(out.texts)) > 1


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *itertools.product(
            ["our tiny", "shared keys", "angles of Llama 3", "angles of YaRN"], LAYOUTS
        ),
        ("GPT-2", "rows apart"),
    ],
    indirect=["layout"],
)
@pytest.mark.parametrize("prompts", [PADDED, ONE_LENGTH], ids=["padded", "one length"])
def test_logits_are_those_of_a_full_forward_pass(
    name: str, prompts: list[str], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row alone, without cache and padding; rows leave, and the cache grows, on the way.

    In float64 throughout: transformers' own norm and angles would be of float32.
    """
    model, tokenizer = build(ALL[name])
    if decoding.is_plain_llama(model):
        monkeypatch.setattr(decoding, "is_plain_llama", lambda _: True)

    def norm(self: Any, states: torch.Tensor) -> torch.Tensor:
        mean = states.square().mean(-1, keepdim=True)
        return self.weight * states / (mean + self.variance_epsilon).sqrt()

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turns = position_ids[..., None].double() * self.inv_freq.repeat(2).double()
        return turns.cos() * self.attention_scaling, turns.sin() * self.attention_scaling

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles)
    model.double()
    encoded = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
    numbers = torch.Generator().manual_seed(0)
    rows = [ids for ids in models.encode(tokenizer, prompts) for _ in range(2)]
    worst = 0.0
    with torch.no_grad():
        decoder = decoding.start_decoding(
            model, encoded["input_ids"], encoded["attention_mask"], 2, 2 * kv_cache.BLOCK
        )
        for t in range(kv_cache.BLOCK + 4):
            for ids, logits in zip(rows, decoder.logits, strict=True):
                if t % 9 < 2 or t >= kv_cache.BLOCK:
                    whole = model(torch.tensor([ids])).logits[0, -1]
                    worst = max(worst, float((logits - whole).abs().max()))
            if t in (3, 40):
                keep = torch.arange(len(rows))[t % 2 :: 2]
                rows = [rows[i] for i in keep]
                decoder.keep(keep)
            tokens = torch.randint(2, 13, (len(rows),), generator=numbers)
            rows = [[*ids, int(token)] for ids, token in zip(rows, tokens, strict=True)]
            decoder.advance(tokens)
    assert worst < 1e-10


def test_both_decoders_give_the_same_samples(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = build("tiny")

    def samples() -> Any:
        return sample(
            model, tokenizer, PADDED, group_size=16, max_new_tokens=24,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip

    ours = samples()
    monkeypatch.setattr(decoding, "is_plain_llama", lambda _: False)
    theirs = samples()
    assert ours.lengths.unique().numel() > 5
    for field in dataclasses.fields(ours):
        found, wanted = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name in ("logprobs", "entropy"):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        elif isinstance(found, torch.Tensor):
            assert torch.equal(found, wanted)
        else:
            assert found == wanted


RECORDABLE = {name: config for name, config in ALL.items() if name != "angles by length"}


@pytest.mark.parametrize("name", RECORDABLE)
@pytest.mark.parametrize("prompts", [PADDED, ONE_LENGTH], ids=["padded", "one length"])
def test_the_step_of_a_cuda_graph_gives_the_same_samples(
    name: str, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that a GPU records: here it is made without a recording, on the same tensors."""
    model, tokenizer = build(RECORDABLE[name])

    def samples(**more: Any) -> Any:
        return sample(
            model, tokenizer, prompts, group_size=4, max_new_tokens=24,
            generator=torch.Generator().manual_seed(3), **more,
        )  # fmt: skip

    without = samples()
    monkeypatch.setattr(sampling, "check_cuda_graph", lambda *_: None)
    graph = samples(cuda_graph=True)
    assert without.lengths.unique().numel() > 3
    assert torch.equal(graph.input_ids, without.input_ids)
    assert torch.equal(graph.truncated, without.truncated)
    torch.testing.assert_close(graph.logprobs, without.logprobs, rtol=0, atol=2e-5)


def test_the_tensors_of_a_recorded_step_keep_their_places() -> None:
    model, _ = build("tiny")
    ids = torch.tensor([[2, 3, 4], [0, 5, 6]])
    with torch.no_grad():
        decoder = graph_decoding.GraphDecoder(model, ids, (ids > 0).long(), 2, 5)

        def places() -> list[int]:
            cache = [t for layer in decoder.cache.layers for t in (layer.keys, layer.values)]
            known = [decoder.tokens, decoder.positions, decoder.mask, *cache]
            return [tensor.data_ptr() for tensor in known]

        before = places()
        for _ in range(5):
            decoder.advance(torch.tensor([2, 3, 4, 5]))
            assert places() == before
    assert decoder.positions[:, 0].tolist() == [8, 8, 7, 7]


def test_a_step_that_cannot_be_recorded_is_an_error() -> None:
    model, tokenizer = build("tiny")
    asked: dict[str, Any] = {"max_new_tokens": 2, "greedy": True}
    with pytest.raises(ValueError, match=r"cuda_graph: found a model on cpu; wanted one on a CUDA"):
        sample(model, tokenizer, ["1="], **asked, cuda_graph=True)
    with pytest.raises(ValueError, match=r"cuda_graph: found 1; wanted True or False"):
        sample(model, tokenizer, ["1="], **asked, cuda_graph=1)
    by_length, _ = build(ALL["angles by length"])
    with pytest.raises(ValueError, match=r"cuda_graph: found rotary angles of type 'dynamic'"):
        graph_decoding.check_recordable(by_length)
    window = transformers.MistralConfig(**{**SHAPE, "sliding_window": 8})
    with pytest.raises(ValueError, match=r"cuda_graph: found a cache of StaticSlidingWindowLayer"):
        graph_decoding.check_recordable(build(window)[0])


def assert_same(found: Any, wanted: Any) -> None:
    for name, value in vars(wanted).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(found, name), value)
        else:
            assert getattr(found, name) == value


@pytest.mark.parametrize("prompts", [PADDED, ONE_LENGTH], ids=["padded", "one length"])
def test_steps_that_wait_change_nothing(
    prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and entropies of one step, of a few steps, or of all steps at once."""
    model, tokenizer = build("tiny")
    found = []
    for waiting in (2**20, 0, 3 * 13 * 8 * len(prompts)):
        monkeypatch.setattr(sampling, "WAITING", waiting)
        out = sample(
            model, tokenizer, prompts, group_size=8, max_new_tokens=24,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        found.append(out)
    assert found[0].lengths.unique().numel() > 5
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("prompts", [PADDED, ONE_LENGTH], ids=["padded", "one length"])
def test_what_memory_held_before_changes_nothing(prompts: list[str], layout: str) -> None:
    """Where algorithms are deterministic, torch fills new memory with NaN."""
    model, tokenizer = build("tiny")

    def samples() -> Any:
        return sample(
            model, tokenizer, prompts, group_size=4, max_new_tokens=kv_cache.BLOCK + 20,
            generator=torch.Generator().manual_seed(3), drop_finished=len(prompts) > 3,
        )  # fmt: skip

    wanted = samples()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        found = samples()
    finally:
        torch.use_deterministic_algorithms(False)
    assert wanted.logprobs.isfinite().all()
    assert_same(found, wanted)


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def hooked_before(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda *_: None)


def replaced_forward(model: Any) -> None:
    model.forward = model.forward


def adapter(model: Any) -> None:
    class Adapter(torch.nn.Linear):
        pass

    model.model.layers[0].self_attn.q_proj = Adapter(64, 64, bias=False)


def mixed(model: Any) -> None:
    model.model.layers[0].to(torch.float64)


def double(model: Any) -> None:
    model.to(torch.float64)


def half(model: Any) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize(
    "change", [hooked, hooked_before, replaced_forward, adapter, mixed, double, half]
)
def test_a_changed_model_is_called_as_it_is(change: Callable[[Any], None]) -> None:
    model, _ = build("tiny")
    assert decoding.is_plain_llama(model)
    change(model)
    assert not decoding.is_plain_llama(model)


def test_autocast_reaches_the_model() -> None:
    model, _ = build("tiny")
    with torch.autocast("cpu", torch.bfloat16):
        assert not decoding.is_plain_llama(model)


def test_weights_are_read_at_every_call() -> None:
    model, tokenizer = build("tiny")
    settings: dict[str, Any] = {"max_new_tokens": 12, "greedy": True}
    before = sample(model, tokenizer, PADDED, **settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.0)
    assert sample(model, tokenizer, PADDED, **settings).texts != before.texts


def test_finished_rows_leave_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = build("tiny")
    sizes: list[int] = []
    advance = decoding.LlamaDecoder.advance

    def noted(self: Any, tokens: torch.Tensor) -> None:
        sizes.append(len(tokens))
        advance(self, tokens)

    monkeypatch.setattr(decoding.LlamaDecoder, "advance", noted)
    out = sample(
        model, tokenizer, PADDED, group_size=40, max_new_tokens=30,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    running = [int((out.lengths > t + 1).sum()) for t in range(len(sizes))]
    assert all(left <= size for left, size in zip(running, sizes, strict=True))
    assert all(
        left > 0.75 * size or left == size for left, size in zip(running, sizes, strict=True)
    )
    assert 2 < len(set(sizes)) < len(set(running))


@pytest.mark.parametrize("tidy", [False, True])
def test_texts_are_those_of_batch_decode(tidy: bool) -> None:
    tokenizer = models.build_tokenizer(("a", "b", ".", "?"))
    tokenizer.clean_up_tokenization_spaces = tidy
    rows = [[2, 3, 4], [], [0, 2, 5, 1], [1]]
    assert models.decode(tokenizer, rows) == tokenizer.batch_decode(rows)
    assert models.decode(tokenizer, rows)[0] == ("a b." if tidy else "a b .")
    assert models.decode(tokenizer, []) == []
