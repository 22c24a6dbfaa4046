"""The part of the grader that runs inside the student's kernel.

A test runs in a namespace of its own: Python's builtins, the names that the exercise's stub
defines, and what the test imports. So a student's `sum = 0`, `torch = None` or helper called like
one of the test's cannot disturb a test, and a test cannot replace a student's function.

What judges a test is taken before any code of the student runs, and a test that passed leaves a
verdict signed with a key that only a closure here and the grader know. So replacing `run_test`,
a builtin, an importer or `rlcore.checking` wins nothing. This is no sandbox: a notebook that looks
for the key in this process, or that replaces parts of torch (seen if by code of its own), still
gets points that it did not earn.
"""

from __future__ import annotations

import builtins
import importlib
import linecache
import os
import secrets
import sys
import traceback
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

# Not an import of book's, which runs notebooks and knows no rlcore: it is the student's kernel that
# has it, and it must be there before the memory limit is measured.
CHECKING = importlib.import_module("rlcore.checking")

run_test: Callable[[str, list[str], str, bool], None]  # made by begin()
verdict = ""  # of the last test: its signature, then what was touched; "" if it did not pass
_START: dict[str, int] = {}  # the notebook's names after the set-up: name -> id of the value


class TestFailed(Exception):
    """Carries a failed test to the grader: `evalue` is the message, the traceback is ours."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines

    def _render_traceback_(self) -> list[str]:  # IPython prints this instead of its own
        return self.lines


def begin(memory_mb: int) -> None:
    """After the set-up cells: set the memory limit, remember the names, print the key.

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
    global run_test
    key = secrets.token_hex(16)
    run_test = _runner(key)
    print(key)  # printed, it stays nowhere in this process but in the closure


def signature(key: str, label: str, source: str, touched: str) -> str:
    """What proves that the test `label` ran this very source to its end."""
    text = "\0".join((label, source, touched))
    return blake2b(text.encode("utf-8", "backslashreplace"), key=key.encode()).hexdigest()


def _runner(key: str) -> Callable[[str, list[str], str, bool], None]:
    """Make `run_test(source, names, label, hidden)`, which runs one test.

    It returns None and leaves a `verdict` if the test passes, else it raises TestFailed. The code
    of a hidden test never appears in the report, only the message and the frames of the student's
    own cells. Every name that a pass depends on is a local one here, taken now: a plain assignment
    in the student's cells does not reach it.
    """
    execute, make, system, module = exec, compile, sys, ModuleType
    package: Any = sys.modules["rlcore"]
    texts, joined, whole, notebook_of = str, ", ".join, dict, _notebook
    plain, finders, known = dict(vars(builtins)), list(sys.meta_path), dict(sys.modules)
    sign = FunctionType(signature.__code__, {"blake2b": blake2b, "__builtins__": plain})
    modules, path = sys.modules, str(CHECKING.__file__)
    checking = compile(Path(path).read_text("utf-8"), path, "exec")
    changes, touched = _changes(), dict[str, None]()  # by now: a failed test tells nothing

    def run_test(source: str, names: list[str], label: str, hidden: bool) -> None:
        global verdict
        verdict = ""
        source = texts.__str__(source)
        touched.update(whole.fromkeys(changes()))
        # what the set-up imported is imported again from there, and found in the same way
        system.modules = modules
        modules.update(known)
        system.meta_path = finders + [one for one in system.meta_path if one not in finders]
        fresh = modules["rlcore.checking"] = package.checking = module("rlcore.checking")
        fresh.__dict__["__builtins__"] = whole(plain)
        notebook = notebook_of()
        space: dict[str, Any] = {"__builtins__": whole(plain), "__name__": label}
        space.update({name: notebook[name] for name in names if name in notebook})
        missing = [name for name in names if name not in notebook]
        filename = f"<{label}>"
        if not hidden:
            linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        try:
            execute(checking, fresh.__dict__)
            execute(make(source, filename, "exec"), space)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
            message = _message(error, missing)
            shadowed = _shadowed(notebook)
            if shadowed:
                message += f" (Your notebook redefines {', '.join(shadowed)}: is that the cause?)"
            raise TestFailed(message, [*_frames(error, filename, hidden), message]) from None
        finally:
            modules["rlcore.checking"] = package.checking = known["rlcore.checking"]
        what = joined(touched)
        verdict = f"{sign(key, label, source, what)} {what}"

    return run_test


def _changes() -> Callable[[], list[str]]:
    """Remembers what grades, and returns a function that names what the notebook has replaced.

    Of torch and the like only what now is code of the notebook counts: torch changes itself.
    """
    system, modules, known, finders = sys, sys.modules, dict(sys.modules), list(sys.meta_path)
    ours = ("rlcore", "book.homework", "builtins", "importlib", "torch")
    owners = {
        name: module
        for name, module in known.items()
        if name.startswith(ours[:2]) or name in (*ours, "importlib._bootstrap")
    }
    if "torch" in known:
        owners["torch.Tensor"] = known["torch"].Tensor
    kept = {name: dict(vars(owner)) for name, owner in owners.items()}
    get = getattr

    def changes() -> list[str]:
        found = []
        for owner, values in kept.items():
            now = vars(owners[owner])
            for name, value in values.items():
                new = now.get(name)
                if new is not value and get(new, "__module__", "") == "__main__":
                    found.append(f"{owner}.{name}")
        replaced = [name for name, old in known.items() if modules.get(name, old) is not old]
        found += [f"sys.modules[{name}]" for name in replaced]
        if system.meta_path[: len(finders)] != finders:
            found.append("sys.meta_path")
        return found

    return changes


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
