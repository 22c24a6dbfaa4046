"""Run the chapters before Sphinx sees them, and keep their outputs in the execution cache.

Sphinx (myst-nb) then finds every page in the cache. Doing it here gives one clear line per failure
(file, line of the cell, error), a limit on the time of every cell, and no page without outputs.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from book.bootstrap import ROOT
from book.pages import PageError, read_page

ANSI = re.compile(r"\x1b\[[0-9;]*m")
WARNING = re.compile(r"^.*\b\w*Warning: .*$", re.MULTILINE)


class ChapterError(Exception):
    """A chapter does not run; the message names the file, the line of the cell and the reason."""


def kernel_environment(work: Path) -> dict[str, str]:
    """Environment of the kernels: nothing from the user's own IPython, nothing from the network."""
    profile = work / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "book" / "kernel_config.py", profile / "ipython_kernel_config.py")
    return {
        **os.environ,
        "IPYTHONDIR": str(work / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def execute_page(path: Path, name: str, work: Path, *, timeout: int) -> bool:
    """Bring the outputs of one page into the cache; True if it had to be run.

    name: how to call the page in messages. timeout: seconds for one cell.
    Raises ChapterError (the page fails) or PageError (it cannot be read).
    """
    try:
        notebook = read_page(path.read_text(encoding="utf-8"))
    except PageError as error:
        raise ChapterError(f"{name}: {error}") from error
    cache = get_cache(work / ".jupyter_cache")
    try:
        cache.match_cache_notebook(notebook)
        return False
    except KeyError:
        pass
    start = time.monotonic()
    if any(cell.cell_type == "code" for cell in notebook.cells):
        _run(notebook, path, name, work, timeout)
    seconds = time.monotonic() - start
    bundle = CacheBundleIn(notebook, str(path), data={"execution_seconds": round(seconds)})
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    return True


def _run(notebook: nbformat.NotebookNode, path: Path, name: str, work: Path, timeout: int) -> None:
    lines = notebook.metadata["source_map"]
    total = len(notebook.cells)
    now = {"cell": 0}

    def on_start(cell: Any, cell_index: int) -> None:
        now["cell"] = cell_index
        if sys.stdout.isatty():
            print(f"\r  {name}: cell {cell_index + 1} of {total} ", end="", flush=True)

    client = NotebookClient(
        notebook,
        timeout=timeout,
        startup_timeout=180,
        kernel_name=notebook.metadata.get("kernelspec", {}).get("name", "python3"),
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        allow_errors=False,
        store_widget_state=False,  # the page mounts the widgets itself; it would double its size
        on_cell_execute=on_start,
    )
    try:
        client.execute(env=kernel_environment(work))
    except CellTimeoutError as error:
        raise ChapterError(
            f"{where(name, lines, now)} ran longer than {timeout} s (`execute: timeout` in "
            f"_config.yml):\n{_excerpt(notebook.cells[now['cell']].source)}"
        ) from error
    except CellExecutionError as error:
        reason = f"{error.ename}: {ANSI.sub('', error.evalue)}"
        if error.ename == "StdinNotImplementedError":
            reason = "asks for input (input()), and nobody is there to answer"
        trace = "\n".join(ANSI.sub("", str(error)).splitlines()[-25:])
        raise ChapterError(f"{where(name, lines, now)} failed: {reason}\n\n{trace}") from error
    except DeadKernelError as error:
        raise ChapterError(
            f"{where(name, lines, now)} killed its kernel (out of memory?)"
        ) from error
    finally:
        if sys.stdout.isatty():
            print("\r" + " " * 78 + "\r", end="", flush=True)
    for number, cell in enumerate(notebook.cells):
        texts = [o.text for o in cell.get("outputs", []) if o.get("name") == "stderr"]
        warned = WARNING.search("".join(texts))
        if warned:
            place = where(name, lines, {"cell": number})
            raise ChapterError(f"{place} warns: {warned[0].strip()}")


def where(name: str, lines: list[int], now: dict[str, int]) -> str:
    """`chapters/11-grpo.md, line 40: cell 7`."""
    return f"{name}, line {lines[now['cell']] + 1}: cell {now['cell'] + 1}"


def _excerpt(source: str, count: int = 12) -> str:
    return "\n".join("    " + line for line in source.splitlines()[:count])
