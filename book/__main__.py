"""`python -m book <command>`: make the book, read it, test it, hand it out, grade it.

Each command sets up `.venv` first if that is needed (see bootstrap.py), and lives in a module of
its own that is imported only when it is called.
"""

from __future__ import annotations

import importlib
import shutil
import sys

from book import bootstrap

# command -> (module with main(arguments) -> status, or module:function; what `help` says)
COMMANDS = {
    "setup": ("", "make .venv and install the pinned packages; nothing else"),
    "build": ("book.build", "run every chapter and build the pages into build/html"),
    "book": ("book.build", "the same as build"),
    "lab": ("book.lab", "open JupyterLab; double-click a chapter to run it"),
    "serve": ("book.serve", "serve build/html on this machine [--port N]"),
    "test": ("book.test", "lint, types and all tests [pytest arguments]"),
    "check": ("book.check", "check links, anchors, offline use, raw mathematics [FOLDER]"),
    "tidy": ("book.tidy", "write the chapters in the form in which JupyterLab saves them"),
    "homework": ("book.homework.release", "write the release notebooks into build/homework"),
    "grade": ("book.homework.grade", "grade a folder of submissions: grade FOLDER"),
    "record": ("book.record", "train and record the runs that the chapters plot (hours)"),
    "bench": ("book.bench", "what objectives and training cost beside TRL [objectives | training]"),
    "gpu-check": ("book.gpu_check", "a GPU beside the CPU: numbers, speed, a run [--device cpu]"),
    "clean": ("", "remove what was built, grades excepted; --all: grades and .venv too"),
    "help": ("", "print this list"),
}
CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")


def print_help() -> None:
    print("python -m book <command>        (or: make <command>)\n")
    for name, (_, text) in COMMANDS.items():
        print(f"  {name:<10}{text}")
    print("\nmake grade SUBMISSIONS=folder   every command is a target of make too")


def clean(arguments: list[str]) -> None:
    """Remove what the other commands made, inside the project only.

    Grades stay unless --all is given: a grade book may hold manual scores, which nothing remakes.
    """
    built = bootstrap.ROOT / "build"
    doomed = [path for path in built.glob("*") if path.name != "grades"]
    doomed += [bootstrap.ROOT / name for name in CACHES]
    if "--all" in arguments:
        doomed += [built, bootstrap.VENV]
    for path in doomed:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        else:
            continue
        print(f"removed {path}")


def main(arguments: list[str]) -> int:
    """Run one command; the exit status is 0 only if all went well."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    if command in ("-h", "--help"):
        command = "help"
    if command not in COMMANDS:
        print(f"unknown command {command!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if command == "help":
        print_help()
        return 0
    if command == "clean":
        clean(rest)
        return 0
    try:
        bootstrap.enter(arguments)
    except bootstrap.SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    if command == "setup":
        print(f"ready: {bootstrap.venv_python()}")
        return 0
    module, _, function = COMMANDS[command][0].partition(":")
    call = getattr(importlib.import_module(module), function or "main")
    return int(call(rest) or 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
