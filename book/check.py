"""`python -m book check`: read the built pages as a strict reader would, and list what is wrong.

Links and anchors that lead nowhere, files taken from outside, mathematics or widgets left as text,
pictures without a description; and in the sources, bold that Markdown does not close before a
Korean particle, and titles that a translation cannot reach.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag
from markdown_it import MarkdownIt

from book.bootstrap import ROOT

RAW_MATH = re.compile(r"\$[^$\n]{1,200}\$|\\frac\b|\\\(|\\\[|\\sqrt\b|\\pi\b|\\begin\{")
RAW_WIDGET = re.compile(
    r"A Jupyter Widget|<widgets\.|^\w+\(children=|Widget object at 0x|\w+Model\("
)
RAW_ROLE = re.compile(r"\{(?:eval|ref|doc|numref|eq|cite[pt]?|math)\}")
TITLED = re.compile(r"[`:]{3,}\{exercise(?:-start)?\}[ \t]+\D")
HANGUL = re.compile("[\uac00-\ud7a3]")
# attributes through which a page takes a file (a link that a reader may follow is none of them)
TAKES = (
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
    ("audio", "src"),
    ("video", "src"),
)
LINK_ONLY = {"canonical", "author", "license", "search", "next", "prev", "index", "alternate"}


def check_book(folder: Path) -> list[str]:
    """All problems of the pages under `folder`, as `page: what`."""
    pages = {path: _parse(path) for path in sorted(folder.rglob("*.html"))}
    pages = {path: soup for path, soup in pages.items() if "_static" not in path.parts}
    names = {path: anchors(soup) for path, soup in pages.items()}
    problems = [] if pages else [f"{folder}: no page at all"]
    for path, soup in pages.items():
        here = path.relative_to(folder).as_posix()
        found = [*_links(path, soup, folder, names), *_outside(soup), *_left_raw(soup)]
        problems += [f"{here}: {what}" for what in found]
    for path in sorted(folder.rglob("*.css")):
        for target in re.findall(
            r"""url\(\s*['"]?((?:https?:)?//[^)'"]+)""", path.read_text("utf-8")
        ):
            problems.append(f"{path.relative_to(folder).as_posix()}: takes {target} from outside")
    return problems


def _parse(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text("utf-8"), "html.parser")


def anchors(soup: BeautifulSoup) -> set[str]:
    """All that an address after # can point to."""
    found = {str(tag["id"]) for tag in soup.find_all(id=True)}
    return found | {str(tag["name"]) for tag in soup.find_all("a", attrs={"name": True})}


def _links(
    path: Path, soup: BeautifulSoup, folder: Path, names: dict[Path, set[str]]
) -> Iterator[str]:
    for tag in soup.find_all("a", href=True):
        href = str(tag["href"])
        parts = urlsplit(href)
        if parts.scheme or parts.netloc or not href or href == "#":
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if folder not in target.parents or not target.is_file():
            yield f"link to {href}, which does not exist"
        elif "=" in parts.fragment or not parts.fragment or target not in names:
            continue  # with = it sets a widget: `#group-advantage.rewards=1-0`
        elif unquote(parts.fragment) not in names[target]:
            yield f"link to {href}, but that page has no such anchor"


def _outside(soup: BeautifulSoup) -> Iterator[str]:
    for name, attribute in TAKES:
        for tag in soup.find_all(name, attrs={attribute: True}):
            parts = urlsplit(str(tag[attribute]))
            if name == "link" and LINK_ONLY & set(tag.get("rel") or []):
                continue
            if parts.scheme not in ("", "data", "blob") or parts.netloc:
                yield f"takes {tag[attribute]} from outside"


def _left_raw(soup: BeautifulSoup) -> Iterator[str]:
    body = soup.find("article") or soup.body or soup
    assert isinstance(body, Tag)
    for image in body.find_all("img"):
        alternative = str(image.get("alt") or "")
        if not alternative or alternative.endswith((".svg", ".png")):
            yield f"picture {image.get('src')} has no description (alt)"
    for tag in body.select("script, style, code, pre, .math, [data-widget-mount], mjx-container"):
        tag.decompose()
    for text in body.find_all(string=True):
        line = " ".join(str(text).split())
        for what, pattern in (
            ("mathematics", RAW_MATH),
            ("a widget", RAW_WIDGET),
            ("a role", RAW_ROLE),
        ):
            match = pattern.search(line)
            if match:
                around = line[max(0, match.start() - 20) : match.end() + 20]
                yield f"{what} left as text: {around!r}"


def open_bold(text: str) -> list[tuple[int, str]]:
    """(line, text) wherever `**` stays visible in a text with Hangul.

    A closing ** after a bracket or a quote does not count before a Korean particle: write
    <strong>..</strong>, or move the bracket out of the bold."""
    found = []
    for token in MarkdownIt("commonmark").parse(text):
        for child in token.children or []:
            if child.type == "text" and "**" in child.content and HANGUL.search(token.content):
                found.append(((token.map or [0])[0] + 1, token.content))
                break
    return found


def check_sources(root: Path = ROOT) -> list[str]:
    """Problems of the Markdown sources and of the translations."""
    problems = []
    files = [*root.glob("*.md"), *root.glob("chapters/**/*.md"), *root.glob("book/locale/**/*.po")]
    for path in sorted(files):
        name, text = path.relative_to(root), path.read_text("utf-8")
        for line, bold in open_bold(text):
            problems.append(f"{name}:{line}: ** is not closed: {bold[:60]!r}")
        for line, words in enumerate(text.splitlines(), 1):
            if TITLED.match(words):
                problems.append(f"{name}:{line}: a title here cannot be translated; put it below")
    return problems


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0] if arguments else ROOT / "build" / "html").resolve()
    if not (folder / "index.html").is_file():
        print(f"{folder} has no pages: run `python -m book build` first", file=sys.stderr)
        return 1
    problems = check_sources() + check_book(folder)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else "nothing wrong")
    return int(bool(problems))
