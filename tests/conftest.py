"""What the tests share: one build of the book, and a browser that refuses the outside world."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make) -> Path:
    """Make a folder once per test run, also when several processes run the tests."""
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent  # the folder that the processes of one run have in common
    folder, failed = base / name, base / f"{name}.failed"
    with FileLock(base / f"{name}.lock"):
        if failed.exists():
            pytest.fail(f"{name} failed in another process:\n{failed.read_text('utf-8')}")
        if not folder.exists():
            draft = base / f"{name}.draft"
            shutil.rmtree(draft, ignore_errors=True)
            try:
                make(draft)
            except Exception as error:
                failed.write_text(str(error), encoding="utf-8")
                raise
            draft.rename(folder)
    return folder


@pytest.fixture(scope="session")
def built_book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the English pages, built from nothing into an empty folder (read only, please)."""
    from book.build import build

    return once(tmp_path_factory, "book", lambda folder: build(work=folder)) / "html"


@dataclass
class Seen:
    """What a page said and asked for while it was open."""

    outside: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        return [*self.outside, *self.failed, *self.errors]


def watch(context) -> Seen:
    """Refuse every request that is not for a local file, and record it with all errors."""
    seen = Seen()

    def route(route) -> None:
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            seen.outside.append(route.request.url)
            route.abort()

    context.route("**/*", route)
    context.on("requestfailed", lambda request: seen.failed.append(request.url))
    context.on("console", lambda m: m.type in ("error", "warning") and seen.errors.append(m.text))
    context.on("weberror", lambda error: seen.errors.append(str(error.error)))
    return seen


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """One Chromium for all tests of this process."""
    from playwright.sync_api import sync_playwright

    from book import chromium

    path = chromium.find()
    if path is None:
        pytest.fail("no Chromium found: `python -m book test` installs one")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=chromium.FLAGS)
        yield running
        running.close()


@pytest.fixture
def new_page(browser) -> Iterator:
    """Makes pages: `new_page(width=390, color_scheme="dark") -> (page, seen)`."""
    contexts = []

    def make(width: int = 1200, height: int = 900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        seen = watch(context)
        return context.new_page(), seen

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def page(new_page):
    """A page 1200 pixels wide; it fails the test if it asked for anything outside or complained."""
    page, seen = new_page()
    yield page
    assert not seen.problems()
