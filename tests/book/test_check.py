"""The checker finds what it is for, and nothing in a sound page."""

from __future__ import annotations

import pytest

from book.check import check_book, check_sources, open_bold

PAGE = """<!DOCTYPE html><html><head><link rel="stylesheet" href="style.css"></head>
<body><article><h1 id="top">Page</h1>{}</article></body></html>"""


def problems(tmp_path, body: str, css: str = "") -> list[str]:
    (tmp_path / "style.css").write_text(css, encoding="utf-8")
    (tmp_path / "other.html").write_text(PAGE.format("<p id='here'>"), encoding="utf-8")
    (tmp_path / "index.html").write_text(PAGE.format(body), encoding="utf-8")
    return check_book(tmp_path.resolve())


@pytest.mark.parametrize(
    "body",
    [
        "<a href='other.html#here'>x</a> <a href='#top'>x</a> <a href='https://arxiv.org'>x</a>",
        "<a href='#group-advantage.rewards=1-0'>a state of a widget</a>",
        "<p>It costs $5, then 10 $.</p>".replace(", then 10 $", ""),
        r"<span class='math'>\(\frac{a}{b}\)</span> <code>$x$ \frac</code>",
        "<img src='data:image/png;base64,AA' alt='a curve that rises'>",
    ],
)
def test_a_sound_page_passes(tmp_path, body):
    assert problems(tmp_path, body) == []


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("<a href='gone.html'>x</a>", "does not exist"),
        ("<a href='../index.html'>x</a>", "does not exist"),
        ("<a href='chapters/11-grpo.ipynb'>x</a>", "does not exist"),
        ("<a href='other.html#gone'>x</a>", "no such anchor"),
        ("<a href='#gone'>x</a>", "no such anchor"),
        ("<script src='https://cdn.example.org/x.js'></script>", "from outside"),
        ("<img alt='a' src='//example.org/x.png'>", "from outside"),
        ("<p>the mean $\\bar R$ of a group</p>", "mathematics left as text"),
        ("<p>so \\frac{1}{2}</p>", "mathematics left as text"),
        ("<p>so \\(x\\)</p>", "mathematics left as text"),
        ("<div>A Jupyter Widget</div>", "a widget left as text"),
        ("<p>GroupAdvantage(children=())</p>", "a widget left as text"),
        ("<p>see {eval}value</p>", "a role left as text"),
        ("<img src='style.css'>", "no description"),
        ("<img src='style.css' alt='_images/abc.svg'>", "no description"),
    ],
)
def test_what_is_wrong_is_found(tmp_path, body, what):
    found = problems(tmp_path, body)
    assert len(found) == 1
    assert found[0].startswith("index.html: ")
    assert what in found[0]


def test_a_font_from_outside_is_found(tmp_path):
    found = problems(tmp_path, "", "@font-face {src: url('https://fonts.example.org/a.woff2')}")
    assert found == ["style.css: takes https://fonts.example.org/a.woff2 from outside"]


def test_an_empty_folder_is_no_book(tmp_path):
    assert "no page at all" in check_book(tmp_path)[0]


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("**정책(policy)**을 학습한다.", True),
        ("**“보상”**은 크다", True),
        ("**$\\beta$**는 계수다", True),
        ("**GRPO**는 비교한다", False),
        ("<strong>정책(policy)</strong>을 학습한다.", False),
        ("**정책**(policy)을 학습한다.", False),
        ("`**정책(policy)**을`", False),
        ("2 ** 3 is a power", False),
    ],
)
def test_bold_before_a_korean_particle(text, bad):
    assert bool(open_bold(text)) is bad


def test_the_sources_are_sound():
    assert check_sources() == []


def test_a_title_that_translation_cannot_reach_is_found(tmp_path):
    (tmp_path / "chapters").mkdir()
    text = "# Page\n\n```{exercise} Write it\n:label: a\n```\n\n```{exercise}\n:label: b\n```\n"
    (tmp_path / "chapters" / "page.md").write_text(text, encoding="utf-8")
    assert check_sources(tmp_path) == [
        "chapters/page.md:3: a title here cannot be translated; put it below"
    ]
