"""The build: what it makes of a page, and above all what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from book import dependencies
from book.build import build
from book.execute import ChapterError, execute_page

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).resolve().parents[2]
HEADER = (DATA / "demo.md").read_text("utf-8").split("# A demonstration")[0]


def make_source(folder: Path, **pages: str) -> Path:
    """A small book: an index and the given pages."""
    (folder / "book").mkdir(parents=True, exist_ok=True)
    (folder / "chapters").mkdir(exist_ok=True)
    (folder / "index.md").write_text("# A small book\n\nText.\n", encoding="utf-8")
    toc = "format: jb-book\nroot: index\nchapters:\n"
    for name, text in pages.items():
        (folder / "chapters" / f"{name}.md").write_text(text, encoding="utf-8")
        toc += f"  - file: chapters/{name}\n"
    (folder / "book" / "_toc.yml").write_text(toc, encoding="utf-8")
    return folder


def cell(code: str) -> str:
    return f"```{{code-cell}} ipython3\n{code}\n```\n\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration page, built; the folder holds source and build."""
    folder = tmp_path_factory.mktemp("demo")
    make_source(folder, demo=(DATA / "demo.md").read_text("utf-8"))
    build(folder, work=folder / "build")
    return folder


@pytest.fixture(scope="module")
def soup(demo: Path) -> BeautifulSoup:
    html = (demo / "build" / "html" / "chapters" / "demo.html").read_text("utf-8")
    return BeautifulSoup(html, "html.parser")


def test_quoted_values_stand_in_the_text(soup):
    text = " ".join(soup.article.get_text().split())
    assert "There are six or 6 right answers" in text
    assert "a third is 0.333" in text
    assert [td.get_text() for td in soup.article.select("td")][:2] == ["six", "7"]
    assert "an item with 0.333" in text
    assert "A note with 0.333" in text
    assert "Dividing by 6" in text
    assert soup.article.select("em .quoted-value")
    assert "{eval}`nothing`" in text  # a code block is left alone


def test_cells_of_an_exercise(soup):
    stub = soup.find(id="exercise-double")
    assert "NotImplementedError" in stub.get_text()
    folded = soup.select("div.tag_solution details")
    assert len(folded) == 1
    assert "Show the solution" in folded[0].summary.get_text()
    assert "return x + x" in folded[0].get_text()
    assert "assert double(2) == 4" in soup.article.get_text()
    assert "unseen" not in str(soup)  # the hidden test ran, and is not on the page


def test_a_printed_source_is_shown_as_code_of_the_page(soup):
    block = next(b for b in soup.select("div.highlight-python") if "def shorten" in b.get_text())
    assert block.select("span.k")
    assert "output_html" not in str(soup)  # the fixed colours of IPython's own HTML


def test_figures_are_svg_with_a_description(soup):
    images = soup.article.select("div.cell_output img")
    assert [image["alt"] for image in images] == ["A line that rises"]
    assert images[0]["src"].endswith(".svg")


def test_the_downloaded_notebook(demo, soup):
    path = demo / "build" / "html" / "_sources" / "chapters" / "demo.ipynb"
    notebook = json.loads(path.read_text("utf-8"))
    text = "".join("".join(c["source"]) for c in notebook["cells"])
    assert "google.colab" in "".join(notebook["cells"][0]["source"])
    assert "There are six or 6 right answers" in text
    assert "{eval}`word`" not in text
    assert "```{note}" not in text
    assert ":::" not in text
    assert "unseen" not in text
    assert any(link["href"].endswith("demo.ipynb") for link in soup.select("a[href]"))
    colab = [a["href"] for a in soup.select("a[href]") if "colab" in a["href"]]
    assert len(colab) == 1
    assert colab[0].endswith("/blob/notebooks/chapters/demo.ipynb")


def test_two_builds_from_nothing_are_the_same_bytes(demo, tmp_path):
    again = make_source(tmp_path / "x", demo=(DATA / "demo.md").read_text("utf-8"))
    build(again, work=again / "build")
    ours, theirs = demo / "build" / "html", again / "build" / "html"
    names = sorted(p.relative_to(ours) for p in ours.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(theirs) for p in theirs.rglob("*") if p.is_file())
    skip = {Path(".buildinfo")}
    differ = [n for n in names if n not in skip]
    differ = [n for n in differ if (ours / n).read_bytes() != (theirs / n).read_bytes()]
    assert differ == []


def test_text_edit_runs_nothing_and_code_edit_runs_the_page(tmp_path, capfd, monkeypatch):
    text = HEADER + "# Page\n\n" + cell("print(1 + 1)") + "Old words.\n"
    source = make_source(tmp_path, page=text)
    build(source, work=source / "build")
    assert "ran chapters/page.md" in capfd.readouterr().out
    page = source / "chapters" / "page.md"
    page.write_text(text.replace("Old words", "New words"), encoding="utf-8")
    index = build(source, work=source / "build")
    assert "ran chapters" not in capfd.readouterr().out
    html = index.parent / "chapters" / "page.html"
    assert "New words" in html.read_text("utf-8")
    page.write_text(text.replace("1 + 1", "1 + 41"), encoding="utf-8")
    build(source, work=source / "build")
    assert "ran chapters/page.md" in capfd.readouterr().out
    assert ">42" in html.read_text("utf-8")
    # as when a module that the page imports has changed (see test_dependencies.py)
    monkeypatch.setattr(dependencies, "fingerprint", lambda source: "another")
    assert execute_page(page, "chapters/page.md", source / "build", timeout=60)
    assert not execute_page(page, "chapters/page.md", source / "build", timeout=60)


