"""`python -m book grade`: grade a folder of submissions through nbgrader.

    python -m book homework --check               first: release notebooks, and the proof of them
    python -m book grade --submissions DIR        then: every chapter found in DIR
    python -m book grade --submissions DIR 11-grpo --out build/grades

DIR may hold student/NN-slug.ipynb, student/<anything>/NN-slug.ipynb, student.ipynb or
student_NN-slug.ipynb. A folder of a student without a notebook is a row with 0 points. What was
left out, and why, is printed and stands in report.json.

build/grades then holds
    scores.csv      a row per student: points per exercise, total, max, status
    feedback/       a page per student, one file each, to be sent as it is
    report.json     the same with a message per exercise, versions and limits
    work/           nbgrader's course folder with its grade book (gradebook.db) per chapter

Each notebook runs in a fresh, empty folder with a limit on the time of a cell (--seconds) and on
memory (--memory, MiB). Original tests are used, whatever the notebook holds. One student's failure
never stops the others. Ctrl-C stops after writing what there is; the same command goes on, and only
what is new or changed is graded (--force: everything).

The students' code runs under your account, with your rights. The limits guard against accidents,
not against malice: for people that you do not know, grade in a container or a virtual machine.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
import platform
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearOutput,
    OverwriteCells,
    SaveAutoGrades,
)

from book.homework import course, feedback, release
from book.homework.chapter import (
    CHAPTERS,
    ROOT,
    Chapter,
    chapters_with_exercises,
    find_chapter,
    read_chapter,
)
from book.homework.execute import SetupFailed, run_notebook
from book.homework.kernel import Limits
from book.homework.submissions import (
    Unreadable,
    assemble,
    find_submissions,
    read_submission,
    typed_name,
)

Result = dict[str, Any]
WATCHED = ("rlcore", "book/homework")  # a change in these makes all results old


def grade_notebook(
    chapter: Chapter, root: Path, student: str, path: Path, limits: Limits
) -> Result:
    """Grade one notebook in the course folder `root`, into which `chapter` was put before.

    Returns the result as it stands in report.json. Whatever the notebook is, this returns; only
    the chapter's own fault (SetupFailed) and nbgrader's are raised.
    """
    safe = safe_id(student)
    try:
        submission = read_submission(path)
    except Unreadable as error:
        return empty_result(chapter, f"not graded: {error}")
    notebook = root / "release" / chapter.slug / f"{chapter.slug}.ipynb"
    assembled, remarks = assemble(nbformat.read(notebook, as_version=4), submission)
    submitted = root / "submitted" / safe / chapter.slug
    shutil.rmtree(submitted, ignore_errors=True)
    submitted.mkdir(parents=True)
    nbformat.write(assembled, submitted / notebook.name)
    graded = autograde(root, chapter.slug, safe, limits)
    with Gradebook(course.course(root, chapter.slug).db_url, "book") as gradebook:
        gradebook.update_or_create_student(safe, first_name=student)
        grades = gradebook.find_submission_notebook(chapter.slug, chapter.slug, safe).grades
        scores = {grade.name: (float(grade.score), float(grade.max_score)) for grade in grades}
    result = empty_result(chapter, "graded")
    result["name_in_notebook"] = typed_name(submission)
    result["remarks"] = remarks.pop("")
    touched = [cell.metadata["homework"].get("touched", "") for cell in graded.cells]
    names = dict.fromkeys(name for text in touched if text for name in text.split(", "))
    if names:
        result["remarks"].append(f"touched the grader: {', '.join(names)}")
    for exercise in chapter.exercises:
        cells = [c for c in graded.cells if c.metadata["homework"]["exercise"] == exercise.id]
        ids = [c.metadata.get("nbgrader", {}).get("grade_id") for c in cells]
        points = sum(scores[name][0] for name in ids if name in scores)
        message = exercise_message(exercise.id, cells, points >= exercise.points)
        message = " · ".join([message, *remarks[exercise.id]])
        result["exercises"][exercise.id].update(points=points, message=message)
    result["points"] = sum(one["points"] for one in result["exercises"].values())
    return result


def exercise_message(identity: str, cells: list, full: bool) -> str:
    """One line on an exercise: what became of the student's cells, then of the tests."""
    if full:
        return f"{identity}: all tests pass"
    own, tests = [], []
    for cell in cells:
        facts = cell.metadata["homework"]
        if facts.get("status", "ok") == "ok":
            continue
        if facts["role"] in ("test", "hidden-test"):
            tests.append(facts["message"])
        else:
            own.append(f"in a cell of the answer: {facts['message']}")
    # when the answer broke, that its names are missing says nothing new
    missing = [text for text in tests if "is not defined" in text]
    shown = own + [text for text in tests if not (own and text in missing)]
    return f"{identity}: " + "; ".join(dict.fromkeys(text.rstrip(".") for text in shown or tests))


