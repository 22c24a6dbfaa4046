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
# In Google Colab this installs the project; everywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    %pip install -q "from-reward-to-policy[widgets] @ git+{url}@{branch}"
    from google.colab import output

    output.enable_custom_widget_manager()
"""
OPEN = re.compile(r"^\s*([`:]{3,})\{([\w:-]+)\}[ \t]*(.*)$")
OPTION = re.compile(r"^\s*:[\w-]+:")
WORDLESS = {"exercise-end", "solution-end", "bibliography", "contents"}
TITLES = {"exercise-start": "Exercise", "exercise": "Exercise", "solution-start": "Solution"}


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
    stack: list[str] = []  # the fences of the open directives
    options = False
    for line in source.splitlines():
        opened = OPEN.match(line)
        if opened:
            fence, name, title = opened.groups()
            if name in WORDLESS or name.endswith("-start"):
                word = TITLES.get(name)
                lines += [f"**{word}.** {title}".rstrip(), ""] if word else []
                stack.append("drop " + fence)
            else:
                word = name.split("-")[0].capitalize() if name != "admonition" else ""
                head = f"**{': '.join(filter(None, [word, title]))}**"
                stack.append(fence)
                lines += ["", "> " * _depth(stack) + head, "> " * _depth(stack)]
            options = True
            continue
        if stack and line.strip() and line.strip() == stack[-1].removeprefix("drop "):
            stack.pop()
            lines.append("> " * _depth(stack))
            options = False
            continue
        if options and OPTION.match(line):
            continue
        options = False
        if stack and stack[-1].startswith("drop "):
            continue
        if re.match(r"^\([\w-]+\)=\s*$", line):
            continue
        lines.append("> " * _depth(stack) + line)
    text = "\n".join(lines)
    text = pages.EVAL.sub(lambda match: values.get(match[1], f"`{match[1]}`"), text)
    text = re.sub(r"\{(?:ref|doc|numref|eq|cite\w*)\}`([^`<]+?)(?:\s*<[^>`]*>)?`", r"\1", text)
    return re.sub(r"\{math\}`([^`]+)`", r"$\1$", text).strip("\n")


def _depth(stack: list[str]) -> int:
    return sum(not fence.startswith("drop ") for fence in stack)
