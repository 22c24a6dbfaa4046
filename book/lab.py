"""`python -m book lab`: JupyterLab on the project's folder, chapters opening as notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from book.bootstrap import ROOT


def environment() -> dict[str, str]:
    """Settings for JupyterLab and its kernels: the book's defaults, and the project importable."""
    first = {"JUPYTER_CONFIG_PATH": str(ROOT / "book" / "jupyter"), "PYTHONPATH": str(ROOT)}
    for name, path in first.items():
        if os.environ.get(name):
            first[name] = path + os.pathsep + os.environ[name]
    return {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1", **first}


def command(arguments: list[str], root: Path = ROOT) -> list[str]:
    """How JupyterLab is started; `arguments` are its own (such as --no-browser)."""
    line = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}"]
    line += ["--LabApp.default_url=/lab/tree/chapters"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        line.append("--allow-root")  # a container; on a laptop nobody is root
    return [*line, *arguments]


def main(arguments: list[str]) -> int:
    print("JupyterLab starts; double-click a file in chapters/ to open it as a notebook.")
    print("Stop it with Ctrl-C.\n", flush=True)
    return subprocess.call(command(arguments), cwd=ROOT, env=environment())
