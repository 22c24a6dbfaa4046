"""The widgets in a page without kernel or network: numbers, keyboard, address, languages, looks."""

import math
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

OpenPage = Callable[..., Page]

CLASSES = ("GroupAdvantage", "RareSuccess", "CreditShare", "AnswerBox")


def widget(page: Page, name: str, index: int = 0) -> Locator:
    return page.locator(f'[data-widget="{name}"]').nth(index)


def number(root: Locator, name: str) -> float:
    """The number in the text, which must be the exact value to the digits shown."""
    node = root.locator(f'[data-readout="{name}"]')
    text, exact = node.inner_text(), float(node.get_attribute("data-value") or "nan")
    digits = len(text.partition(".")[2])
    assert digits >= 3 or exact == int(exact)
    assert float(text) == pytest.approx(exact, abs=0.51 * 10**-digits)
    return exact


def advantages(root: Locator) -> list[float]:
    count = root.locator('[data-readout^="advantage-"]').count()
    return [number(root, f"advantage-{i + 1}") for i in range(count)]


# GroupAdvantage


@pytest.mark.parametrize(
    ("preset", "right"),
    [
        ("6 of 8 correct", 6),
        ("All correct", 8),
        ("All wrong", 0),
        ("One of 8 correct", 1),
    ],
)
@pytest.mark.parametrize("ddof", [0, 1])
def test_presets_of_the_group(open_page: OpenPage, preset: str, right: int, ddof: int) -> None:
    root = widget(open_page(), "GroupAdvantage")
    root.get_by_role("button", name="Response 3", exact=True).click()  # leave the first setting
    if ddof:
        root.get_by_label("sample std").check()
    button = root.get_by_role("button", name=preset, exact=True)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    share = right / 8
    std = math.sqrt(share * (1 - share) * 8 / (8 - ddof))
    assert number(root, "mean") == pytest.approx(share, abs=1e-12)
    assert number(root, "std") == pytest.approx(std, abs=1e-12)
    wanted = [((i < right) - share) / std if std else 0 for i in range(8)]
    assert advantages(root) == pytest.approx(wanted, abs=1e-12)
    total = right * wanted[0] if std else 0
    assert number(root, "sum-positive") == pytest.approx(total, abs=1e-12)
    assert number(root, "sum-negative") == pytest.approx(-total, abs=1e-12)
    nothing = root.get_by_text("nothing is learned: all rewards are equal")
    assert nothing.count() == (0 if std else 1)


def test_group_can_be_toggled_and_resized(open_page: OpenPage) -> None:
    root = widget(open_page(), "GroupAdvantage")
    root.get_by_role("button", name="Response 7", exact=True).click()
    root.get_by_role("button", name="Response 1", exact=True).click()
    assert number(root, "mean") == 0.75
    assert [round(a, 3) for a in advantages(root)] == [-1.732] + [0.577] * 6 + [-1.732]
    box = root.get_by_label("Group size", exact=True)
    box.fill("64")
    assert len(advantages(root)) == 64  # the new ones repeat the last, a wrong one
    assert number(root, "mean") == 6 / 64
    box.fill("2")
    assert advantages(root) == [-1, 1]
    box.fill("500")
    box.press("Enter")
    expect(box).to_have_value("64")
    box.fill("")
    box.press("Tab")
    expect(box).to_have_value("64")


def test_the_two_stds_name_their_users(open_page: OpenPage) -> None:
    root = widget(open_page(), "GroupAdvantage")
    expect(root.get_by_label("population std")).to_be_checked()
    expect(root.locator("label", has_text="population std")).to_contain_text("numpy's default")
    sample = root.locator("label", has_text="sample std")
    for user in ("torch.std's default", "TRL", "verl"):
        expect(sample).to_contain_text(user)
    sample.click()
    assert number(root, "std") == pytest.approx(math.sqrt(0.1875 * 8 / 7), abs=1e-12)


# RareSuccess


