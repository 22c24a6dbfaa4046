"""Read a chapter: MyST Markdown in, a notebook out, ready to be run and shown.

Three things are added to what the file says, and none of them touches its text:

- a cell tagged `solution` folds, a cell tagged `hidden-test` runs but is not shown;
- a last, unseen cell evaluates the names that the prose quotes with {eval}`name`, so that they are
  stored with the other outputs and a cached run still has them;
- that cell also carries a fingerprint of all project code and data that the chapter uses, so that a
  change there (and only there) makes the stored outputs of this chapter stale.
"""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import yaml
from myst_nb.core.read import MystMetadataParsingError, read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig

from book import config, dependencies

EVAL = re.compile(r"\{eval\}`([^`]+)`")
FENCE = re.compile(r"^\s*(```+|~~~+)")
FOLD = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}


INNER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class PageError(Exception):
    """A page cannot be built as it is written; the message names the line."""


@cache
def _parser() -> MdParserConfig:
    """The Markdown extensions that `_config.yml` turns on: they decide where a fence ends."""
    return MdParserConfig(enable_extensions=set(config.read()["parse"]["myst_enable_extensions"]))


def read_page(text: str) -> nbformat.NotebookNode:
    """The notebook of one page (`nb_custom_formats` of myst-nb points here).

    Raises PageError when a cell's options are no YAML, when the prose quotes a name that no cell
    above it binds, or one whose value changes further down (the page and JupyterLab would differ).
    """
    try:
        notebook = read_myst_markdown_notebook(text, config=_parser(), add_source_map=True)
    except MystMetadataParsingError as error:  # names the line
        raise PageError(str(error)) from error
    lines = text.splitlines()
    starts = notebook.metadata["source_map"]
    for number, cell in enumerate(notebook.cells):
        # the reader drops the blank lines before a text but counts it from the first of them
        while cell.cell_type == "markdown" and not lines[starts[number]].strip():
            starts[number] += 1
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        _mark(cell)
    quotes = quoted(notebook)
    if code:
        _check_quotes(notebook, quotes)
        names = sorted({expression for _, expression in quotes})
        source = "\n".join(cell.source for cell in code)
        notebook.cells.append(_last_cell(names, dependencies.fingerprint(source)))
        starts.append(len(lines))
    elif quotes:
        raise PageError(f"line {quotes[0][0]}: {{eval}} on a page without code")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # nbformat draws random ones
    return notebook


def used(text: str) -> str:
    """The fingerprint of the code and data that a page uses; empty for a page without code."""
    cells = read_page(text).cells
    return cells[-1].source if cells and cells[-1].cell_type == "code" else ""


def _mark(cell: nbformat.NotebookNode) -> None:
    tags = list(cell.metadata.get("tags", []))
    if "hidden-test" in tags:
        tags.append("remove-cell")
    if "solution" in tags:
        tags.append("hide-cell")
        cell.metadata["mystnb"] = {**FOLD, **cell.metadata.get("mystnb", {})}
    if tags:
        cell.metadata["tags"] = tags


def _last_cell(names: list[str], fingerprint: str) -> nbformat.NotebookNode:
    source = f"# code and data used on this page: {fingerprint}"
    if names:
        source += f"\nfrom book.quoted import quote\n\nquote({names!r}, globals())"
    return nbformat.v4.new_code_cell(source, metadata={"tags": ["remove-cell"]})


def quoted(notebook: nbformat.NotebookNode) -> list[tuple[int, str]]:
    """All (line, expression) of {eval} in the prose, outside fenced code."""
    found = []
    for cell, start in zip(notebook.cells, notebook.metadata["source_map"], strict=False):
        if cell.cell_type != "markdown":
            continue
        for offset, line in _prose(cell.source):
            found += [(start + offset + 1, name) for name in EVAL.findall(line)]
    return found


def _prose(source: str) -> list[tuple[int, str]]:
    """The numbered lines of a Markdown cell that are not in a code block.

    The text inside a directive (a note, an exercise) is prose; that of `code-block`, `math` is not.
    """
    lines = []
    fences: list[tuple[str, bool]] = []  # (marker, whether code is inside), outermost first
    for number, line in enumerate(source.splitlines()):
        match = FENCE.match(line)
        marker, rest = (match[1], line.strip()[len(match[1]) :]) if match else ("", "")
        if marker and fences and not rest and marker.startswith(fences[-1][0]):
            fences.pop()
        elif fences and fences[-1][1]:
            continue
        elif marker:
            fences.append((marker, not re.match(r"\{(?!code|math)", rest)))
        if not (fences and fences[-1][1]):
            lines.append((number, line))
    return lines


def _bound(source: str) -> set[str]:
    """The names that running a cell binds at the top level."""
    names: set[str] = set()
    todo: list[Any] = [ast.parse(dependencies.without_magic(source))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
            continue  # what is bound inside stays inside
        elif isinstance(node, INNER):
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        todo += ast.iter_child_nodes(node)
    return names


def _check_quotes(notebook: nbformat.NotebookNode, quotes: list[tuple[int, str]]) -> None:
    bound = []  # (line of the cell, names) in the order of the page
    for cell, start in zip(notebook.cells, notebook.metadata["source_map"], strict=True):
        if cell.cell_type == "code":
            try:
                bound.append((start, _bound(cell.source)))
            except SyntaxError as error:
                line = start + (error.lineno or 1)
                raise PageError(f"line {line}: {error.msg}") from error
    for line, expression in quotes:
        try:
            tree = ast.parse(expression, mode="eval")
        except SyntaxError as error:
            raise PageError(f"line {line}: {{eval}}`{expression}` is not Python") from error
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name) or node.id in dir(builtins):
                continue
            if not any(node.id in names for start, names in bound if start < line):
                raise PageError(
                    f"line {line}: {{eval}}`{expression}` quotes {node.id!r}, "
                    "which no cell above this line binds"
                )
            again = [start + 1 for start, names in bound if start >= line and node.id in names]
            if again:
                raise PageError(
                    f"line {line}: {{eval}}`{expression}` quotes {node.id!r}, which the cell at "
                    f"line {again[0]} binds again: the page and JupyterLab would differ"
                )


def front_matter(path: Path) -> dict[str, Any]:
    """The YAML header of a page, empty if it has none."""
    match = re.match(r"---\n(.*?)\n---\n", path.read_text(encoding="utf-8"), re.DOTALL)
    return yaml.safe_load(match[1]) if match else {}
