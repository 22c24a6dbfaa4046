"""Run an assembled notebook: the student's cells in order, each exercise's tests after them.

One kernel runs the notebook from top to bottom, as "Restart and run all" does. A cell that runs out
of time or memory, or that kills the kernel, is left out; a fresh kernel then runs the others. So
every exercise is graded, whatever another one does. A test passes only with a verdict that the
code in the kernel (book.homework.inside) signed when the test had run to its end; no answer, and
an answer without it, are failures. `inside` says what this does not withstand.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_output

from book.homework.inside import signature
from book.homework.kernel import DIED, MEMORY, TIMEOUT, Kernel, Limits, Outcome

MAX_RESTARTS = 10
INSIDE = "__import__('sys').modules['book.homework.inside']"


class SetupFailed(RuntimeError):
    """The chapter's own set-up cells do not run: no student's fault."""


def run_notebook(notebook: nbformat.NotebookNode, limits: Limits, data: Path) -> None:
    """Run `notebook` in place: outputs, and each cell's verdict in its `homework` metadata.

    data: folder whose files (not notebooks) are copied beside the running notebook.
    Verdict: status "ok", "error", "timeout", "out of memory", "kernel died" or "not run", and a
    message for people. Raises SetupFailed.
    """
    left_out: set[int] = set()
    for restart in range(MAX_RESTARTS + 1):
        with tempfile.TemporaryDirectory(prefix="grading-", ignore_cleanup_errors=True) as folder:
            copy_data(data, Path(folder))
            culprit = _run_once(notebook, limits, Path(folder), left_out)
        if culprit is None:
            return
        left_out.add(culprit)
        if restart == MAX_RESTARTS:
            _give_up(notebook)


def copy_data(source: Path, target: Path) -> None:
    """Copy all files below `source` but notebooks."""
    for path in source.rglob("*") if source.is_dir() else []:
        if path.is_file() and path.suffix != ".ipynb":
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _run_once(
    notebook: nbformat.NotebookNode, limits: Limits, folder: Path, left_out: set[int]
) -> int | None:
    """Run all cells but those left out and the tests that have a verdict.

    Returns the index of the cell that used up this kernel, None at the end of the notebook.
    """
    with Kernel(folder, limits) as kernel:
        limited = False
        for index, cell in enumerate(notebook.cells):
            facts = cell.metadata.get("homework", {})
            role = facts.get("role")
            is_test = role in ("test", "hidden-test")
            if cell.cell_type != "code" or index in left_out or (is_test and "status" in facts):
                continue
            if not limited and role != "homework-setup":
                kernel.limit()
                limited = True
            if is_test:
                arguments = (cell.source, list(facts["names"]), cell.id, role == "hidden-test")
                ask = f"{INSIDE}.verdict"
                outcome = kernel.run(f"{INSIDE}.run_test{arguments!r}", ask=ask)
                facts["touched"] = _check(outcome, kernel.key, cell)
            else:
                outcome = kernel.run(cell.source, None if limited else limits.setup_seconds)
                if not limited and not outcome.ok:
                    raise SetupFailed(outcome.fatal or outcome.error)
            _note(cell, outcome, limits, is_test)
            if outcome.fatal:
                return index
    return None


def _check(outcome: Outcome, key: str, cell: nbformat.NotebookNode) -> str:
    """Fail a test without a signed verdict; returns what the notebook touched of the grader."""
    if not outcome.ok:
        return ""
    signed, _, touched = outcome.answer.partition(" ")
    if signed == signature(key, cell.id, cell.source, touched):
        return touched
    outcome.ok = False
    outcome.error = "the test gave no proof that it ran; the notebook touched the grader"
    return "run_test"


def _note(cell: nbformat.NotebookNode, outcome: Outcome, limits: Limits, is_test: bool) -> None:
    """Write what became of a cell into it, for nbgrader and for the report.

    nbgrader gives a test its points unless its outputs hold an error or anything on stderr, so a
    test that passed keeps its printed text only, and one that did not gets an error.
    """
    facts = cell.metadata.setdefault("homework", {})
    facts["status"] = "ok" if outcome.ok else outcome.fatal or "error"
    facts["message"] = "" if outcome.ok else _words(outcome, limits)
    cell.outputs = outcome.outputs
    if is_test:
        kept = [output for output in outcome.outputs if output.output_type == "stream"]
        for output in kept:
            output.name = "stdout"
        errors = [output for output in outcome.outputs if output.output_type == "error"]
        lines = errors[0].traceback if errors and not outcome.fatal else [facts["message"]]
        failed = new_output("error", ename="Failed", evalue=facts["message"], traceback=lines)
        cell.outputs = kept if outcome.ok else [*kept, failed]
    elif outcome.fatal:
        name, text = outcome.fatal, facts["message"]
        cell.outputs.append(new_output("error", ename=name, evalue=text, traceback=[text]))
    cell.execution_count = None


def _words(outcome: Outcome, limits: Limits) -> str:
    if outcome.fatal == TIMEOUT:
        return f"timeout: it ran longer than {limits.seconds:g} s and was stopped"
    if outcome.fatal == MEMORY:
        return f"out of memory: it took more than {limits.memory_mb} MiB"
    if outcome.fatal == DIED:
        return "kernel died: Python ended while it ran (os._exit, a crash, or too much memory)"
    return outcome.error


def _give_up(notebook: nbformat.NotebookNode) -> None:
    """Fail every test that has no verdict yet."""
    for cell in notebook.cells:
        facts = cell.metadata.get("homework", {})
        if facts.get("role") in ("test", "hidden-test") and "status" not in facts:
            text = f"not run: the notebook used up {MAX_RESTARTS + 1} kernels"
            facts.update(status="not run", message=text)
            cell.outputs = [new_output("error", ename="Failed", evalue=text, traceback=[text])]
