"""Find the notebooks that were handed in, and put each into the shape that was handed out.

Understood are, in the folder of submissions, with NN-slug the chapter:

    student/NN-slug.ipynb    student/<anything>/NN-slug.ipynb    student.ipynb
    student_NN-slug.ipynb    NN-slug_student.ipynb               (or - or a space for the _)

The chapter is read from the file's name, else from the notebook (the release says what it is).
"""

from __future__ import annotations

import ast
import json
import os.path
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell


class Unreadable(ValueError):
    """A file that was handed in is not a notebook."""


@dataclass
class Found:
    """What a folder of submissions holds, by (student, chapter); and what was left out, and why."""

    files: dict[tuple[str, str], list[Path]] = field(default_factory=dict)
    students: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def find_submissions(folder: Path, chapters: Iterable[str]) -> Found:
    """Sort the files below `folder`. `chapters` are the slugs to grade; one of them is the default
    for a notebook that names none.

    Raises ValueError if the folder is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"the folder of submissions {folder} does not exist")
    slugs, found = list(chapters), Found()
    students: set[str] = set()
    for path in sorted(folder.rglob("*"), key=lambda path: str(path)):
        parts = [escaped(part) for part in path.relative_to(folder).parts]
        if any(part.startswith((".", "__MACOSX")) for part in parts):
            continue  # .ipynb_checkpoints, .DS_Store
        if os.path.isdir(path):  # unlike Path.is_dir, False where it may not look
            if len(parts) == 1:
                students.add(_name(parts[0]))
            continue
        if path.suffix != ".ipynb":
            found.skipped.append(("/".join(parts), "not a notebook (.ipynb)"))
            continue
        if os.path.exists(path) and not os.path.isfile(path):
            found.skipped.append(("/".join(parts), "not a file"))  # reading a pipe never ends
            continue
        slug, rest = _chapter_of(path, slugs)
        student = _name(parts[0]) if len(parts) > 1 else _name(rest)
        if slug not in slugs:
            why = (
                f"a notebook of {slug}, which is not graded now" if slug else "of no known chapter"
            )
            found.skipped.append(("/".join(parts), why))
        elif not student:
            found.skipped.append(("/".join(parts), "the file's name does not say whose it is"))
        else:
            students.add(student)
            found.files.setdefault((student, slug), []).append(path)
    found.students = sorted(students)
    return found


def escaped(text: str) -> str:
    """The text with lone surrogates, which no file can hold, as `\\ud800`.

    In a string literal of Python that means the same.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _name(text: str) -> str:
    """A student's name from a file or folder: macOS writes Hangul decomposed, others composed."""
    return unicodedata.normalize("NFC", text).strip(" _-.")


def _chapter_of(path: Path, slugs: list[str]) -> tuple[str, str]:
    """(the chapter, what is left of the file's name)."""
    stem = unicodedata.normalize("NFC", escaped(path.stem))
    for slug in slugs:
        match = re.fullmatch(rf"(.*?)[_\- ]*{re.escape(slug)}(?:\s*\(\d+\))?[_\- ]*(.*)", stem)
        if match:
            return slug, match[1] or match[2]
    try:
        own = json.loads(path.read_text(encoding="utf-8-sig"))["metadata"]["homework"]["chapter"]
        if isinstance(own, str):
            return own, stem
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # unreadable: grading it says so, under the student's name
    other = re.search(r"(?<!\d)\d\d-[a-z][a-z0-9-]+", stem)
    if other:
        return other[0], stem
    return (slugs[0], stem) if len(slugs) == 1 else ("", stem)


