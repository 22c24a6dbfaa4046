"""nbgrader in a box: a course folder of its own, nothing written anywhere else.

nbgrader keeps a course as folders (source, release, submitted, autograded, feedback) with a grade
book (SQLite). Here each chapter is one assignment with one notebook of the same name.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearHiddenTests,
    ClearOutput,
    ComputeChecksums,
    LockCells,
    SaveCells,
)
from sqlalchemy.exc import SAWarning
from traitlets.config import Config

HIDDEN_BEGIN = "### BEGIN HIDDEN TESTS"
HIDDEN_END = "### END HIDDEN TESTS"


@contextmanager
def isolated(work: Path) -> Iterator[None]:
    """Keep Jupyter's, IPython's and matplotlib's files in `work`, and nbgrader's log too.

    nbgrader calls `alembic` by name, so the folder of this interpreter comes first on PATH.
    """
    work.mkdir(parents=True, exist_ok=True)
    home = work / "home"
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "IPYTHONDIR": home / "ipython",
        "MPLCONFIGDIR": home / "matplotlib",  # shared by all kernels: the font list is made once
    }
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    new = {name: str(folder) for name, folder in folders.items()}
    new["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", "")
    new["JUPYTER_PLATFORM_DIRS"] = "1"
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    logger = logging.getLogger("traitlets")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    handler = logging.FileHandler(work / "nbgrader.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SAWarning)  # of nbgrader's use of SQLAlchemy
            yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
        handler.close()
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def course(root: Path, assignment: str, student: str = "*") -> CourseDirectory:
    """The course folder, narrowed to one assignment and, if given, one student."""
    return CourseDirectory(
        root=str(root.resolve()),
        course_id="book",
        assignment_id=assignment,
        student_id=student,
        log=logging.getLogger("traitlets"),
    )


def generate_assignment(root: Path, assignment: str, grade_book: bool) -> Path:
    """From source/ to release/ through nbgrader; with `grade_book`, the cells are recorded there.

    Without nbgrader's ClearSolutions: a chapter keeps stub and solution in two cells, and only the
    stub comes here. Returns the folder of the release.
    """
    config = Config()
    config.GenerateAssignment.preprocessors = [
        LockCells,
        ClearOutput,
        CheckCellMetadata,
        ComputeChecksums,
        *([SaveCells] if grade_book else []),
        ClearHiddenTests,
        ComputeChecksums,
        CheckCellMetadata,
    ]
    converter = GenerateAssignment(coursedir=course(root, assignment), config=config)
    converter.log = logging.getLogger("traitlets")
    converter.force, converter.no_database = True, not grade_book
    converter.start()
    return root / "release" / assignment