def test_new_outputs_of_an_old_text_reach_the_page(tmp_path):
    """A copy of the project: a module that a page uses changes, and the page shows it."""
    for name in ("book", "widgets"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_config.yml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.rmtree(tmp_path / "book" / "locale", ignore_errors=True)
    (tmp_path / "rlcore").mkdir()
    module = tmp_path / "rlcore" / "__init__.py"
    used = "from rlcore import answer\n\nprint(answer)"
    make_source(tmp_path, page=HEADER + "# Page\n\n" + cell(used) + "It is {eval}`answer`.\n")
    for answer in ("old answer", "new answer"):
        module.write_text(f"answer = {answer!r}\n", encoding="utf-8")
        command = [sys.executable, "-c", "from book.build import build; build()"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert "ran chapters/page.md" in run.stdout
        html = (tmp_path / "build" / "html" / "chapters" / "page.html").read_text("utf-8")
        assert f'<span class="quoted-value">{answer}</span>' in html


def test_a_failed_cell_fails_every_build_until_it_is_mended(tmp_path):
    good = HEADER + "# Page\n\n" + cell("x = 1\nprint(x)")
    bad = good.replace("print(x)", "print(x / 0)")
    source = make_source(tmp_path, page=good)
    build(source, work=source / "build")
    page = source / "chapters" / "page.md"
    page.write_text(bad, encoding="utf-8")
    for _ in range(2):  # the second time too: no false green from the cache
        with pytest.raises(ChapterError, match=r"chapters/page\.md, line 16: cell 2.*ZeroDivision"):
            build(source, work=source / "build")
        assert not (source / "build" / "html").exists()
    page.write_text(good, encoding="utf-8")
    assert build(source, work=source / "build").is_file()


def test_a_warning_of_sphinx_fails_every_build(tmp_path, capfd):
    text = "# Page\n\nA [link](nowhere.md) that leads nowhere.\n"
    source = make_source(tmp_path, page=text)
    for _ in range(2):
        with pytest.raises(ChapterError, match="Sphinx warned"):
            build(source, work=source / "build")
        assert "nowhere.md" in capfd.readouterr().err
        assert not (source / "build" / "html").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("name = input('who? ')", r"cell 2 failed: asks for input"),
        ("import time\ntime.sleep(600)", r"cell 2 ran longer than 3 s .*\n +import time"),
        ("import warnings\nwarnings.warn('mind the gap')", r"cell 2 warns: .*mind the gap"),
        ("import os\nos._exit(1)", r"cell 2 killed its kernel"),
        ("raise KeyError('key')", r"line 16: cell 2 failed: KeyError"),
    ],
    ids=["input", "timeout", "warning", "dead kernel", "error"],
)
def test_a_page_that_does_not_run_is_named(tmp_path, code, message):
    path = tmp_path / "page.md"
    path.write_text(HEADER + "# Page\n\n" + cell(code), encoding="utf-8")
    with pytest.raises(ChapterError, match=rf"(?s)^chapters/page\.md, .*{message}"):
        execute_page(path, "chapters/page.md", tmp_path / "work", timeout=3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{eval}`nothing`", "quotes 'nothing', which no cell above this line binds"),
        ("{eval}`later`\n\n" + cell("later = 1"), "quotes 'later', which no cell above"),
        (cell("x = 1") + "{eval}`x`\n\n" + cell("x = 2"), "quotes 'x', which the cell at line"),
        (cell("x = 1") + "{eval}`x +`", "is not Python"),
    ],
    ids=["unknown", "later", "rebound", "syntax"],
)
def test_a_quote_that_cannot_be_right_is_named(tmp_path, body, message):
    path = tmp_path / "page.md"
    text = HEADER + "# Page\n\n" + cell("y = 0") + body + "\n"
    path.write_text(text, encoding="utf-8")
    line = 1 + next(n for n, words in enumerate(text.splitlines()) if "{eval}" in words)
    with pytest.raises(ChapterError, match=rf"page\.md: line {line}: .*{re.escape(message)}"):
        execute_page(path, "page.md", tmp_path / "work", timeout=60)


def test_a_cell_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(HEADER + "# Page\n\n" + cell("---\ntags: [a\n---\nx = 1"), encoding="utf-8")
    with pytest.raises(ChapterError, match=r"^page\.md: Code cell 1 at line 15 could not be read"):
        execute_page(path, "page.md", tmp_path / "work", timeout=60)


@pytest.mark.parametrize("value", ["None", "[1]", "True", "__import__('numpy').float64(1)"])
def test_only_text_and_numbers_can_be_quoted(tmp_path, value):
    path = tmp_path / "page.md"
    path.write_text(HEADER + cell(f"v = {value}") + "It is {eval}`v`.\n", encoding="utf-8")
    with pytest.raises(ChapterError, match=r"failed: TypeError: \{eval\}`v` is a"):
        execute_page(path, "page.md", tmp_path / "work", timeout=60)


def test_a_page_missing_from_the_disk_is_named(tmp_path):
    source = make_source(tmp_path, page="# Page\n")
    (source / "chapters" / "page.md").unlink()
    with pytest.raises(ChapterError, match=r"lists 'chapters/page', but .* does not exist"):
        build(source, work=source / "build")


def test_messages_for_translators_are_extracted(demo, tmp_path):
    """The Korean edition starts from these files; they hold the text with its roles as written."""
    source = tmp_path / "source"
    shutil.copytree(demo, source, ignore=shutil.ignore_patterns("html", "doctrees"))
    build(source, work=source / "build", builder="gettext")
    messages = (source / "build" / "gettext" / "chapters" / "demo.pot").read_text("utf-8")
    assert "There are {eval}`word` or {eval}`count` right answers" in messages
    assert "unseen" not in messages
