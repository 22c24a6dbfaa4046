"""`python -m book homework`: write each chapter's exercises as a notebook to hand out.

For every chapter with exercises, build/homework/NN-slug/ gets NN-slug.ipynb (and the data files
that its exercises read): the texts, the stubs and the visible tests, in nbgrader's form; no
solution and no hidden test. Hand out that folder. The students need the book's environment
(`make lab`), where the notebook opens like any other.

--check grades two notebooks of each chapter as well: the release as it is must score 0, and the
release filled with the chapter's solutions must get all points. Run it before you hand out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.homework import course
from book.homework.chapter import (
    CHAPTERS,
    ROOT,
    Chapter,
    chapters_with_exercises,
    find_chapter,
    read_chapter,
)

INSTRUCTIONS = """\
# Homework: {title}

*{count} exercises, {points:g} points.*

- **Your name** goes into the cell below.
- **Open** this notebook in the book's JupyterLab (`make lab`), where `rlcore` is installed. \
Run the cells from the top.
- **Work** in the cells marked *your answer*. Add cells where you need them, \
but leave the texts and the tests as they are: the grader puts its own back.
- **Check yourself**: run the test cell below your answer. It says so when it passes; \
otherwise it says what is wrong. More tests run when the notebook is graded.
- **Before you hand in**: *Kernel → Restart Kernel and Run All Cells*, then save. \
The grader does the same, in an empty folder, with a limit on time and memory, and \
without a keyboard: `input()` is not available.
- **Hand in** this one file under its name, `{slug}.ipynb`.
"""
NAME_CELL = 'student_name = ""  # your name, as your instructor knows it'
SETUP = "from rlcore.checking import no_input as input  # nobody can type while this is graded"
HIDDEN_NOTE = "# Hidden tests ({points} for `{id}`) run here when the notebook is graded."


def points_text(points: float) -> str:
    return f"{points:g} point" if points == 1 else f"{points:g} points"


def nbgrader_cell(cell, grade_id: str, role: str, exercise: str = "", points: float | None = None):
    """Give a cell its place in nbgrader (and ours in `homework`), with a stable id."""
    answer = role == "exercise"
    metadata = {"grade": points is not None, "solution": answer, "locked": not answer}
    cell.metadata["nbgrader"] = {
        **metadata,
        "task": False,
        "grade_id": grade_id,
        "schema_version": 3,
        **({"points": points} if points is not None else {}),
    }
    cell.metadata["homework"] = {"role": role, "exercise": exercise}
    cell["id"] = grade_id
    return cell


def source_notebook(chapter: Chapter) -> nbformat.NotebookNode:
    """nbgrader's source version of a chapter's homework: hidden tests in, solutions out."""
    facts = {"title": chapter.title, "slug": chapter.slug, "points": chapter.points}
    intro = INSTRUCTIONS.format(count=len(chapter.exercises), **facts)
    cells = [
        nbgrader_cell(new_markdown_cell(intro), "instructions", "text"),
        new_code_cell(NAME_CELL, id="student-name"),
        nbgrader_cell(new_code_cell(SETUP), "setup", "homework-setup"),
    ]
    for number, part in enumerate(chapter.setup, 1):
        cells.append(nbgrader_cell(new_code_cell(part.source), f"setup-{number}", part.role))
    for number, exercise in enumerate(chapter.exercises, 1):
        heading = (
            f"## {exercise.heading(number)}\n\n`{exercise.id}` · {points_text(exercise.points)}"
        )
        text = new_markdown_cell(f"{heading}\n\n{exercise.text}")
        cells.append(nbgrader_cell(text, f"{exercise.id}--text", "text", exercise.id))
        counts: dict[str, int] = {}
        for part in exercise.parts:
            if part.role == "solution":
                continue
            counts[part.role] = counts.get(part.role, 0) + 1
            name = f"{exercise.id}--{part.role}-{counts[part.role]}"
            source, points = part.source, None
            if part.role == "exercise":
                source = f"# your answer: {exercise.id}\n{source}"
            elif part.role == "test":
                source += f'\nprint("{exercise.id}: this test passes.")'
                points = part.points
            elif part.role == "hidden-test":
                note = HIDDEN_NOTE.format(points=points_text(part.points), id=exercise.id)
                source = f"{note}\n{course.HIDDEN_BEGIN}\n{source}\n{course.HIDDEN_END}"
                points = part.points
            cell = new_code_cell(source)
            cells.append(nbgrader_cell(cell, name, part.role, exercise.id, points))
            cells[-1].metadata["homework"]["names"] = exercise.names
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "homework": {"chapter": chapter.slug}}
    return new_notebook(cells=cells, metadata=metadata)


def prepare_assignment(chapter: Chapter, root: Path, grade_book: bool) -> Path:
    """Put a chapter into the course folder `root`; returns its release notebook."""
    source = root / "source" / chapter.slug
    source.mkdir(parents=True, exist_ok=True)
    nbformat.write(source_notebook(chapter), source / f"{chapter.slug}.ipynb")
    for name in chapter.files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(chapter.path.parent / name, source / name)
    return course.generate_assignment(root, chapter.slug, grade_book) / f"{chapter.slug}.ipynb"


def write_release(chapter: Chapter, out: Path) -> Path:
    """Write out/NN-slug/ with the release notebook and its data; returns the notebook."""
    with tempfile.TemporaryDirectory(prefix="homework-") as folder:
        work = Path(folder)
        with course.isolated(work):
            made = prepare_assignment(chapter, work / "course", grade_book=False)
        target = out / chapter.slug
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(made.parent, target)
    return target / f"{chapter.slug}.ipynb"


def fill(release: Path, chapter: Chapter, target: Path) -> Path:
    """Write the release notebook with the chapter's solutions in the answer cells to `target`."""
    notebook = nbformat.read(release, as_version=4)
    for exercise in chapter.exercises:
        answer = "\n\n".join(part.source for part in exercise.cells("solution"))
        mine = [
            c for c in notebook.cells if c.metadata.get("homework", {}).get("role") == "exercise"
        ]
        for cell in (c for c in mine if c.metadata["homework"]["exercise"] == exercise.id):
            cell.source, answer = answer, ""
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return target


def main(argv: list[str]) -> int:
    """Write release notebooks; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m book homework",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chapters", nargs="*", help="chapters (11-grpo, or 11); default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "homework")
    parser.add_argument("--source", type=Path, default=CHAPTERS, help="folder of the chapters")
    parser.add_argument("--check", action="store_true", help="grade the release and the reference")
    options = parser.parse_args(argv)
    status = 0
    try:
        paths = [find_chapter(name, options.source) for name in options.chapters]
        chapters = [read_chapter(p) for p in paths or chapters_with_exercises(options.source)]
    except ValueError as error:  # ChapterError, MarkupError
        print(f"homework: {error}", file=sys.stderr)
        return 1
    if not chapters:
        print(f"homework: no chapter in {options.source} has exercises", file=sys.stderr)
        return 1
    for chapter in chapters:
        release = write_release(chapter, options.out)
        count = len(chapter.exercises)
        print(f"{release}: {count} exercises, {points_text(chapter.points)}", flush=True)
        if options.check:
            from book.homework.grade import prove

            complaints = prove(chapter, release)
            print("\n".join(complaints) or "  untouched: 0 points; reference: all points")
            status = status or int(bool(complaints))
    return status