@pytest.mark.parametrize(("size", "successes"), [(8, 1), (64, 1), (8, 6), (256, 255), (2, 1)])
def test_rare_success_and_its_bounds(open_page: OpenPage, size: int, successes: int) -> None:
    root = widget(open_page(), "RareSuccess")
    root.get_by_label("Group size G", exact=True).fill(str(size))
    root.get_by_label("Successes k", exact=True).fill(str(successes))
    assert (number(root, "group-size"), number(root, "successes")) == (size, successes)
    a = math.sqrt((size - successes) / successes)
    assert number(root, "advantage-success") == pytest.approx(a, rel=1e-12)
    assert number(root, "advantage-failure") == pytest.approx(-1 / a, rel=1e-12)
    assert number(root, "bound") == pytest.approx(math.sqrt(size - 1), rel=1e-12)
    assert number(root, "cantelli") == pytest.approx(number(root, "share"), rel=1e-12)
    expect(root.get_by_text("the bound is met")).to_be_visible()
    expect(root.get_by_text("“standardised values lie within 2.”")).to_be_visible()

    root.get_by_label("sample std").check()
    shrink = math.sqrt((size - 1) / size)
    assert number(root, "advantage-success") == pytest.approx(a * shrink, rel=1e-12)
    assert number(root, "bound") == pytest.approx((size - 1) / math.sqrt(size), rel=1e-12)
    assert number(root, "cantelli") > number(root, "share")
    expect(root.get_by_text("not met")).to_be_visible()


def test_rare_success_keeps_k_below_g(open_page: OpenPage) -> None:
    root = widget(open_page(), "RareSuccess")
    root.get_by_label("Group size G", exact=True).fill("64")
    root.get_by_label("Successes k", exact=True).fill("40")
    root.get_by_label("Group size G", exact=True).fill("8")
    assert number(root, "successes") == 7
    expect(root.get_by_label("Successes k", exact=True)).to_have_attribute("max", "7")


def test_rare_success_curve_passes_through_the_setting(open_page: OpenPage) -> None:
    root = widget(open_page(), "RareSuccess")
    for choice in ("group size G, for this k", "successes k, for this G"):
        root.get_by_label(choice).check()
        dot = root.locator("svg .rw-dot")
        x, y = (float(dot.get_attribute(c) or "nan") for c in ("cx", "cy"))
        path = root.locator("svg path.rw-line-a").first.get_attribute("d") or ""
        points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)]
        assert min(math.hypot(x - px, y - py) for px, py in points) < 0.2
        assert len(points) >= 7
    root.locator("summary").click()
    rows = root.locator("tbody tr")
    assert rows.first.inner_text().split() == ["1", "2.646", "2.646"]


# CreditShare


def test_credit_of_the_phrases(open_page: OpenPage) -> None:
    root = widget(open_page(), "CreditShare")
    high, low = 1 / math.sqrt(3), -math.sqrt(3)
    for phrase, right, wrong in (("100 × 101 / 2", 3, 0), ("So that is the sum.", 1, 2)):
        root.get_by_role("button", name=phrase).click()
        assert number(root, "credit") == pytest.approx(right * high + wrong * low, abs=1e-12)
        assert (number(root, "count-right"), number(root, "count-wrong")) == (right, wrong)
        assert root.locator(".rw-holds").count() == right + wrong
        marked = root.locator(".rw-holds").first.locator(".rw-marked").all_inner_texts()
        assert " ".join(marked).startswith(phrase.rstrip("."))
    for i in range(8):
        push = high if i < 6 else low
        assert number(root, f"push-{i + 1}") == pytest.approx(push, abs=1e-12)
        tokens = root.locator(".rw-answer").nth(i).locator(".rw-token").count()
        assert number(root, f"push-mean-{i + 1}") == pytest.approx(push / tokens, abs=1e-12)


def test_phrase_of_ones_own(open_page: OpenPage) -> None:
    page = open_page()
    root = widget(page, "CreditShare")
    box = root.get_by_label("Your own phrase")
    box.fill("pair THE")
    box.press("Enter")
    assert (number(root, "count-right"), number(root, "count-wrong")) == (1, 1)
    box.fill("   ")
    box.press("Enter")
    expect(root.get_by_text("A phrase needs at least one word.")).to_be_visible()
    assert number(root, "count-right") == 1
    box.fill("no such words")
    box.press("Enter")
    assert number(root, "credit") == 0
    expect(root.get_by_text("No answer holds")).to_be_visible()
    # words selected with the mouse, from the middle of one to the middle of the next
    tokens = root.locator(".rw-answer").nth(5).locator(".rw-token")
    tokens.nth(1).scroll_into_view_if_needed()
    first, last = tokens.nth(1).bounding_box(), tokens.nth(2).bounding_box()
    assert first
    assert last
    page.mouse.move(first["x"] + first["width"] / 2, first["y"] + first["height"] / 2)
    page.mouse.down()
    page.mouse.move(last["x"] + last["width"] / 2, last["y"] + last["height"] / 2)
    page.mouse.up()
    expect(box).to_have_value("numbers average")
    assert (number(root, "count-right"), number(root, "count-wrong")) == (1, 1)


