"""Read the exercises of a chapter: texts, stubs, reference solutions, tests.

The conventions stand in the docstring of `book.homework`. Everything that breaks one is an error
that names the chapter, the exercise and what is wanted, found before a notebook is handed out.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import jupytext

from book.homework import myst

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
SLUG = re.compile(r"^\d\d-[a-z0-9-]+$")
ROLES = ("exercise", "solution", "test", "hidden-test", "homework-setup")
ID = re.compile(r"^[A-Za-z][A-Za-z0-9-]*$")


class ChapterError(ValueError):
    """An exercise in a chapter breaks the conventions."""


@dataclass
class Part:
    """One code cell of an exercise. `points` matters for tests only."""

    role: str
    source: str
    points: float = 0.0
    files: tuple[str, ...] = ()


@dataclass
class Exercise:
    """What carries one id, in the order of the chapter."""

    id: str
    title: str = ""
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    stated_points: float | None = None

    def cells(self, *roles: str) -> list[Part]:
        """The cells that have one of these roles."""
        return [part for part in self.parts if part.role in roles]

    @property
    def points(self) -> float:
        return sum(part.points for part in self.cells("test", "hidden-test"))

    def heading(self, number: int) -> str:
        """Its title, with the number if the chapter gives none."""
        if self.title.startswith("Exercise"):
            return self.title
        return f"Exercise {number} · {self.title or self.id}"

    @property
    def names(self) -> list[str]:
        """What the stub defines at its top level: all that a test may know of the notebook."""
        found = (bound_names(ast.parse(part.source).body) for part in self.cells("exercise"))
        return sorted(set().union(*found))


@dataclass
class Chapter:
    """The part of a chapter that becomes homework."""

    path: Path
    title: str
    setup: list[Part]
    exercises: list[Exercise]

    @property
    def slug(self) -> str:
        return self.path.stem

    @property
    def points(self) -> float:
        return sum(exercise.points for exercise in self.exercises)

    @property
    def files(self) -> list[str]:
        """Files, relative to the chapter, that set-up cells read."""
        parts = [*self.setup, *(part for one in self.exercises for part in one.parts)]
        return sorted({name for part in parts for name in part.files})


def chapters_with_exercises(folder: Path = CHAPTERS) -> list[Path]:
    """The chapters that have homework, in order."""
    found = sorted(path for path in folder.glob("*.md") if SLUG.match(path.stem))
    return [
        path for path in found if re.search(r"^tags:.*\bexercise\b", path.read_text("utf-8"), re.M)
    ]


def find_chapter(name: str, folder: Path = CHAPTERS) -> Path:
    """The chapter with this name ("11-grpo"), number ("11") or path."""
    if name.endswith(".md") and Path(name).is_file():
        return Path(name).resolve()
    known = chapters_with_exercises(folder)
    for path in known:
        if name in (path.stem, path.name, path.stem.split("-")[0]):
            return path
    listing = ", ".join(path.stem for path in known) or "none"
    raise ChapterError(f"no chapter {name!r} with exercises in {folder} (there are: {listing})")


def read_chapter(path: Path) -> Chapter:
    """Read and check a chapter. Raises ChapterError or myst.MarkupError."""
    notebook = jupytext.read(path)
    title = path.stem
    setup: list[Part] = []
    exercises: dict[str, Exercise] = {}
    texts: list[str] = []  # lines of text that the next cell of an exercise will get
    name = ""  # the title that stands above them
    pending: list[Part] = []  # set-up cells after a text and before its exercise cell
    is_open = False  # between {exercise-start} and {exercise-end}
    current: Exercise | None = None
    begun = False  # whether the last text has its exercise already

    def take_texts(exercise: Exercise) -> None:
        where = f"{path.name}, {exercise.id}"
        exercise.text = f"{exercise.text}\n\n{myst.to_markdown(texts, where)}".strip()
        texts.clear()

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            if re.search(r"^`{3,}\{code-cell\}", cell.source, re.M):
                raise ChapterError(
                    f"{path.name}: a {{code-cell}} is swallowed by the text that begins "
                    f"{cell.source[:60]!r}: a fence is not closed, or a title between backticks "
                    "holds a backtick (use ::: there)"
                )
            heading = re.search(r"^# (.+)$", cell.source, re.M)
            if heading and title == path.stem:
                title = heading[1].strip()
            for event, lines in _exercise_texts(cell.source, is_open, path.name):
                if event == "start":
                    if texts:
                        raise ChapterError(
                            f"{path.name}: the exercise {name!r} has no cell with the tag exercise "
                            "(give one that is not homework another class, such as note)"
                        )
                    is_open, begun, name = True, False, "".join(lines)
                    continue
                elif event == "end":
                    is_open = False
                    if begun and current is not None and texts:
                        take_texts(current)  # what stood after the code cells
                texts += lines
        if cell.cell_type != "code":
            continue
        part, identity, stated = _read_cell(cell, path.name)
        if part is None:
            continue
        if part.role == "homework-setup":
            (pending if texts or is_open or exercises else setup).append(part)
            continue
        if identity not in exercises:
            current = exercises[identity] = Exercise(identity, name)
            name = ""
        elif current is None or current.id != identity:
            raise ChapterError(f"{path.name}: the cells of {identity} are not together")
        current.parts += [*pending, part]
        pending, begun = [], True
        if texts:
            take_texts(current)
        if stated is not None:
            current.stated_points = stated
    if is_open:
        raise ChapterError(f"{path.name}: an {{exercise-start}} has no {{exercise-end}}")
    if texts and not begun:
        raise ChapterError(f"{path.name}: the exercise {name!r} has no cell with the tag exercise")
    chapter = Chapter(path, title, setup, list(exercises.values()))
    check(chapter)
    return chapter


def check(chapter: Chapter) -> None:
    """Raise ChapterError for the first exercise that breaks a convention."""
    where = chapter.path.name
    for name in chapter.files:
        if not (chapter.path.parent / name).is_file():
            raise ChapterError(f"{where}: the homework file {name} is not there")
    for exercise in chapter.exercises:
        here = f"{where}, exercise {exercise.id}"
        order = [ROLES.index(part.role) for part in exercise.parts if part.role in ROLES[:4]]
        if order != sorted(order):
            raise ChapterError(f"{here}: the order is exercise, solution, test, hidden-test")
        for role in ("exercise", "solution"):
            if not exercise.cells(role):
                raise ChapterError(f"{here}: there is no cell with the tag {role}")
        if not exercise.text:
            raise ChapterError(
                f"{here}: no text ({{exercise-start}} ... {{exercise-end}}) before it"
            )
        if exercise.points <= 0:
            raise ChapterError(f"{here}: its tests carry no points")
        if exercise.stated_points not in (None, exercise.points):
            raise ChapterError(
                f"{here}: the exercise cell says {exercise.stated_points:g} points, "
                f"its tests sum to {exercise.points:g}"
            )
        names = exercise.names
        solved = [bound_names(ast.parse(part.source).body) for part in exercise.cells("solution")]
        missing = sorted(set(names) - set().union(*solved))
        if missing:
            raise ChapterError(f"{here}: the solution does not define {', '.join(missing)}")
        for part in exercise.cells("test", "hidden-test"):
            unknown = sorted(free_names(part.source) - set(names))
            if unknown:
                raise ChapterError(
                    f"{here}: a {part.role} cell uses {', '.join(unknown)}, which neither it nor "
                    "the exercise cell defines (tests import what they use)"
                )


def bound_names(body: Iterable[ast.AST]) -> set[str]:
    """Names that a run of statements binds at top level (not inside functions)."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
            elif isinstance(inner, ast.alias):
                names.add((inner.asname or inner.name).split(".")[0])
    return names