def read_submission(path: Path) -> nbformat.NotebookNode:
    """Read a notebook that was handed in. Raises Unreadable with the reason.

    More tolerant than nbformat: of a cell only its kind, source and metadata matter, and what
    another program left out or bent is no reason to grade nothing.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(data, dict) and "worksheets" in data:  # format 3, before 2015
            data = nbformat.reads(json.dumps(data), as_version=4)
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path.name} cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise Unreadable(f"{path.name} is not a notebook: no JSON ({error})") from error
    except Exception as error:  # nbformat raises many kinds
        raise Unreadable(f"{path.name} is not a notebook ({type(error).__name__})") from error
    given = data.get("cells") if isinstance(data, dict) else None
    cells = []
    for cell in given if isinstance(given, list) else []:
        if isinstance(cell, dict):
            make = new_code_cell if cell.get("cell_type") == "code" else new_markdown_cell
            source, metadata = cell.get("source", ""), cell.get("metadata")
            text = "".join(map(str, source)) if isinstance(source, list) else str(source)
            metadata = metadata if isinstance(metadata, dict) else {}
            cells.append(make(escaped(text), metadata=nbformat.from_dict(metadata)))
    if not cells:
        raise Unreadable(f"{path.name} is not a notebook: it holds no cells")
    return nbformat.v4.new_notebook(cells=cells)


def typed_name(notebook: nbformat.NotebookNode) -> str:
    """What stands in the cell `student_name = ...`, if it is a plain text."""
    for cell in notebook.cells:
        match = re.search(
            r"^student_name\s*=\s*(.+?)(?:\s+#.*)?$", str(cell.get("source", "")), re.M
        )
        if match:
            try:
                value = ast.literal_eval(match[1])
            except (ValueError, SyntaxError):
                continue
            return escaped(value) if isinstance(value, str) else ""
    return ""


def assemble(
    release: nbformat.NotebookNode, submission: nbformat.NotebookNode
) -> tuple[nbformat.NotebookNode, dict[str, list[str]]]:
    """The release notebook with the student's cells in the place of the stubs.

    Every text, set-up and test cell is the release's own; all other cells of the submission are
    the student's, in their order, under the exercise that they stand below. Tests stand at the end
    of their exercise. Returns the notebook and remarks by exercise ("" for the notebook).
    """
    ours = {
        cell.metadata["nbgrader"]["grade_id"]: cell for cell in release.cells if _grade_id(cell)
    }
    # a copy without metadata is still known by its text
    by_source = {
        cell.source.strip(): grade_id
        for grade_id, cell in ours.items()
        if _role(cell) != "exercise" and cell.source.strip()
    }
    sections: dict[str, list] = {"": []}
    for cell in release.cells:
        sections.setdefault(cell.metadata.get("homework", {}).get("exercise", ""), [])
    remarks: dict[str, list[str]] = {name: [] for name in sections}
    seen: Counter[str] = Counter()
    here = ""
    for cell in submission.cells:
        source = str(cell.get("source", ""))
        grade_id = _grade_id(cell)
        if grade_id not in ours:
            grade_id = by_source.get(source.strip(), "")
        if grade_id:
            mine = ours[grade_id]
            here = mine.metadata["homework"]["exercise"]
            seen[grade_id] += 1
            if _role(mine) != "exercise":
                changed = source.strip() != mine.source.strip() or cell.cell_type != mine.cell_type
                if changed and _role(mine) != "text":
                    remarks[here].append(f"the cell {grade_id} was changed; the original was used")
                continue
            if seen[grade_id] == 1 and cell.cell_type == "code":
                answer = deepcopy(mine)
                answer.source, answer.outputs = source, []
                sections[here].append(answer)
                continue
        if source.strip():
            make = new_code_cell if cell.cell_type == "code" else new_markdown_cell
            extra = make(source)
            extra.metadata["homework"] = {"role": "own", "exercise": here}
            sections[here].append(extra)
    cells = []
    for name in sections:
        official = [cell for cell in release.cells if _exercise(cell) == name]
        before = [cell for cell in official if _role(cell) in ("text", "homework-setup")]
        after = [cell for cell in official if _role(cell) in ("test", "hidden-test")]
        cells += [*map(deepcopy, before), *sections[name], *map(deepcopy, after)]
        for cell in official:
            grade_id, count = _grade_id(cell), seen[_grade_id(cell)]
            if not grade_id or _role(cell) == "text":
                continue
            if count == 0 and _role(cell) == "exercise":
                remarks[name].append(f"the answer cell {grade_id} was not in the notebook")
            elif count == 0:
                remarks[name].append(f"the cell {grade_id} was missing; the original was put back")
            elif count > 1 and _role(cell) != "exercise":
                remarks[name].append(f"the cell {grade_id} was there {count} times; it ran once")
    for number, cell in enumerate(cells):
        cell["id"] = _grade_id(cell) or f"own-{number}"
    notebook = deepcopy(release)
    notebook.cells = cells
    return notebook, remarks


def _grade_id(cell) -> str:
    details = cell.metadata.get("nbgrader")
    return str(details.get("grade_id", "")) if isinstance(details, dict) else ""


def _role(cell) -> str:
    return cell.metadata.get("homework", {}).get("role", "")


def _exercise(cell) -> str:
    """The section of a release cell; None-like for the name cell, which is not graded."""
    return cell.metadata.get("homework", {}).get("exercise", "?")