# AnswerBox


@pytest.mark.parametrize(
    ("typed", "status", "feedback"),
    [
        ("84,000", "right", "84,000"),
        ("168000/2", "right", "84,000"),
        ("12000", "wrong-turn", "That is one share."),
        ("96,000", "wrong-turn", "That is the whole bill."),
        ("-84000", "wrong", "-84,000 is not it"),
        ("84,0", "decimal-comma", "point"),
        ("alert(1)", "unreadable", "could not be read"),
        ("", "empty", "Type a number"),
    ],
)
def test_answers_are_checked(open_page: OpenPage, typed: str, status: str, feedback: str) -> None:
    root = widget(open_page(), "AnswerBox")
    assert root.locator("[data-readout]").count() == 0  # nothing is said before it is asked
    box = root.get_by_label("Your answer")
    box.fill(typed)
    box.press("Enter")
    expect(root.locator('[data-readout="status"]')).to_have_attribute("data-value", status)
    expect(root.locator('[data-readout="feedback"]')).to_contain_text(feedback)
    expect(root.locator('[aria-live="polite"]', has_text=feedback)).to_be_visible()
    expect(root.locator('[data-readout="status"]')).to_contain_text(
        {"right": "✓ Right", "wrong": "✗", "wrong-turn": "✗"}.get(status, "")
    )


# All of them


def test_each_is_drawn_once_with_its_name(open_page: OpenPage) -> None:
    page = open_page()
    drawn = page.locator("[data-widget]").evaluate_all("all => all.map((e) => e.dataset.widget)")
    assert drawn == ["GroupAdvantage", *CLASSES]
    expect(page.locator("table.rw-fallback")).to_have_count(0)
    for i in range(5):
        root = page.locator("[data-widget]").nth(i)
        expect(root.locator("[data-badge]")).to_have_attribute("data-badge", "browser")
        expect(root.locator("[data-badge]")).to_contain_text("in the browser")
        assert root.locator('[aria-live="polite"]').count() >= 1


def test_every_control_has_a_name(open_page: OpenPage) -> None:
    page = open_page()
    for i in range(5):
        snapshot = page.locator("[data-widget]").nth(i).aria_snapshot()
        controls = re.findall(
            r"- (?:button|slider|spinbutton|radio|textbox|region|img|group|list)\b.*", snapshot
        )
        assert controls
        # a list needs no name; "group:" is a <details>, which shows its summary
        named = [line for line in controls if '"' in line or re.match(r"- (list|group:)", line)]
        assert named == controls


def test_keys_in_a_control_are_no_shortcuts_of_jupyterlab(open_page: OpenPage) -> None:
    """JupyterLab asks the element that has the focus, before those around it."""
    bare = """() => [...document.querySelectorAll("[data-widget] *")]
      .filter((e) => e.tabIndex >= 0 && !e.hasAttribute("data-lm-suppress-shortcuts"))
      .map((e) => e.outerHTML.slice(0, 99))"""
    assert open_page().evaluate(bare) == []