def free_names(source: str) -> set[str]:
    """Names that a cell reads and neither binds anywhere nor finds among the builtins."""
    used: set[str] = set()
    bound: set[str] = set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def _read_cell(cell, where: str) -> tuple[Part | None, str, float | None]:
    """The cell as (part, id, points stated on an exercise cell); (None, ...) if it is not ours."""
    roles = [tag for tag in cell.metadata.get("tags", []) if tag in ROLES]
    if not roles:
        return None, "", None
    if len(roles) > 1:
        raise ChapterError(f"{where}: a cell has the tags {' and '.join(roles)}")
    role = roles[0]
    try:
        ast.parse(cell.source)
    except SyntaxError as error:
        raise ChapterError(f"{where}: a {role} cell is not plain Python: {error}") from error
    if role == "homework-setup":
        files = tuple(cell.metadata.get("homework", {}).get("files", []))
        return Part(role, cell.source, files=files), "", None
    details = cell.metadata.get("exercise") or {}
    identity, points = str(details.get("id", "")), details.get("points")
    if not ID.match(identity):
        raise ChapterError(
            f"{where}: a {role} cell needs `exercise: {{id: letters-digits-dashes}}`, got {details}"
        )
    if role in ("test", "hidden-test"):
        if not isinstance(points, (int, float)) or isinstance(points, bool) or points < 0:
            raise ChapterError(
                f"{where}, exercise {identity}: a {role} cell needs points, got {points}"
            )
        return Part(role, cell.source, float(points)), identity, None
    stated = float(points) if role == "exercise" and points is not None else None
    return Part(role, cell.source), identity, stated


def _exercise_texts(source: str, is_open: bool, where: str) -> list[tuple[str, list[str]]]:
    """What a Markdown cell says about exercises, in order, as (event, lines of text).

    Events: "start" (with the title) and "end" for the gates, "text" for lines between them, which
    may go on in the next Markdown cell; a whole `{exercise}` directive gives all three.
    """
    lines = source.split("\n")
    events: list[tuple[str, list[str]]] = []
    at = 0
    while at < len(lines):
        opening = myst.directive(lines[at])
        name = opening["name"].strip() if opening else ""
        title = opening["title"].strip() if opening else ""
        if name in ("exercise-start", "exercise-end"):
            if is_open == (name == "exercise-start"):
                raise ChapterError(f"{where}: {{{name}}} out of order")
            is_open = not is_open
            events.append(("start", [title]) if is_open else ("end", []))
            _, _, at = myst.take_block(lines, at)
        elif is_open:
            events.append(("text", [lines[at]]))
            at += 1
        elif opening:
            options, body, at = myst.take_block(lines, at)
            by_class = name == "admonition" and "exercise" in options.get("class", "")
            if name == "exercise" or by_class:
                events += [("start", [title]), ("text", [*body, ""]), ("end", [])]
        else:
            at += 1
    return events
