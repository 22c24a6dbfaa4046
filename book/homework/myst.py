"""From the MyST of a chapter to Markdown that any notebook program shows.

A chapter's exercise text may hold directives and roles; the notebook that a student opens may be
in JupyterLab, in VS Code or on Colab. What this file does not know is an error that names the line,
so that neither half-raw markup nor a solution can slip into a release notebook.
"""

from __future__ import annotations

import re

OPEN = re.compile(r"^ {0,3}(?P<fence>`{3,}|:{3,})\{(?P<name>[^}]+)\}[ \t]*(?P<title>.*)$")
OPTION = re.compile(r"^:(?P<key>[\w-]+):[ \t]*(?P<value>.*)$")
ROLE = re.compile(r"\{(?P<name>[\w:+-]+)\}`(?P<body>[^`]*)`")
FOLDED = {"hint": "Hint", "tip": "Tip", "dropdown": "More"}
QUOTED = {"note", "important", "warning", "caution", "attention", "danger", "error", "seealso"}
REFERENCES = {"doc", "ref", "numref", "eq", "term", "cite", "cite:t", "cite:p", "download"}
ANSWER_TITLE = re.compile(r"^\W*(worked\s+)?(solution|answer)", re.IGNORECASE)


class MarkupError(ValueError):
    """Markup in an exercise that has no form outside the book."""


def directive(line: str) -> re.Match[str] | None:
    """The opening line of a directive, or None."""
    return OPEN.match(line)


def take_block(lines: list[str], start: int) -> tuple[dict[str, str], list[str], int]:
    """Options, body and the index after the closing fence of the directive opened at `start`."""
    opening = OPEN.match(lines[start])
    assert opening is not None
    fence = opening["fence"]
    closing = re.compile(rf"^ {{0,3}}{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$")
    end = start + 1
    while end < len(lines) and not closing.match(lines[end]):
        end += 1
    if end == len(lines):
        raise MarkupError(f"the directive {lines[start].strip()!r} is never closed")
    body = lines[start + 1 : end]
    options: dict[str, str] = {}
    if body and body[0].strip() == "---" and "---" in [line.strip() for line in body[1:]]:
        stop = 1 + [line.strip() for line in body[1:]].index("---")
        for line in body[1:stop]:
            key, _, value = line.partition(":")
            options[key.strip()] = value.strip()
        body = body[stop + 1 :]
    else:
        while body and (option := OPTION.match(body[0])):
            options[option["key"]] = option["value"].strip()
            body = body[1:]
    return options, body, end + 1


def holds_answer(name: str, title: str, options: dict[str, str]) -> bool:
    """Whether a directive is a solution: by its name, by its class or by its title."""
    by_class = re.search(r"solution|answer", options.get("class", ""), re.IGNORECASE)
    return name.startswith("solution") or bool(by_class) or bool(ANSWER_TITLE.match(title))


def to_markdown(lines: list[str], where: str) -> str:
    """Plain Markdown of an exercise's text; `where` names the chapter and exercise in errors.

    Solutions are dropped, hints and folded admonitions become <details>, notes become quotations,
    `{math}` becomes $...$ and references become their text. Raises MarkupError for the rest.
    """
    out: list[str] = []
    at = 0
    while at < len(lines):
        opening = OPEN.match(lines[at])
        if opening is None:
            code = re.match(r"^ {0,3}(`{3,}|~{3,})", lines[at])
            if code:  # an ordinary fenced block is copied as it stands
                mark = code[1]
                end = at + 1
                while end < len(lines) and not lines[end].lstrip().startswith(mark):
                    end += 1
                out += lines[at : end + 1]
                at = end + 1
                continue
            out.append(ROLE.sub(lambda role: _role(role, where), lines[at]))
            at += 1
            continue
        name, title = opening["name"].strip(), opening["title"].strip()
        if name == "solution-start":
            at = _after(lines, at, "solution-end", where)
            continue
        options, body, at = take_block(lines, at)
        if holds_answer(name, title, options):
            continue
        out += _directive(name, title, options, body, where)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _after(lines: list[str], start: int, name: str, where: str) -> int:
    for at in range(start + 1, len(lines)):
        opening = OPEN.match(lines[at])
        if opening and opening["name"].strip() == name:
            return take_block(lines, at)[2]
    raise MarkupError(f"{where}: {lines[start].strip()!r} without {{{name}}}")


def _directive(
    name: str, title: str, options: dict[str, str], body: list[str], where: str
) -> list[str]:
    if name.startswith("exercise"):
        raise MarkupError(
            f"{where}: {{{name}}} inside another exercise ({{exercise-end}} missing?)"
        )
    if name == "math":
        return ["", "$$", *body, "$$", ""]
    inner = to_markdown(body, where)
    title = ROLE.sub(lambda role: _role(role, where), title)
    if name in FOLDED or (name == "admonition" and "dropdown" in options.get("class", "")):
        summary = title or FOLDED.get(name, "More")
        # JupyterLab with its MyST extension draws no marker beside a summary
        summary = f"<details><summary>{summary} (click to open)</summary>"
        return ["", summary, "", inner, "", "</details>", ""]
    if name == "admonition" or name in QUOTED:
        text = f"**{title or name.capitalize()}**\n\n{inner}"
        return ["", *(f"> {line}".rstrip() for line in text.split("\n")), ""]
    raise MarkupError(f"{where}: the directive {{{name}}} has no form in a homework notebook")


def _role(role: re.Match[str], where: str) -> str:
    name, body = role["name"], role["body"]
    if name == "math":
        return f"${body}$"
    if name in REFERENCES:
        text = re.match(r"^(.*?)\s*<[^>]*>$", body)
        return text[1] if text else body.strip("/")
    if name == "eval":
        raise MarkupError(f"{where}: {role[0]} cannot be computed in a homework notebook; type it")
    raise MarkupError(f"{where}: the role {role[0]} has no form in a homework notebook")