def test_keyboard_alone_is_enough(open_page: OpenPage) -> None:
    page = open_page()
    group, rare = widget(page, "GroupAdvantage"), widget(page, "RareSuccess")
    press = page.keyboard.press

    def focused(attribute: str = "aria-label") -> str:
        return str(
            page.evaluate(
                "name => document.activeElement.getAttribute(name) ||"
                " document.activeElement.textContent",
                attribute,
            )
        )

    press("Tab")
    assert focused() == "6 of 8 correct"
    for _ in range(3):
        press("Tab")
    press("Enter")
    assert number(group, "advantage-1") == pytest.approx(math.sqrt(7))
    press("Tab")
    assert focused() == "Group size"
    press("ArrowUp")
    assert number(group, "advantage-1") == pytest.approx(math.sqrt(8))
    press("Tab")
    assert focused() == "Group size, slider"
    press("ArrowLeft")
    press("ArrowLeft")
    assert number(group, "advantage-1") == pytest.approx(math.sqrt(6))
    press("Tab")
    press("ArrowDown")  # the radio buttons: the sample std
    assert number(group, "advantage-1") == pytest.approx(6 / math.sqrt(7))
    press("Tab")
    assert focused() == "Response 1"
    press("Space")
    expect(group.get_by_text("nothing is learned: all rewards are equal")).to_be_visible()
    press("End")
    assert focused() == "Response 7"
    press("ArrowLeft")
    press("Enter")
    assert number(group, "mean") == pytest.approx(1 / 7)
    assert number(group, "advantage-6") > 0
    assert focused() == "Response 6"  # redrawing keeps the focus

    outline = "getComputedStyle(document.activeElement).outlineStyle"
    for _ in range(60):  # through the page: everything that takes the focus shows it
        press("Tab")
        if page.evaluate("document.activeElement.closest('[data-widget]') !== null"):
            assert page.evaluate(outline) != "none"
    rare.get_by_label("Successes k", exact=True).focus()
    press("ArrowUp")
    assert number(rare, "successes") == 2


def test_instances_keep_apart_and_the_address_restores_them(open_page: OpenPage) -> None:
    page = open_page()
    first, second = widget(page, "GroupAdvantage"), widget(page, "GroupAdvantage", 1)
    assert (advantages(second), number(second, "std")) == (
        pytest.approx([0.5**0.5, -(0.5**0.5)]),
        pytest.approx(0.5**0.5),
    )
    second.get_by_label("population std").check()
    assert advantages(second) == pytest.approx([1, -1])
    assert number(first, "mean") == 0.75
    first.get_by_role("button", name="Response 2", exact=True).click()
    rare = widget(page, "RareSuccess")
    rare.get_by_label("Group size G", exact=True).fill("32")
    rare.get_by_label("successes k, for this G").check()
    credit = widget(page, "CreditShare")
    credit.get_by_role("button", name="100 × 101 / 2").click()
    page.wait_for_url("**/en.html#credit-share.*")  # the address follows in a moment
    address = page.url
    assert "&group-advantage-2.rewards=10&group-advantage-2.ddof=0" in address

    again = open_page(hash="#" + address.split("#")[1])
    assert advantages(widget(again, "GroupAdvantage", 1)) == pytest.approx([1, -1])
    assert number(widget(again, "GroupAdvantage"), "mean") == 0.625
    rare = widget(again, "RareSuccess")
    assert (number(rare, "group-size"), number(rare, "successes")) == (32, 1)
    expect(rare.get_by_label("successes k, for this G")).to_be_checked()
    assert number(widget(again, "CreditShare"), "credit") == pytest.approx(math.sqrt(3))
    # the widget touched last comes into view
    top = again.evaluate("document.querySelector('[data-widget=CreditShare]').offsetTop")
    assert abs(again.evaluate("scrollY") - top) < 200

    # another address typed into the same page, and a heading's: that one changes nothing
    again.evaluate("location.hash = '#group-advantage.rewards=10&group-advantage.ddof=1'")
    expect(widget(again, "GroupAdvantage").locator('[data-readout="std"]')).to_have_text("0.707")
    again.evaluate("location.hash = '#a-heading'")
    again.wait_for_timeout(50)
    assert len(advantages(widget(again, "GroupAdvantage"))) == 2


@pytest.mark.parametrize(
    "hash",
    [
        "#group-advantage.rewards=1",
        "#group-advantage.rewards=1x0&group-advantage.ddof=0",
        "#group-advantage.rewards=" + "1" * 65,
        "#group-advantage.rewards=1,,0",
        "#group-advantage.ddof=7",
        "#group-advantage.rewards=",
        "#group-advantage.rewards=1.7e308,1.7e308,0",
        "#group-advantage.rewards=1.7e308,-1.7e308",
        "#group-advantage.nonsense=1",
        "#=&&.=%",
        "#a-heading",
    ],
)
def test_a_broken_address_changes_nothing(open_page: OpenPage, hash: str) -> None:
    root = widget(open_page(hash=hash), "GroupAdvantage")
    assert (len(advantages(root)), number(root, "mean")) == (8, 0.75)
    assert number(root, "std") == pytest.approx(math.sqrt(0.1875), abs=1e-12)


