"""`python -m book tidy`: write the chapters in the very form in which JupyterLab saves them.

After that, opening a chapter in JupyterLab, running it and saving it changes nothing in the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
from jupytext.config import load_jupytext_configuration_file

from book.bootstrap import ROOT


def saved_form(path: Path) -> str:
    """The text that JupyterLab (through jupytext) writes when it saves this page unchanged."""
    config = load_jupytext_configuration_file(str(ROOT / "pyproject.toml"))
    notebook = jupytext.read(path, config=config)
    return jupytext.writes(notebook, fmt="md:myst", config=config).rstrip("\n") + "\n"


def chapters(folder: Path = ROOT / "chapters") -> list[Path]:
    """The pages that are notebooks."""
    header = "format_name: myst"
    return [p for p in sorted(folder.glob("*.md")) if header in p.read_text("utf-8")[:600]]


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    changed = []
    for path in chapters():
        text, saved = path.read_text("utf-8"), saved_form(path)
        if text != saved:
            changed.append(path)
            if not check:
                path.write_text(saved, encoding="utf-8")
    for path in changed:
        print(f"{'not tidy' if check else 'tidied'}: {path.relative_to(ROOT)}")
    if check and changed:
        print("run `python -m book tidy`", file=sys.stderr)
    return int(check and bool(changed))