def autograde(root: Path, slug: str, student: str, limits: Limits) -> nbformat.NotebookNode:
    """nbgrader's autograde for one student, with our execution in the place of its own.

    nbgrader restores the locked cells from its grade book (hidden tests come in here) and saves
    the scores. Its own execution cannot grade the rest of a notebook whose kernel died.
    """

    folder = root / "autograded" / student / slug
    failures: list[Exception] = []

    def execute(notebook: nbformat.NotebookNode, resources: dict) -> tuple:
        try:
            run_notebook(notebook, limits, root / "source" / slug)
        except Exception as error:  # nbgrader would only log it
            failures.append(error)
            raise
        return notebook, resources

    converter = Autograde(
        coursedir=course.course(root, slug, student),
        exporter_class=NotebookExporter,
        force=True,
        permissions=644,
    )
    converter.sanitize_preprocessors = [ClearOutput, OverwriteCells, CheckCellMetadata]
    converter.autograde_preprocessors = [execute, SaveAutoGrades, CheckCellMetadata]
    converter.log = logging.getLogger("traitlets")
    try:
        converter.start()
    except Exception as error:
        raise (failures[0] if failures else error) from None
    return nbformat.read(folder / f"{slug}.ipynb", as_version=4)


def empty_result(chapter: Chapter, status: str) -> Result:
    """A result with 0 points, which grading fills in."""
    message = "" if status == "graded" else status
    exercises = {
        one.id: {"points": 0.0, "max": one.points, "message": f"{one.id}: {message}"}
        for one in chapter.exercises
    }
    return {
        "chapter": chapter.slug,
        "title": chapter.title,
        "points": 0.0,
        "max": chapter.points,
        "status": status,
        "remarks": [],
        "exercises": exercises,
    }


def safe_id(student: str) -> str:
    """A name for nbgrader's folders and patterns: any other character costs a piece of hash."""
    plain = re.sub(r"[^\w-]", "_", student)
    mark = hashlib.sha256(student.encode()).hexdigest()[:8]
    return plain if plain == student and student.isascii() else f"{plain}-{mark}"


class Course:
    """The work folder of one chapter: nbgrader's course, and results by student and content.

    All of it is thrown away when the chapter, rlcore or the grader itself has changed.
    """

    def __init__(self, chapter: Chapter, work: Path, limits: Limits) -> None:
        self.chapter, self.limits = chapter, limits
        self.root = work / chapter.slug
        stamp = self.root / "content.txt"
        digest = self._digest()
        if not stamp.is_file() or stamp.read_text() != digest:
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir(parents=True)
            release.prepare_assignment(chapter, self.root, grade_book=True)
            stamp.write_text(digest)

    def _digest(self) -> str:
        chapter = self.chapter
        files = [chapter.path, *(chapter.path.parent / name for name in chapter.files)]
        for folder in WATCHED:
            files += sorted((ROOT / folder).rglob("*.py")) + sorted((ROOT / folder).rglob("*.j2"))
        made = hashlib.sha256(version("nbgrader").encode())
        for path in files:
            made.update(path.read_bytes())
        return made.hexdigest()

    def grade(self, student: str, paths: list[Path], force: bool) -> tuple[Result, bool]:
        """The result of one student, and whether it was graded now (False: known from before)."""
        slug = self.chapter.slug
        if not paths:
            return empty_result(self.chapter, f"not graded: no notebook of {slug}"), False
        if len(paths) > 1:
            names = " and ".join(f"{path.parent.name}/{path.name}" for path in paths)
            why = f"not graded: {len(paths)} notebooks ({names}); leave one and grade again"
            return empty_result(self.chapter, why), False
        try:
            content = hashlib.sha256(paths[0].read_bytes() + repr(self.limits).encode()).hexdigest()
        except OSError as error:
            why = f"not graded: {paths[0].name} cannot be read ({error.strerror})"
            return empty_result(self.chapter, why), False
        kept = self.root / "results" / f"{safe_id(student)}.json"
        if kept.is_file() and not force:
            known = json.loads(kept.read_text("utf-8"))
            if known["content"] == content:
                return known["result"], False
        try:
            result = grade_notebook(self.chapter, self.root, student, paths[0], self.limits)
        except SetupFailed as error:
            return empty_result(self.chapter, f"not graded: the set-up cells fail: {error}"), True
        except Exception as error:  # one student never stops the others
            logging.getLogger("traitlets").exception("grading %s", student)
            why = f"not graded: the grader failed ({type(error).__name__}: {error})"
            return empty_result(self.chapter, why), True
        if result["status"] == "graded":
            feedback.write_fragment(self.root, slug, safe_id(student))
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps({"content": content, "result": result}), "utf-8")
        return result, True

    def fragment(self, student: str) -> str:
        slug = self.chapter.slug
        path = self.root / "feedback" / safe_id(student) / slug / f"{slug}.html"
        return path.read_text("utf-8") if path.is_file() else ""


