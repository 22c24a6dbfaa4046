"""A page of widgets as the book's build makes it, opened from file:// with the network refused."""

import html
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from book.widget_bundle import bundle
from widgets import AnswerBox, CreditShare, GroupAdvantage, RareSuccess

ROOT = Path(__file__).parents[2]

# What the book's theme sets, in its two modes.
THEME = """
html { --pst-color-text-base: #222832; --pst-color-text-muted: #48566b;
  --pst-color-background: #ffffff; --pst-color-surface: #f3f4f5; --pst-color-border: #d1d5da;
  --pst-color-primary: #0a7d91; }
html[data-theme="dark"] { --pst-color-text-base: #ced6dd; --pst-color-text-muted: #9ca4af;
  --pst-color-background: #14181e; --pst-color-surface: #29313d; --pst-color-border: #48566b;
  --pst-color-primary: #3fb1c5; }
body { max-width: 46rem; margin: 0 auto; background: var(--pst-color-background);
  color: var(--pst-color-text-base); }
"""


def payer_box() -> AnswerBox:
    return AnswerBox(
        name="share-payer",
        question="What does the one who paid get back?",
        answer=84000,
        tolerance=0.5,
        wrong_turns={12000: "That is one share.", 96000: "That is the whole bill."},
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle, the host, and a page in each language; two widgets share a name."""
    folder = tmp_path_factory.mktemp("site")
    bundle(ROOT / "widgets", folder / "widgets-bundle.js")
    host = (ROOT / "book" / "static" / "widget-host.js").read_text("utf-8")
    (folder / "widget-host.js").write_text(host, "utf-8")
    widgets = [
        GroupAdvantage(),
        GroupAdvantage(rewards=[1, 0], ddof=1),
        RareSuccess(),
        CreditShare(),
        payer_box(),
    ]
    body = "\n<p>Between.</p>\n".join(widget.static_html() for widget in widgets)
    for language in ("en", "ko"):
        (folder / f"{language}.html").write_text(page_text(body, language), "utf-8")
    return folder


def page_text(body: str, language: str) -> str:
    return (
        f'<!doctype html><html lang="{html.escape(language)}" data-theme="light"><head>'
        '<meta charset="utf-8"><title>Widgets</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style>{THEME}</style><link rel="stylesheet" href="widgets.css">'
        '<script src="widgets-bundle.js" defer></script>'
        '<script src="widget-host.js" defer></script>'
        f"</head><body><main>{body}</main></body></html>"
    )


@pytest.fixture
def open_page(new_page: Any, site: Path) -> Iterator[Callable[..., Page]]:
    """open_page(language="en", hash="", **context options); at the end no page may have complained
    or asked for anything outside."""
    watched = []

    def open_it(language: str = "en", hash: str = "", **options: Any) -> Page:
        page, seen = new_page(**options)
        watched.append(seen)
        page.set_default_timeout(10_000)
        page.goto(f"{site.as_uri()}/{language}.html{hash}")
        return page

    yield open_it
    assert [problem for seen in watched for problem in seen.problems()] == []