def test_a_refused_address_is_told(open_page: OpenPage) -> None:
    page = open_page(hash="#group-advantage.rewards=1.7e308,1.7e308,0")
    told = widget(page, "GroupAdvantage").get_by_text("a setting that cannot be shown")
    expect(told).to_be_visible()
    expect(page.get_by_text("a setting that cannot be shown")).to_have_count(1)
    widget(page, "GroupAdvantage").get_by_role("button", name="All wrong").click()
    expect(told).to_have_count(0)
    page.evaluate("location.hash = '#credit-share.phrase=' + 'a'.repeat(201)")
    credit = widget(page, "CreditShare")
    expect(credit.get_by_text("a setting that cannot be shown")).to_be_visible()
    assert number(credit, "count-right") == 1
    page.evaluate("location.hash = '#credit-share.phrase=5050'")
    expect(credit.get_by_text("a setting that cannot be shown")).to_have_count(0)
    assert number(credit, "count-right") == 6


@pytest.mark.parametrize("length", [80, 200])
def test_a_phrase_without_a_space_stays_inside(open_page: OpenPage, length: int) -> None:
    page = open_page(hash="#credit-share.phrase=" + "a" * length, width=390)
    root = widget(page, "CreditShare")
    expect(root.get_by_text("a" * length)).to_be_visible()
    assert root.evaluate("root => root.scrollWidth <= root.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_link_is_copied_or_shown(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(
        """() => Object.defineProperty(navigator, "clipboard", { configurable: true,
             value: { writeText: async (text) => { window.copied = text; } } })"""
    )
    root = widget(page, "GroupAdvantage")
    root.get_by_role("button", name="All wrong").click()
    root.get_by_role("button", name="Copy a link to this setting").click()
    expect(root.get_by_text("Link copied")).to_be_visible()
    copied = page.evaluate("window.copied")
    page.wait_for_url("**#group-advantage.rewards=*")
    assert copied == page.url
    assert "group-advantage.rewards=00000000" in copied
    page.evaluate(
        """() => Object.defineProperty(navigator, "clipboard", { configurable: true,
             value: { writeText: async () => { throw new Error("refused"); } } })"""
    )
    root.get_by_role("button", name="Copy a link to this setting").click()
    expect(root.get_by_label("Copy this address:")).to_have_value(copied)


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("width", [390, 600, 1200])  # 600: 1200 pixels at 200 %
def test_nothing_overflows(open_page: OpenPage, language: str, width: int) -> None:
    page = open_page(language, width=width, device_scale_factor=2 if width == 600 else 1)
    widget(page, "GroupAdvantage").locator('input[type="number"]').fill("64")
    box = widget(page, "AnswerBox").locator("input")
    box.fill("0,5")
    box.press("Enter")
    widget(page, "RareSuccess").locator("summary").click()
    expect(page.locator('[data-readout="advantage-64"]')).to_be_visible()
    page.wait_for_timeout(100)  # the plot follows the width of its place
    wide = page.evaluate(
        """() => [document.documentElement, ...document.querySelectorAll("[data-widget]")]
          .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML.slice(0, 99))"""
    )
    assert wide == []
    outside = page.evaluate(
        """() => [...document.querySelectorAll("[data-widget]")].flatMap((root) => {
          const frame = root.getBoundingClientRect();
          return [...root.querySelectorAll("*")].filter((e) => {
            const box = e.getBoundingClientRect();
            return box.width > 1 && (box.right > frame.right + 1 || box.left < frame.left - 1);
          }).map((e) => e.outerHTML.slice(0, 120));
        })"""
    )
    assert outside == []


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) =>
      c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let e = node; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const root of document.querySelectorAll("[data-widget]"))
    for (const node of root.querySelectorAll("*")) {
      const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
      if (!own || !node.getClientRects().length) continue;
      const style = getComputedStyle(node);
      const svg = node.namespaceURI.endsWith("svg");
      const [a, b] = [parse(svg ? style.fill : style.color), ground(node)].map(light);
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${node.outerHTML.slice(0, 100)}`);
    }
  return [poor, document.querySelectorAll("[data-widget]").length];
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("system", ["light", "dark"])
def test_text_is_readable_in_every_theme(open_page: OpenPage, theme: str, system: str) -> None:
    page = open_page(color_scheme=system, reduced_motion="reduce")
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    poor, count = page.evaluate(CONTRAST)
    assert (poor, count) == ([], 5)
    background = page.evaluate(
        "getComputedStyle(document.querySelector('[data-widget]')).backgroundColor"
    )
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 30)"}[theme]


def test_a_page_without_a_theme_follows_the_system(open_page: OpenPage) -> None:
    page = open_page(color_scheme="dark")
    page.evaluate(
        """() => { document.querySelector("style").remove();
                   delete document.documentElement.dataset.theme; }"""
    )
    assert page.evaluate(CONTRAST) == [[], 5]
    background = page.evaluate(
        "getComputedStyle(document.querySelector('[data-widget]')).backgroundColor"
    )
    assert background == "rgb(20, 24, 30)"


def test_colour_is_never_the_only_sign(open_page: OpenPage) -> None:
    root = widget(open_page(), "GroupAdvantage")
    for i, (mark, side) in enumerate([("✓ 1", "positive")] * 6 + [("✗ 0", "negative")] * 2):
        card = root.locator(".rw-card").nth(i)
        expect(card).to_contain_text(mark)
        fill, line = card.locator(".rw-fill").bounding_box(), card.locator(".rw-bar").bounding_box()
        assert fill
        assert line
        middle = line["y"] + line["height"] / 2
        above = fill["y"] + fill["height"] <= middle + 1
        assert above == (side == "positive")
    assert "gradient" in root.locator(".rw-card .rw-negative").first.evaluate(
        "e => getComputedStyle(e).backgroundImage"
    )


def test_motion_stops_when_asked(open_page: OpenPage) -> None:
    duration = "e => getComputedStyle(e).transitionDuration"
    moving = widget(open_page(), "GroupAdvantage").locator(".rw-fill").first
    assert moving.evaluate(duration).startswith("0.15s")
    still = widget(open_page(reduced_motion="reduce"), "GroupAdvantage").locator(".rw-fill").first
    assert still.evaluate(duration) == "0s"


def test_korean_page_speaks_korean(open_page: OpenPage) -> None:
    page = open_page("ko")
    root = widget(page, "GroupAdvantage")
    root.get_by_role("button", name="모두 정답").click()
    expect(root.get_by_text("배우는 것이 없습니다")).to_be_visible()
    expect(root.locator("[data-badge]")).to_have_text("브라우저에서 계산")
    box = widget(page, "AnswerBox").get_by_label("나의 답")
    box.fill("0,5")
    box.press("Enter")
    expect(widget(page, "AnswerBox").locator('[data-readout="feedback"]')).to_contain_text("쉼표")
    # all that is said in letters is Korean, names of libraries, or the author's own text
    english = page.evaluate(
        """() => [...document.querySelectorAll("[data-widget]")].flatMap((root) => {
          const authors = ".rw-prompt, .rw-answer-text, .rw-button, .rw-sentence";
          return [...root.querySelectorAll("*")].filter((e) => !e.closest(authors))
            .flatMap((e) => [...e.childNodes].filter((c) => c.nodeType === 3))
            .map((c) => c.textContent)
            .filter((t) => /[a-z]{3}/i.test(t.replace(/numpy|torch|std|TRL|verl|sqrt/g, "")));
        })"""
    )
    assert english == []


def test_without_javascript_a_table_stands_in(open_page: OpenPage) -> None:
    page = open_page(java_script_enabled=False)
    tables = page.locator("table.rw-fallback")
    expect(tables).to_have_count(5)
    expect(tables.first).to_contain_text("0.433")
    expect(tables.nth(2)).to_contain_text("+2.646")
    expect(tables.nth(3)).to_contain_text("-2.887")
    expect(tables.nth(4)).not_to_contain_text("84")  # no answer given away