def write_scores(path: Path, chapters: list[Chapter], results: dict[str, list[Result]]) -> None:
    """scores.csv: with more than one chapter, the exercises' columns name theirs.

    A name that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    single = len(chapters) == 1
    columns = {
        (chapter.slug, one.id): one.id if single else f"{chapter.slug}/{one.id}"
        for chapter in chapters
        for one in chapter.exercises
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["student", *columns.values(), "total", "max", "status"])
        for student, rows in results.items():
            by_slug = {row["chapter"]: row for row in rows}
            points = [
                f"{by_slug[slug]['exercises'][name]['points']:g}" if slug in by_slug else ""
                for slug, name in columns
            ]
            total, most = (f"{sum(row[key] for row in rows):g}" for key in ("points", "max"))
            status = "; ".join(dict.fromkeys(row["status"] for row in rows))
            name = f"'{student}" if student.startswith(tuple("=+-@\t\r")) else student
            writer.writerow([name, *points, total, most, status])


def write_feedback(folder: Path, courses: list[Course], results: dict[str, list[Result]]) -> None:
    """A page per student, named after the student."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    by_slug = {one.chapter.slug: one for one in courses}
    for student, rows in results.items():
        parts = []
        for row in rows:
            ran = row["status"] == "graded"
            parts.append((row, by_slug[row["chapter"]].fragment(student) if ran else ""))
        name = re.sub(r'[\\/:*?"<>|]', "_", student)
        (folder / f"{name}.html").write_text(feedback.page(student, parts), "utf-8")


def grade_folder(
    folder: Path, out: Path, chapters: list[Chapter], limits: Limits, force: bool = False
) -> dict[str, Any]:
    """Grade `folder` into `out`; returns the report. Raises ValueError if the folder is missing."""
    found = find_submissions(folder, [chapter.slug for chapter in chapters])
    for path, why in found.skipped[:10]:
        print(f"left out: {path}: {why}")
    if len(found.skipped) > 10:
        print(f"left out: {len(found.skipped) - 10} more files, listed in report.json")
    present = {slug for _, slug in found.files}
    if len(chapters) > 1:  # grade what was handed in, not what never was given out
        chapters = [chapter for chapter in chapters if chapter.slug in present]
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Result]] = {student: [] for student in found.students}
    interrupted = False
    with course.isolated(out / "work"):
        courses = [Course(chapter, out / "work", limits) for chapter in chapters]
        jobs = [(student, one) for one in courses for student in found.students]
        spent: list[float] = []
        try:
            for number, (student, one) in enumerate(jobs, 1):
                start = time.monotonic()
                paths = found.files.get((student, one.chapter.slug), [])
                result, fresh = one.grade(student, paths, force)
                results[student].append(result)
                if fresh:
                    spent.append(time.monotonic() - start)
                _progress(number, len(jobs), student, result, fresh, spent)
        except KeyboardInterrupt:
            interrupted = True
            print("\ninterrupted: the same command goes on from here", flush=True)
        results = {student: rows for student, rows in results.items() if rows}
        write_feedback(out / "feedback", courses, results)
    write_scores(out / "scores.csv", chapters, results)
    report = {
        "submissions": str(folder),
        "chapters": {chapter.slug: chapter.points for chapter in chapters},
        "complete": not interrupted,
        "graded_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "limits": asdict(limits),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("nbgrader", "ipykernel", "torch")},
        },
        "left_out": [{"file": path, "why": why} for path, why in found.skipped],
        "students": results,
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (out / "report.json").write_text(text + "\n", "utf-8")
    return report


