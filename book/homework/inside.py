"""The part of the grader that runs inside the student's kernel.

A test runs in a namespace of its own: Python's builtins, the names that the exercise's stub
defines, and what the test imports. So a student's `sum = 0`, `torch = None` or helper called like
one of the test's cannot disturb a test, and a test cannot replace a student's function.
"""

from __future__ import annotations

import builtins
import importlib
import linecache
import os
import sys
import traceback
from types import FrameType
from typing import Any

_START: dict[str, int] = {}  # the notebook's names after the set-up: name -> id of the value


class TestFailed(Exception):
    """Carries a failed test to the grader: `evalue` is the message, the traceback is ours."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines

    def _render_traceback_(self) -> list[str]:  # IPython prints this instead of its own
        return self.lines


def begin(memory_mb: int) -> None:
    """After the set-up cells: set the memory limit and remember the names.

    The limit is on what the kernel takes beyond what it has now (PyTorch alone maps gigabytes).
    Only Linux enforces it here; the grader watches the resident size as well, everywhere.
    """
    try:
        import resource
    except ImportError:  # Windows
        resource = None  # type: ignore[assignment]
    if resource is not None and sys.platform == "linux":
        with open("/proc/self/statm") as status:
            data_pages = int(status.read().split()[5])
        limit = data_pages * os.sysconf("SC_PAGE_SIZE") + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _START.clear()
    _START.update({name: id(value) for name, value in _notebook().items()})


def run_test(source: str, names: list[str], label: str, hidden: bool) -> None:
    """Run one test. Returns None if it passes, else raises TestFailed with the reason.

    The code of a hidden test never appears in the report, only the message and the frames of the
    student's own cells.
    """
    notebook = _notebook()
    space: dict[str, Any] = {"__builtins__": builtins, "__name__": label}
    space.update({name: notebook[name] for name in names if name in notebook})
    missing = [name for name in names if name not in notebook]
    filename = f"<{label}>"
    if not hidden:
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    kept = sys.modules.pop("rlcore.checking", None)  # a fresh one, whatever was done to this one
    try:
        importlib.import_module("rlcore.checking")
        exec(compile(source, filename, "exec"), space)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        message = _message(error, missing)
        shadowed = _shadowed(notebook)
        if shadowed:
            message += f" (Your notebook redefines {', '.join(shadowed)}: is that the cause?)"
        raise TestFailed(message, [*_frames(error, filename, hidden), message]) from None
    finally:
        if kept is not None:
            sys.modules["rlcore.checking"] = kept


def _notebook() -> dict[str, Any]:
    shell = sys.modules["IPython"].get_ipython()
    return shell.user_ns


def _message(error: BaseException, missing: list[str]) -> str:
    name, text = type(error).__name__, str(error).strip()
    if isinstance(error, NameError) and error.name in missing:
        return f"`{error.name}` is not defined: did the cell that defines it run without an error?"
    if isinstance(error, NotImplementedError):
        return "not written yet (NotImplementedError)"
    if name == "CheckFailed":
        return text
    if isinstance(error, AssertionError):
        return text or "an assertion of the test does not hold"
    if isinstance(error, MemoryError):
        return "MemoryError: can't allocate memory"  # PyTorch's words; the grader looks for them
    return f"{name}: {text}" if text else name


def _frames(error: BaseException, test: str, hidden: bool) -> list[str]:
    """Where it failed: the test's line (if it may be shown) and the student's lines."""

    def shown(frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        return (name == test and not hidden) or "ipykernel_" in name

    steps = traceback.walk_tb(error.__traceback__)
    lines = []
    for frame, line in steps:
        if shown(frame):
            where = "the test" if frame.f_code.co_filename == test else "your notebook"
            code = linecache.getline(frame.f_code.co_filename, line).strip()
            lines.append(f"in {where}, {frame.f_code.co_name}, line {line}: {code}")
    if len(lines) > 12:
        lines = [*lines[:6], f"... {len(lines) - 10} more ...", *lines[-4:]]
    return [line.replace("<module>", "top level") for line in lines]


def _shadowed(notebook: dict[str, Any]) -> list[str]:
    """Builtins and names of the set-up that the student's cells have given another value."""
    own = {name for name in notebook if not name.startswith("_")}
    changed = {name for name in own & set(_START) if id(notebook[name]) != _START[name]}
    return [f"`{name}`" for name in sorted(changed | (own - set(_START)) & set(dir(builtins)))]
