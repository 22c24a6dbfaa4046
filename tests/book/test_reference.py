"""From docstrings to a page: mathematics, paragraphs, what is shown, and when it is stale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from book.build import build
from book.execute import ChapterError
from book.reference import UnevenMath, prepare, source_address

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = ("logits", "old_logprobs", "beta")


@pytest.mark.parametrize(
    ("text", "prepared"),
    [
        ("the mean $\\bar R$.", "the mean :math:`\\bar R`."),
        ("($x$) and $y$-th", "(:math:`x`) and :math:`y`-th"),
        ("$x$s and 2$x$", ":math:`x`\\ s and 2\\ :math:`x`"),
        ("over\n  $a +\n  b$ two lines", "over\n  :math:`a + b` two lines"),
        ("``$x$`` and $y$", "``$x$`` and :math:`y`"),
        ("so::\n\n    $x$\n\nthen $y$", "so::\n\n    $x$\n\nthen :math:`y`"),
        ("- so::\n\n      $x$\n\n  then $y$", "- so::\n\n      $x$\n\n  then :math:`y`"),
        ("A:\n$$\na \\\\\nb\n$$\nThen.", "A:\n\n.. math::\n\n   a \\\\\n   b\n\nThen."),
        ("- A:\n\n  $$\n  a\n  $$", "- A:\n\n\n  .. math::\n\n     a\n\n"),
    ],
)
def test_mathematics(text, prepared):
    assert prepare(text) == prepared


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("costs $5 a piece", "a [$] without its partner: costs [$]5 a piece"),
        ("$x$ and $y", "a [$] without its partner"),
        ("a price of \\$", "a [$] without its partner"),
        ("A:\n$$\nx\n", "nothing closes"),
    ],
)
def test_mathematics_without_an_end(text, message):
    with pytest.raises(UnevenMath, match=message):
        prepare(text)


@pytest.mark.parametrize(
    ("text", "prepared"),
    [
        ("One.\nbeta: its weight.", "One.\n\n``beta``: its weight."),
        ("logits (B, T): of\nbeta: x", "\n``logits`` (B, T): of\n\n``beta``: x"),
        ("logits, beta (B,) -> (B,)", "\n``logits``, ``beta`` (B,) -> (B,)"),
        ("gamma: no argument\nof this", "gamma: no argument\nof this"),
        ("$$\nbeta: 1\n$$", "\n\n.. math::\n\n   beta: 1\n\n"),
        ("One.\nValueError: beta < 0.", "One.\n\nValueError: beta < 0."),
        ("One.\nRaises NonFiniteError.", "One.\n\nRaises NonFiniteError."),
    ],
)
def test_paragraphs(text, prepared):
    assert prepare(text, PARAMETERS) == prepared


PACKAGE = {
    "__init__.py": """from toyref.part import CHOICES, Pair, Rows, twice

__all__ = ["CHOICES", "Rows", "twice"]
""",
    "part.py": '''"""Question 1: how much is $x$?"""

from dataclasses import dataclass, field
from math import pi
from typing import NamedTuple

CHOICES = ("once", "twice")
LIMIT = 3


class Pair(NamedTuple):
    """Two numbers."""

    left: float


@dataclass
class Rows:
    """Some rows."""

    rows: list[float] = field(default_factory=list)
    names: dict[str, float] = field(default_factory=dict)

    def count(self) -> int:
        """How many."""
        return len(self.rows)

    def _inner(self) -> int:
        """Not for others."""
        return 0


def helper(x: float) -> float:
    """Not for others."""
    return x


def twice(x: float, *, how: "str | None" = None) -> float:
    r"""Twice $x$, that is

    $$
    \\frac{4x}{2}
    $$

    how: nothing; ``$how$`` is a literal and `how` too.
    """
    return 2 * x
''',
}
PAGE = (
    "# Page\n\n```{eval-rst}\n.. automodule:: toyref.part\n   :members:\n   :undoc-members:\n```\n"
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A book of one page, on a package of its own."""
    (tmp_path / "toyref").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "toyref" / name).write_text(text, encoding="utf-8")
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "_toc.yml").write_text(
        "format: jb-book\nroot: index\nchapters:\n  - file: page\n", encoding="utf-8"
    )
    (tmp_path / "index.md").write_text("# Toy\n", encoding="utf-8")
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def page(source: Path) -> BeautifulSoup:
    index = build(source, work=source / "build")
    return BeautifulSoup((index.parent / "page.html").read_text("utf-8"), "html.parser")


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_page_follows_its_docstrings(toy):
    first = page(toy)
    names = [tag.text for tag in first.select(".sig-name")]
    assert names == ["CHOICES", "Rows", "count", "twice"]
    assert "('once', 'twice')" in first.article.text
    assert "immutable" not in first.article.text  # what Python says of every tuple
    fields = [tag.text for tag in first.select("em.sig-param")]
    assert fields[:2] == ["rows: list[float] = ...", "names: dict[str, float] = ..."]
    assert [tag.text.strip() for tag in first.select(".math")] == [
        "\\(x\\)",
        "\\(x\\)",
        "\\[\\frac{4x}{2}\\]",
    ]
    assert [tag.text for tag in first.select("dd code")] == ["how", "$how$", "how"]

    change(toy / "toyref" / "part.py", "Twice $x$", "Double $x$")
    assert "Double" in page(toy).article.text
    change(toy / "toyref" / "__init__.py", '["CHOICES", ', '["Pair", "CHOICES", ')
    again = page(toy)
    assert {tag.text for tag in again.select(".sig-name")} == {*names, "Pair"}
    assert "Alias for field" not in again.article.text
    change(toy / "toyref" / "part.py", "CHOICES =", '__all__ = ["helper"]\n\nCHOICES =')
    assert [tag.text for tag in page(toy).select(".sig-name")] == ["helper"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Twice $x$", "Twice $x", "docstring of toyref.part.twice: a [$] without its partner"),
        ("Twice $x$", "Twice |x|", "Undefined substitution referenced"),
        ("Twice $x$", "Twice *x", "Inline emphasis start-string without end-string"),
    ],
)
def test_a_docstring_that_cannot_be_read_fails_the_build(toy, capfd, old, new, message):
    change(toy / "toyref" / "part.py", old, new)
    with pytest.raises(ChapterError, match="Sphinx warned"):
        page(toy)
    assert message.replace("[$]", "$") in capfd.readouterr().err


def test_messages_for_translators_hold_the_docstrings(toy):
    build(toy, work=toy / "build", builder="gettext")
    messages = (toy / "build" / "gettext" / "page.pot").read_text("utf-8")
    assert "Question 1: how much is" in messages
    assert str(toy) not in messages


def test_the_address_of_a_source():
    url = "https://example.org/x"
    info = {"module": "rlcore.tables", "fullname": "Table.__repr__"}
    address = source_address("py", info, url, "main")
    path, _, lines = address.partition("#")
    assert path == f"{url}/blob/main/rlcore/tables.py"
    first, last = (int(part.removeprefix("L")) for part in lines.split("-"))
    source = (ROOT / "rlcore" / "tables.py").read_text("utf-8").splitlines()
    assert source[first - 1].strip().startswith("def __repr__")
    assert source[last - 1].strip().startswith("return")
    other = {"module": "rlcore.objectives.kl", "fullname": "KL_ESTIMATORS"}
    assert source_address("py", other, url, "main") is None
    assert source_address("py", {"module": "json", "fullname": "dumps"}, url, "main") is None
    assert "toyref" not in sys.modules