def _progress(
    number: int, count: int, student: str, result: Result, fresh: bool, spent: list[float]
) -> None:
    points = f"{result['points']:g}/{result['max']:g}"
    what = "" if result["status"] == "graded" else f"  {result['status']}"
    time_left = ""
    if fresh and number < count:
        seconds = sum(spent) / len(spent) * (count - number)
        time_left = (
            f"  (about {max(1, round(seconds / 60))} min left)"
            if seconds > 60
            else (f"  (about {seconds:.0f} s left)")
        )
    again = "" if fresh or what else "  unchanged"
    print(
        f"[{number}/{count}] {result['chapter']}  {student}: {points}{what}{again}{time_left}",
        flush=True,
    )


def prove(chapter: Chapter, notebook: Path) -> list[str]:
    """Grade a chapter's release as it is and with its solutions; returns what is wrong.

    Right is: no point for the untouched notebook, all points for the reference, and no test of the
    untouched notebook that gives points without work.
    """
    with tempfile.TemporaryDirectory(prefix="homework-proof-") as name:
        folder = Path(name)
        (folder / "in" / "untouched").mkdir(parents=True)
        shutil.copyfile(notebook, folder / "in" / "untouched" / notebook.name)
        release.fill(notebook, chapter, folder / "in" / "reference" / notebook.name)
        with course.isolated(folder / "work"):
            one = Course(chapter, folder / "work", Limits())
            results = {
                who: one.grade(who, [folder / "in" / who / notebook.name], force=True)[0]
                for who in ("untouched", "reference")
            }
    complaints = []
    for who, wanted in (("untouched", 0.0), ("reference", chapter.points)):
        result = results[who]
        if result["status"] != "graded":
            complaints.append(f"  {who}: {result['status']}")
        for identity, exercise in result["exercises"].items():
            if exercise["points"] != (0.0 if who == "untouched" else exercise["max"]):
                complaints.append(f"  {who}: {identity}: {exercise['message']}")
        if result["points"] != wanted and not complaints:
            complaints.append(f"  {who}: {result['points']:g} points, not {wanted:g}")
    return complaints


def main(argv: list[str]) -> int:
    """Grade a folder; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m book grade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="[DIR] CHAPTER", help="chapters; default: all")
    parser.add_argument("--submissions", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "grades")
    parser.add_argument("--source", type=Path, default=CHAPTERS, help="folder of the chapters")
    parser.add_argument("--seconds", type=float, default=Limits.seconds, help="for one cell")
    parser.add_argument("--memory", type=int, default=Limits.memory_mb, help="MiB for one notebook")
    parser.add_argument("--force", action="store_true", help="grade again what was graded before")
    options = parser.parse_args(argv)
    words = list(options.words)
    if options.submissions is None:
        if not words:
            parser.error("say which folder: --submissions DIR")
        options.submissions = Path(words.pop(0))
    if options.seconds <= 0 or options.memory <= 0:
        parser.error("--seconds and --memory must be positive")
    limits = Limits(seconds=options.seconds, memory_mb=options.memory)
    try:
        paths = [find_chapter(name, options.source) for name in words]
        chapters = [read_chapter(p) for p in paths or chapters_with_exercises(options.source)]
        if not chapters:
            raise ValueError(f"no chapter in {options.source} has exercises")
        report = grade_folder(options.submissions, options.out, chapters, limits, options.force)
    except ValueError as error:
        print(f"grade: {error}", file=sys.stderr)
        return 1
    if not report["complete"]:
        return 130
    print(
        f"{options.out / 'scores.csv'}  {options.out / 'feedback'}  {options.out / 'report.json'}"
    )
    return 0
