"""The built pages as a reader meets them: from file://, with every other request refused."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from book.check import RAW_MATH, RAW_WIDGET, check_book

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["index", *(f"chapters/{path.stem}" for path in sorted((ROOT / "chapters").glob("*.md")))]
GRPO = "chapters/11-grpo"
LOOKS = [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")]
VISIBLE_TEXT = """() => {
  const copy = document.querySelector("article").cloneNode(true);
  const away = "script, style, code, pre, mjx-container, mjx-assistive-mml";
  for (const node of copy.querySelectorAll(away)) node.remove();
  return [...copy.querySelectorAll("*")].flatMap(node => [...node.childNodes])
    .filter(node => node.nodeType === 3).map(node => node.data.trim()).filter(Boolean);
}"""


def address(book: Path, name: str) -> str:
    return (book / f"{name}.html").as_uri()


def settle(page) -> None:
    """Wait until the mathematics is set."""
    page.wait_for_function("() => window.MathJax?.startup?.promise !== undefined")
    page.evaluate("() => window.MathJax.startup.promise.then(() => true)")


def test_the_checker_finds_nothing(built_book):
    assert check_book(built_book) == []


def test_every_page_of_the_table_of_contents_was_built(built_book):
    assert [name for name in NAMES if not (built_book / f"{name}.html").is_file()] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_page_is_whole(built_book, new_page, name, width, scheme):
    """Nothing from outside, a clean console, no sideways scrolling, nothing left unset."""
    page, seen = new_page(width=width, color_scheme=scheme)
    page.goto(address(built_book, name))
    if "math notranslate" in page.content():
        settle(page)
        page.locator("mjx-container svg").first.wait_for(state="attached")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    texts = page.evaluate(VISIBLE_TEXT)
    assert texts
    raw = [t for t in texts if RAW_MATH.search(t) or RAW_WIDGET.search(t) or "{eval}" in t]
    assert raw == []
    assert page.locator("mjx-merror").count() == 0
    assert page.locator("[data-widget-mount]:not([data-mounted])").count() == 0
    assert seen.problems() == []


HEADER_BUTTONS = ".bd-header-article .btn:visible"


@pytest.mark.parametrize("width", [320, 340, 360, 390])
def test_a_narrow_page_keeps_its_header_and_its_figures(built_book, new_page, width):
    """Every button lies on the page and apart from the others; a figure scrolls in its own box."""
    page, seen = new_page(width=width)
    page.goto(address(built_book, GRPO))
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [button.bounding_box() for button in page.locator(HEADER_BUTTONS).all()]
    assert len(boxes) == 8
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert all(a["x"] + a["width"] <= b["x"] + 0.5 for a, b in itertools.pairwise(boxes))
    figure = page.locator("div.cell_output > img").first
    frame = figure.locator("..")
    figure.scroll_into_view_if_needed()
    natural = figure.evaluate("img => img.complete && img.naturalWidth")
    assert figure.bounding_box()["width"] == pytest.approx(natural, abs=1)
    assert frame.bounding_box()["width"] < width < natural
    frame.focus()
    assert frame.evaluate("box => box === document.activeElement")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.activeElement.scrollLeft > 0")
    assert page.evaluate("scrollX") == 0
    assert seen.problems() == []


def test_each_button_of_the_header_shows_the_focus(built_book, new_page):
    page, _ = new_page(width=390)
    page.goto(address(built_book, GRPO))
    page.locator("a.btn[href*=colab]").focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")  # :focus-visible is the keyboard's
    names = []
    while page.evaluate("document.activeElement.closest('.bd-header-article') !== null"):
        names.append(page.evaluate("document.activeElement.ariaLabel"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outline")
        assert outline.endswith("solid 3px"), names[-1]
        page.keyboard.press("Tab")
    assert {"Source repositories", "Download this page", "Search"} <= set(names)
    assert len(names) >= 7


def widget(page, name: str, index: int = 0):
    return page.locator(f'[data-widget="{name}"]').nth(index)


def readout(root, name: str) -> float:
    return float(root.locator(f'[data-readout="{name}"]').get_attribute("data-value"))


def check_group(root, rewards: list[int], ddof: int = 0) -> None:
    """All readouts against arithmetic done here."""
    count = len(rewards)
    mean = sum(rewards) / count
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (count - ddof))
    wanted = [(r - mean) / std if std else 0.0 for r in rewards]
    assert readout(root, "mean") == pytest.approx(mean, abs=1e-9)
    assert readout(root, "std") == pytest.approx(std, abs=1e-9)
    found = [readout(root, f"advantage-{i + 1}") for i in range(count)]
    assert found == pytest.approx(wanted, abs=1e-9)
    assert root.locator('[data-readout^="advantage-"]').count() == count
    positive = sum(a for a in wanted if a > 0)
    assert readout(root, "sum-positive") == pytest.approx(positive, abs=1e-9)
    assert readout(root, "sum-negative") == pytest.approx(-positive, abs=1e-9)


PRESETS = {
    "6 of 8 correct": [1] * 6 + [0] * 2,
    "All correct": [1] * 8,
    "All wrong": [0] * 8,
    "One of 8 correct": [1] + [0] * 7,
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ddof", [0, 1])
def test_each_preset_reads_right(built_book, page, preset, ddof):
    page.goto(address(built_book, GRPO))
    root = widget(page, "GroupAdvantage")
    root.get_by_role("button", name=preset, exact=True).click()
    root.get_by_role("radio").nth(ddof).check()
    check_group(root, PRESETS[preset], ddof)


@pytest.mark.parametrize(("width", "scheme"), LOOKS[1:])
def test_the_group_works_by_keyboard_alone(built_book, new_page, width, scheme):
    page, seen = new_page(width=width, color_scheme=scheme)
    page.goto(address(built_book, GRPO))
    root = widget(page, "GroupAdvantage")
    root.get_by_role("button", name="6 of 8 correct", exact=True).focus()
    names = []
    for _ in range(40):  # Tab must leave the widget: nobody is trapped
        inside = root.evaluate("root => root.contains(document.activeElement)")
        if not inside:
            break
        names.append(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.id"))
        page.keyboard.press("Tab")
    assert not inside
    root.get_by_role("button", name="One of 8 correct", exact=True).focus()
    page.keyboard.press("Enter")
    check_group(root, PRESETS["One of 8 correct"])
    root.get_by_role("button", name="Response 2", exact=True).focus()
    page.keyboard.press("Space")
    check_group(root, [1, 1, 0, 0, 0, 0, 0, 0])
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    check_group(root, [1, 1, 1, 0, 0, 0, 0, 0])
    box = root.get_by_label("Group size", exact=True)
    box.focus()
    page.keyboard.press("ArrowUp")
    check_group(root, [1, 1, 1, 0, 0, 0, 0, 0, 0])
    assert seen.problems() == []


def test_every_widget_of_the_chapter_is_alive(built_book, page):
    page.goto(address(built_book, GRPO))
    names = set(page.locator("[data-widget]").evaluate_all("l => l.map(n => n.dataset.widget)"))
    assert names >= {"GroupAdvantage", "RareSuccess", "CreditShare", "AnswerBox"}
    for root in page.locator("[data-widget]").all():
        assert root.locator("button, input, select").count() > 0
        if root.get_attribute("data-widget") != "AnswerBox":  # it says nothing before an answer
            assert root.locator("[data-readout]").count() > 0


def test_the_widget_stands_with_the_numbers_of_the_text(built_book, page):
    """The worked example in the prose and the widget on it agree to the digits shown."""
    page.goto(address(built_book, GRPO))
    root = widget(page, "GroupAdvantage")
    text = page.locator("article").inner_text().replace("−", "-")
    for name in ("mean", "std", "advantage-1", "advantage-8"):
        value = readout(root, name)
        digits = [f"{value:.3f}", f"{value:+.3f}", f"{value:.2f}", f"{value:g}"]
        assert any(form in text for form in digits), (name, value)


def test_quoted_values_are_filled_in(built_book, page):
    page.goto(address(built_book, GRPO))
    values = page.locator(".quoted-value").all_text_contents()
    source = (ROOT / "chapters" / "11-grpo.md").read_text("utf-8")
    assert len(values) >= len(re.findall(r"\{eval\}`", source)) * 0.9
    assert all(value.strip() for value in values)
    assert not any(re.search(r"nan|inf\b|None|^['\"]", value) for value in values)


def test_the_solution_is_folded_and_opens(built_book, page):
    page.goto(address(built_book, GRPO))
    folded = page.locator("div.tag_solution details")
    assert folded.count() > 0
    for index in range(folded.count()):
        assert not folded.nth(index).evaluate("node => node.open")
    summary = folded.first.locator("summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert folded.first.locator("pre").first.is_visible()


def test_the_page_shows_the_function_of_rlcore(built_book, page):
    import inspect

    from rlcore.objectives.advantages import group_advantages

    page.goto(address(built_book, GRPO))
    blocks = page.locator("div.highlight pre").all_inner_texts()
    source = inspect.getsource(group_advantages).strip()
    assert any(source in block.replace("\xa0", " ") for block in blocks)


def test_search_works_from_a_file(built_book, page):
    page.goto((built_book / "search.html").as_uri() + "?q=advantage")
    page.locator("ul.search li a").first.wait_for()
    hrefs = page.locator("ul.search li a").evaluate_all("l => l.map(a => a.getAttribute('href'))")
    assert any("11-grpo" in href for href in hrefs)


def test_the_theme_can_be_switched(built_book, page):
    page.goto(address(built_book, "index"))
    before = page.evaluate("document.documentElement.dataset.theme")
    button = page.locator("button.theme-switch-button").first
    for _ in range(3):
        button.click()
        if page.evaluate("document.documentElement.dataset.theme") != before:
            return
    pytest.fail("the theme stays as it is")


def test_headings_are_in_order_and_pictures_described(built_book, page):
    page.goto(address(built_book, GRPO))
    levels = (
        page.locator("article")
        .locator("h1, h2, h3, h4")
        .evaluate_all("list => list.map(node => Number(node.tagName[1]))")
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    alts = page.locator("article img").evaluate_all("list => list.map(node => node.alt)")
    assert all(len(alt) > 10 and not alt.endswith((".svg", ".png")) for alt in alts)
