"""Turn a chapter into a plain .ipynb for Colab and for download.

Plain Jupyter knows no MyST: directives become quoted blocks, quoted values become their text, and
the first cell installs the project when it finds itself in Colab.
"""

from __future__ import annotations

import re

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook

from book import pages

INSTALL = """\
# In Google Colab this fetches and installs the project; everywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    !git clone -q --depth 1 --branch {branch} {url} project
    %pip install -q "./project[widgets]"
    %cd -q project/chapters
    sys.path.append("..")  # pages that show the tests' numbers read them there
    from google.colab import output

    output.enable_custom_widget_manager()
"""
OPEN = re.compile(r"^\s*([`:]{3,})\{([\w:-]+)\}[ \t]*(.*)$")
OPTION = re.compile(r"^\s*:[\w-]+:")
LABEL = re.compile(r"^\([\w-]+\)=\s*$")
WORDLESS = {"exercise-end", "solution-end", "bibliography", "contents"}
TITLES = {"exercise-start": "Exercise.", "exercise": "Exercise.", "solution-start": "Solution."}


def convert(text: str, values: dict[str, str], url: str, branch: str) -> str:
    """The notebook of a page, as the text of an .ipynb file (the same bytes for the same page).

    values: what the build computed for the page's {eval} names. url, branch: where Colab installs
    the project from.
    """
    notebook = read_myst_markdown_notebook(text, config=pages._parser())
    install = nbformat.v4.new_code_cell(INSTALL.format(url=url, branch=branch).rstrip())
    cells = [install]
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "hidden-test" in tags:
            continue
        if "solution" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "markdown":
            cell.source = plain_markdown(cell.source, values)
        if cell.source.strip():
            cells.append(cell)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    notebook.cells = cells
    notebook.nbformat_minor = 5
    notebook.metadata = nbformat.from_dict(
        {key: notebook.metadata[key] for key in ("kernelspec",) if key in notebook.metadata}
    )
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def plain_markdown(source: str, values: dict[str, str]) -> str:
    """MyST to what every notebook program renders: directives as block quotes, roles as text."""
    lines: list[str] = []
    fences: list[tuple[str, str]] = []  # (fence, kind) of the open blocks: quote, bare or code
    options = False  # between the first line of a directive and its text
    for line in source.splitlines():
        inside = fences[-1][1] if fences else ""
        mark = "> " * sum(kind == "quote" for _, kind in fences)
        directive, code = OPEN.match(line), re.match(r"\s*(`{3,})\w*\s*$", line)
        if fences and line.strip() == fences[-1][0]:
            fences.pop()
            lines += {"code": [mark + line], "quote": [mark.removesuffix("> ")], "bare": []}[inside]
            options = False
        elif inside == "code":
            lines.append(mark + line)
        elif directive:
            fence, name, title = directive.groups()
            head = " ".join(filter(None, [TITLES.get(name, ""), title]))
            if name in TITLES:
                lines += [f"**{head}**", ""]
            elif name not in WORDLESS:
                word = "" if name == "admonition" else name.capitalize()
                lines += ["", f"{mark}> **{': '.join(filter(None, [word, title]))}**", mark + ">"]
            fences.append((fence, "bare" if name in TITLES or name in WORDLESS else "quote"))
            options = True
        elif code:
            fences.append((code[1], "code"))
            lines.append(mark + line)
        elif not (options and OPTION.match(line)) and not LABEL.match(line):
            options = False
            lines.append(mark + _plain_roles(line, values))
    return "\n".join(lines).strip("\n")


def _plain_roles(line: str, values: dict[str, str]) -> str:
    line = pages.EVAL.sub(lambda match: values.get(match[1], f"`{match[1]}`"), line)
    line = re.sub(r"\{(?:ref|doc|numref|eq|cite\w*)\}`([^`<]+?)(?:\s*<[^>`]*>)?`", r"\1", line)
    return re.sub(r"\{math\}`([^`]+)`", r"$\1$", line)
