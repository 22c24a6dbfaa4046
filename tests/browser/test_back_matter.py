"""The pages behind the chapters: conventions and parity, and the reference of rlcore."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup, Tag

from book.build import build
from rlcore import algorithms, objectives, preferences
from rlcore.objectives import surrogates
from tests.parity.vectors import VECTORS, comparison

ROOT = Path(__file__).resolve().parents[2]
CONVENTIONS, REFERENCE = "chapters/conventions", "chapters/reference"
MARKUP = re.compile(r"[$`\\]|:\w+:|\*\*|^\.\.(\s|$)|\w_\s*$|\|\w+\||::")
LOOKS = [(1200, "light"), (390, "dark")]


def article(book: Path, name: str) -> Tag:
    soup = BeautifulSoup((book / f"{name}.html").read_text("utf-8"), "html.parser")
    assert soup.article is not None
    return soup.article


def tables(book: Path) -> dict[str, list[list[str]]]:
    """Caption -> rows of the tables of the page of conventions, the header first."""
    found = {}
    for table in article(book, CONVENTIONS).select("table"):
        rows = [[cell.text for cell in row.select("th, td")] for row in table.select("tr")]
        assert table.caption is not None
        found[table.caption.text] = rows
    return found


# --- the reference ------------------------------------------------------------------------------


def documented(book: Path) -> set[str]:
    """Full names of what the reference describes."""
    return {str(tag["id"]) for tag in article(book, REFERENCE).select("dl.py > dt[id]")}


def test_every_public_name_is_in_the_reference(built_book):
    names = documented(built_book)
    last = {name.rpartition(".")[2] for name in names}
    assert set(objectives.__all__) <= last
    assert {"rlcore.to_trl", "rlcore.trl_export.TrlDifference"} <= names
    for module in (algorithms, preferences, surrogates):
        public = {
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) or inspect.isclass(value)
            if value.__module__.startswith("rlcore.") and not name.startswith("_")
            if value.__module__ == module.__name__ or hasattr(module, "__all__")
        }
        public &= set(getattr(module, "__all__", public))
        assert public
        assert {f"{module.__name__}.{name}" for name in public} <= names
    readme = (ROOT / "README.md").read_text("utf-8")
    used = {
        f"{module}.{name}"
        for module, line in re.findall(r"^from (rlcore[\w.]*) import (.+)$", readme, re.M)
        for name in line.split(", ")
        if callable(getattr(importlib.import_module(module), name))
    }
    assert used
    assert used <= names


def test_the_reference_shows_no_markup(built_book):
    page = article(built_book, REFERENCE)
    assert len(page.select(".math")) > 100
    for tag in page.select(
        "script, style, code, pre, .math, dt.sig, .problematic, .system-message"
    ):
        assert not {"problematic", "system-message"} & set(tag.get("class") or [])
        tag.decompose()
    texts = [str(text).strip() for text in page.find_all(string=True)]
    assert [text for text in texts if MARKUP.search(text)] == []


def test_each_source_of_the_reference_is_where_it_says(built_book):
    """The address leads to the lines of this very function."""
    signs = article(built_book, REFERENCE).select("dl.py > dt[id]:has(a.viewcode-link, a[href])")
    seen = 0
    for sign in signs:
        link = sign.find("a", href=re.compile("/blob/"))
        if link is None:
            continue  # a constant
        path, _, lines = unquote(str(link["href"])).partition("#")
        source = (ROOT / path.partition("/blob/main/")[2]).read_text("utf-8").splitlines()
        first, last = (int(number.removeprefix("L")) for number in lines.split("-"))
        name = str(sign["id"]).rpartition(".")[2]
        head = "\n".join(source[first - 1 : first + 2])
        assert re.search(rf"\b(def|class) {name}\b", head), sign["id"]
        assert first < last <= len(source)
        seen += 1
    assert seen > 50


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_every_formula_of_the_reference_is_set(built_book, new_page, width, scheme):
    page, seen = new_page(width=width, color_scheme=scheme)
    page.goto((built_book / f"{REFERENCE}.html").as_uri())
    page.wait_for_function("() => window.MathJax?.startup?.promise !== undefined")
    page.evaluate("() => window.MathJax.startup.promise.then(() => true)")
    formulas = page.locator("article .math")
    assert formulas.count() > 100
    unset = "list => list.filter(node => !node.querySelector('mjx-container svg')).length"
    assert formulas.evaluate_all(unset) == 0
    assert page.locator("mjx-merror").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.problems() == []


# --- conventions and parity ---------------------------------------------------------------------


def test_every_row_has_its_answers_and_its_notes(built_book):
    found = tables(built_book)
    text = {re.sub(r"\s+", " ", cell) for rows in found.values() for row in rows for cell in row}
    five = {row[0]: row[1:] for row in found["Five answers for each algorithm"]}
    assert five.pop("algorithm")[:5] == list(algorithms.QUESTIONS)
    assert five.keys() == {row.title for row in algorithms.ROWS}
    for row in algorithms.ROWS:
        assert five[row.title][:5] == list(row.five_answers().values())
    three = {row[0]: row[1:] for row in found["Three answers for each preference method"]}
    for method in preferences.ROWS:
        assert three[method.title][:3] == list(method.three_answers().values())
    notes = " ".join(text)
    for row in (*algorithms.ROWS, *preferences.ROWS):
        assert all(note in notes for note in row.notes), row.name


def test_the_settings_are_the_fields_of_the_rows(built_book):
    found = tables(built_book)
    shown: dict[str, dict[str, str]] = {row.title: {} for row in algorithms.ROWS}
    for caption, rows in found.items():
        if caption.startswith("Question"):
            for title, *cells in rows[1:]:
                shown[title] |= dict(zip(rows[0][1:], cells, strict=True))
    for row in algorithms.ROWS:
        for field, cell in shown[row.title].items():
            value = getattr(row, field)
            wanted = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            if isinstance(wanted, int | float):
                wanted = f"{wanted:g}"
            assert cell in ("–", wanted), (row.name, field)
    grpo = shown["GRPO"]
    assert (grpo["ddof"], grpo["eps"], grpo["kl"], grpo["kl_estimator"]) == ("0", "0", "loss", "k3")
    assert (grpo["epsilon_low"], grpo["aggregation"]) == ("0.2", "sequence_mean")
    assert shown["TRL's bnpo"]["ddof"] == "1"
    assert shown["DCPO"]["clip_range"] == "dynamic"
    assert shown["GSPO"]["ratio_level"] == "sequence"
    assert shown["REINFORCE"]["epsilon_low"] == shown["REINFORCE"]["ddof"] == "–"


def test_every_vector_is_compared(built_book):
    rows = [row for rows in tables(built_book).values() if rows[0][0] == "case" for row in rows[1:]]
    cases = [comparison(name) for name in VECTORS]
    assert len(cases) == 74
    assert len(rows) == sum(max(1, len(case.cross_checks)) for case in cases)
    titles = {row.name: row.title for row in (*algorithms.ROWS, *preferences.ROWS)}
    for case in cases:
        method = case.vector.method
        name = f"{titles.get(method, method)}: {case.vector.title}"
        mine = [cells for title, *cells in rows if title == name]
        assert len(mine) == max(1, len(case.cross_checks)), name
        value = case.ours[case.vector.headline]
        for cells in mine:
            if value.numel() == 1 and "…" not in cells[0]:
                assert float(cells[0].replace("−", "-")) == pytest.approx(value.item(), rel=1e-4)
    page = article(built_book, CONVENTIONS)
    quoted = [tag.text for tag in page.select(".quoted-value")]
    assert quoted[0] == "74"
    assert str(sum(len(case.cross_checks) for case in cases)) in quoted


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_wide_table_scrolls_in_its_box_by_keyboard(built_book, new_page, scheme):
    page, seen = new_page(width=390, color_scheme=scheme)
    page.goto((built_book / f"{CONVENTIONS}.html").as_uri())
    boxes = page.locator("article .table-scroll")
    names = boxes.evaluate_all("list => list.map(box => box.ariaLabel)")
    assert len(set(names)) == len(names) > 8
    for box in page.locator("article .table-scroll.wide").all():
        assert box.get_attribute("role") == "region"
        box.scroll_into_view_if_needed()
        box.focus()
        first = box.locator("tbody th").first
        left = first.bounding_box()["x"]
        caption = box.locator("caption span").bounding_box()["x"]
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        page.wait_for_function("document.activeElement.scrollLeft > 30")
        assert first.bounding_box()["x"] == pytest.approx(left, abs=1)
        assert box.locator("caption span").bounding_box()["x"] == pytest.approx(caption, abs=1)
        # what passes below it does not show through
        ground = first.evaluate("cell => getComputedStyle(cell).backgroundColor")
        assert re.fullmatch(r"rgb\(\d+, \d+, \d+\)", ground)
        assert first.bounding_box()["width"] < 200
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert seen.problems() == []


@pytest.mark.parametrize(
    ("words", "name"), [("group_advantages", REFERENCE), ("parity", CONVENTIONS)]
)
def test_search_finds_the_page(built_book, page, words, name):
    page.goto((built_book / "search.html").as_uri() + f"?q={words}")
    page.locator("ul.search li a").first.wait_for()
    hrefs = page.locator("ul.search li a").evaluate_all("l => l.map(a => a.getAttribute('href'))")
    assert any(name in href for href in hrefs)


def test_translators_get_both_pages(built_book, tmp_path):
    """From the outputs that the build stored: nothing is run again."""
    shutil.copytree(built_book.parent / ".jupyter_cache", tmp_path / ".jupyter_cache")
    folder = build(work=tmp_path, builder="gettext").parent / "chapters"
    conventions = (folder / "conventions.pot").read_text("utf-8")
    assert "An algorithm is one row of answers to the five questions." in conventions
    assert "There are {eval}`v_cases` of them." in conventions
    reference = (folder / "reference.pot").read_text("utf-8")
    assert "Import each name from" in reference
