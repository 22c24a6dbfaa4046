"""Notebooks to hand in, made from the fixture chapter's release."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from book.homework.chapter import Chapter, read_chapter
from book.homework.release import fill, write_release

DATA = Path(__file__).parent / "data"
SLUG = "99-fixture"


@pytest.fixture(scope="session")
def chapter() -> Chapter:
    return read_chapter(DATA / f"{SLUG}.md")


@pytest.fixture(scope="session")
def release(chapter, tmp_path_factory) -> Path:
    return write_release(chapter, tmp_path_factory.mktemp("homework"))


@pytest.fixture(scope="session")
def reference(chapter, release, tmp_path_factory) -> Path:
    return fill(release, chapter, tmp_path_factory.mktemp("reference") / f"{SLUG}.ipynb")


class Editor:
    """The reference notebook, open for damage."""

    def __init__(self, path: Path) -> None:
        self.notebook = nbformat.read(path, as_version=4)

    def index(self, grade_id: str) -> int:
        cells = self.notebook.cells
        return next(
            i
            for i, cell in enumerate(cells)
            if cell.metadata.get("nbgrader", {}).get("grade_id") == grade_id
        )

    def cell(self, grade_id: str):
        return self.notebook.cells[self.index(grade_id)]

    def answer(self, exercise: str, source: str) -> Editor:
        self.cell(f"{exercise}--exercise-1").source = source
        return self

    def insert_before(self, grade_id: str, source: str) -> Editor:
        self.notebook.cells.insert(self.index(grade_id), nbformat.v4.new_code_cell(source))
        return self

    def save(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.notebook), "utf-8")  # nbformat would repair it
        return path


@pytest.fixture(scope="session")
def edit(reference):
    return lambda: Editor(reference)
