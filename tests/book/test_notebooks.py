"""The plain .ipynb of a chapter: readable where MyST is unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from book.config import read, sphinx_settings
from book.notebooks import convert, plain_markdown

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ("a {eval}`x` b", "a six b"),
        ("{math}`x^2` and {ref}`that <label>`", "$x^2$ and that"),
        (":::{note}\nText {eval}`x`.\n:::", "> **Note**\n>\n> Text six."),
        ("```{admonition} Look\n:class: tip\nText.\n```", "> **Look**\n>\n> Text."),
        ("(label)=\n## Title", "## Title"),
        (":::{exercise-start}\n:label: a\n:::\n\nDo it.", "**Exercise.**\n\n\nDo it."),
        ("```python\n{eval}`x`\n:::{note}\n```", "```python\n{eval}`x`\n:::{note}\n```"),
        (
            "::::{note}\n:::{tip} Inner\nDeep.\n:::\nShallow.\n::::",
            "> **Note**\n>\n>\n> > **Tip: Inner**\n> >\n> > Deep.\n>\n> Shallow.",
        ),
    ],
)
def test_myst_becomes_plain_markdown(source, plain):
    lines = [line.rstrip() for line in plain_markdown(source, {"x": "six"}).splitlines()]
    assert [line for line in lines if line.strip("> ")] == [
        line for line in plain.splitlines() if line.strip("> ")
    ]


def test_the_chapter_converts(tmp_path):
    text = (ROOT / "chapters" / "11-grpo.md").read_text("utf-8")
    first = convert(text, {}, "https://example.org/project", "main")
    assert first == convert(text, {}, "https://example.org/project", "main")
    notebook = json.loads(first)
    install = "".join(notebook["cells"][0]["source"])
    assert "--branch main https://example.org/project " in install
    tags = [tag for cell in notebook["cells"] for tag in cell["metadata"].get("tags", [])]
    assert "hidden-test" not in tags
    text = "\n".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )
    assert ":::{" not in text
    assert "```{" not in text


def test_the_install_cell_does_nothing_outside_colab():
    text = (ROOT / "tests" / "book" / "data" / "demo.md").read_text("utf-8")
    cell = json.loads(convert(text, {}, "https://example.org/x", "main"))["cells"][0]
    source = "".join(cell["source"]).splitlines()
    lines = [line for line in source if line and not line.startswith((" ", "#"))]
    assert lines == ["import sys", 'if "google.colab" in sys.modules:']


def test_jupyter_book_accepts_the_same_settings():
    """Jupyter Book's own reading of _config.yml agrees with ours where both have a say."""
    from jupyter_book.config import get_final_config, validate_yaml

    validate_yaml(read(), raise_on_errors=True)
    theirs, _ = get_final_config(
        user_yaml=read(), cli_config={"latex_individualpages": False}, validate=True
    )
    ours = sphinx_settings()
    keys = [key for key in ours if key.startswith(("nb_", "myst_", "mathjax", "gettext", "lang"))]
    assert len(keys) > 15
    for key in keys:
        assert ours[key] == theirs[key] or set(ours[key]) <= set(theirs[key]), key
