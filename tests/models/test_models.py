"""Compact models and tokenizers: the same for one seed, readable by transformers, clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcore import devices, models
from rlcore.tasks import TASKS

SYMBOLS = "0123456789="


def test_tokenizer_has_one_token_per_symbol_and_two_more() -> None:
    tokenizer = models.build_tokenizer(SYMBOLS)
    assert len(tokenizer) == len(SYMBOLS) + 2
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert models.encode(tokenizer, ["10=", "9"]) == [[3, 2, 12], [11]]
    assert tokenizer.decode([3, 2, 12]) == "10="
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("name", [task.name for task in TASKS.values() if task.symbols])
def test_task_texts_round_trip(name: str) -> None:
    symbols = TASKS[name].symbols + " \n"
    tokenizer = models.build_tokenizer(symbols)
    (ids,) = models.encode(tokenizer, [symbols])
    assert len(ids) == len(symbols)
    assert tokenizer.decode(ids) == symbols


@pytest.mark.parametrize("name", [task.name for task in TASKS.values() if task.words])
def test_words_round_trip(name: str, tmp_path: Path) -> None:
    """One token per word, a space between words, also after saving."""
    words = TASKS[name].words
    tokenizer = models.build_tokenizer(words)
    models.save(models.build_model("nano", tokenizer, seed=0), tokenizer, tmp_path / "m")
    for one in (tokenizer, models.load(tmp_path / "m", device="cpu")[1]):
        assert len(one) == len(words) + 2
        assert models.encode(one, [" ".join(words)]) == [list(range(2, len(words) + 2))]
        assert one.decode(range(2, len(words) + 2)) == " ".join(words)


def test_unknown_words_are_named() -> None:
    tokenizer = models.build_tokenizer(("the", "plot", "."))
    assert models.encode(tokenizer, ["the  plot\n."]) == [[2, 3, 4]]
    with pytest.raises(ValueError, match=r"text: 'the plt .' has words without a token: \['plt'\]"):
        models.encode(tokenizer, ["the plot .", "the plt ."])
    with pytest.raises(ValueError, match=r"words without a token: \['<unk>', 'plot\.'\]"):
        models.encode(tokenizer, ["the plot. <unk>"])


def test_unknown_character_is_named() -> None:
    tokenizer = models.build_tokenizer(SYMBOLS)
    with pytest.raises(ValueError, match=r"text: '1x2' has characters without a token: \['x'\]"):
        models.encode(tokenizer, ["12", "1x2"])


def test_no_texts_are_no_tokens() -> None:
    assert models.encode(models.build_tokenizer(SYMBOLS), []) == []


@pytest.mark.parametrize(
    "symbols",
    ["", "aba", None, ["a"], (), ("a", "a"), ("a b",), ("",), ("<eos>",), ("<unk>",), (1,)],
)
def test_bad_symbols(symbols: object) -> None:
    with pytest.raises(ValueError, match="symbols: "):
        models.build_tokenizer(symbols)  # type: ignore[arg-type]


def test_same_seed_same_weights_and_the_global_state_is_left_alone() -> None:
    tokenizer = models.build_tokenizer(SYMBOLS)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = models.build_model("nano", tokenizer, seed=1)
    assert torch.equal(torch.rand(3), expected)
    again = models.build_model("nano", tokenizer, seed=1)
    other = models.build_model("nano", tokenizer, seed=2)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert not first.training


@pytest.mark.parametrize(
    ("size", "parameters"),
    # Llama by hand: V d + layers (4 d^2 + 3 d f + 2 d) + d, with V = 13 and one embedding matrix.
    [
        ("nano", 13 * 32 + 1 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 32),
        ("tiny", 13 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64),
        ("small", 13 * 128 + 4 * (4 * 128**2 + 3 * 128 * 512 + 2 * 128) + 128),
    ],
)
def test_sizes(size: str, parameters: int) -> None:
    model = models.build_model(size, models.build_tokenizer(SYMBOLS), seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_unknown_size_lists_the_names() -> None:
    tokenizer = models.build_tokenizer(SYMBOLS)
    with pytest.raises(ValueError, match="size: found '7B'; wanted one of nano, tiny, small"):
        models.build_model("7B", tokenizer, seed=0)
    with pytest.raises(ValueError, match="max_length: found 1"):
        models.build_model("nano", tokenizer, seed=0, max_length=1)
    with pytest.raises(ValueError, match="dropout: found 1"):
        models.build_model("nano", tokenizer, seed=0, dropout=1)
    with pytest.raises(ValueError, match="dropout: found 'x'"):
        models.build_model("nano", tokenizer, seed=0, dropout="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed: found None"):
        models.build_model("nano", tokenizer, seed=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer: found None"):
        models.build_model("nano", None, seed=0)


def test_saved_models_load_by_transformers_and_by_us(tmp_path: Path, capfd) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = models.build_tokenizer(SYMBOLS)
    model = models.build_model("nano", tokenizer, seed=0)
    for _ in range(2):  # the second time replaces the first
        folder = models.save(model, tokenizer, tmp_path / "deep" / "model")
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    loaded, loaded_tokenizer = models.load(folder)
    assert capfd.readouterr().err == ""  # no progress bars
    ids = torch.tensor(models.encode(tokenizer, ["352041="]))
    for one in (loaded, AutoModelForCausalLM.from_pretrained(folder)):
        assert torch.equal(one(ids).logits, model(ids).logits)
        assert one.config.eos_token_id == tokenizer.eos_token_id
    for one in (loaded_tokenizer, AutoTokenizer.from_pretrained(folder)):
        assert one("352041=")["input_ids"] == ids[0].tolist()
        assert one.decode(ids[0]) == "352041="
        assert (one.pad_token_id, one.eos_token_id) == (0, 1)
        padded = one(["1", "12="], padding=True)
        assert padded["input_ids"] == [[0, 0, 3], [3, 4, 12]]
        assert padded["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


def test_load_never_downloads(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", "some/hub-name"):
        with pytest.raises(ValueError, match="is not a model folder"):
            models.load(path)


@pytest.mark.parametrize("module", ["rlcore", "rlcore.models", "rlcore.training", "rlcore.tasks"])
def test_importing_does_not_load_transformers(module: str) -> None:
    code = f"import sys, {module}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_devices() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert devices.choose_device() == torch.device(wanted)
    assert devices.choose_device("cpu") == torch.device("cpu")
    assert devices.choose_dtype() == torch.float32
    assert devices.choose_dtype("bfloat16") == devices.choose_dtype(torch.bfloat16)
    for bad in ("gpu", "", 3.5, "mps"):
        with pytest.raises(ValueError, match="device: "):
            devices.choose_device(bad)  # type: ignore[arg-type]
    for bad in ("float16", "int8", torch.int64):
        with pytest.raises(ValueError, match=r"dtype: found .* wanted one of float32"):
            devices.choose_dtype(bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
def test_cuda_on_a_machine_without_it() -> None:
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        devices.choose_device("cuda")


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with devices.using_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    for bad in (0, -1, 1.0, True):
        with (
            pytest.raises(ValueError, match="threads: found"),
            devices.using_threads(bad),  # type: ignore[arg-type]
        ):
            pass


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "missing", "no tokenizer", "config"])
def test_a_damaged_model_folder_is_named(damage: str, tmp_path: Path) -> None:
    tokenizer = models.build_tokenizer("ab")
    models.save(models.build_model("nano", tokenizer, seed=0), tokenizer, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "no tokenizer":
        for file in (tmp_path / "m").glob("tokenizer*"):
            file.unlink()
    elif damage == "config":
        (tmp_path / "m" / "config.json").write_text("{", "utf-8")
    else:
        content = weights.read_bytes()
        weights.write_bytes({"cut": content[:-100], "empty": b"", "text": b"no weights"}[damage])
    with pytest.raises(ValueError, match=rf"path: the model in '{tmp_path}/m' cannot be read") as e:
        models.load(tmp_path / "m")
    assert "\n" not in str(e.value)


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tokenizer = models.build_tokenizer("ab")
    models.save(models.build_model("nano", tokenizer, seed=0), tokenizer, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    kept = {name: w for name, w in load_file(file).items() if "mlp.up" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for .*mlp\.up_proj"):
        models.load(tmp_path / "m")


def test_saved_weights_can_be_read_by_whom_the_rest_can(tmp_path: Path) -> None:
    tokenizer = models.build_tokenizer(SYMBOLS)
    folder = models.save(models.build_model("nano", tokenizer, seed=0), tokenizer, tmp_path / "m")
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


def test_a_run_folder_is_told_from_its_model(tmp_path: Path) -> None:
    tokenizer = models.build_tokenizer(SYMBOLS)
    models.save(models.build_model("nano", tokenizer, seed=0), tokenizer, tmp_path / "model")
    with pytest.raises(ValueError, match=r"is not a model folder \(but '.*/model' is\)"):
        models.load(tmp_path)
    with pytest.raises(ValueError, match=r"is not a model folder \(it has no config.json\)"):
        models.load(tmp_path / "no")
