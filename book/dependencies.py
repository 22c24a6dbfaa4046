"""What a chapter depends on besides its own text: the project's code that it imports, and its data.

The stored outputs of a chapter are good only as long as all of this is unchanged. Only imports are
followed (also those inside functions), so an edit to one widget runs the chapters that use widgets
again, and no others.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from functools import cache
from pathlib import Path

from book.bootstrap import ROOT

PACKAGES = ("rlcore", "widgets", "book", "tests")
RUNS = "chapters/runs"
PROVED = "tests/data"  # what the tests' modules read
ALWAYS = ("requirements.txt", "book/quoted.py", "book/kernel_config.py")


def fingerprint(source: str, root: Path = ROOT) -> str:
    """Hash of every file that code with this source can reach, and of the pinned packages.

    source: the code cells of a page, joined. Lines of IPython magic are ignored.
    """
    try:
        tree = ast.parse(without_magic(source))
    except SyntaxError:
        return "not Python"  # running the page will say where
    digest = hashlib.sha256(".".join(map(str, sys.version_info[:2])).encode())
    files = {root / name for name in ALWAYS}
    files |= closure(imported(tree, ""), root)
    if "runs" in source:
        files |= {path for path in (root / RUNS).rglob("*") if path.is_file()}
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def without_magic(source: str) -> str:
    """The code of a cell with IPython's own lines (%magic, !command) blanked."""
    return "\n".join("" if re.match(r"\s*[%!]", line) else line for line in source.splitlines())


def closure(modules: set[str], root: Path) -> set[Path]:
    """The files of these modules and of all that they import from the project, in turn."""
    files: set[Path] = set()
    todo, seen = set(modules), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        path = module_file(name, root)
        if path is None:
            continue
        files.add(path)
        # drawings and data that a package reads at run time
        if path.parent.name == "widgets":
            files |= {p for p in path.parent.rglob("*") if p.suffix in (".js", ".css", ".json")}
        if name.startswith("tests."):
            files |= {p for p in (root / PROVED).rglob("*") if p.is_file()}
        todo |= _imports_of(path, name, path.stat().st_mtime_ns)
        parent = name.rpartition(".")[0]
        if parent:
            todo.add(parent)
    return files


def module_file(name: str, root: Path) -> Path | None:
    """The file of a dotted name, or None if it is not a module of this project."""
    if name.split(".")[0] not in PACKAGES:
        return None
    base = root.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _imports_of(path: Path, name: str, _changed: int) -> set[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return imported(ast.parse(path.read_text(encoding="utf-8")), package)


def imported(tree: ast.AST, package: str) -> set[str]:
    """All dotted names that a syntax tree imports; `from a import b` may mean the module a.b."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base]).rstrip(".")
            names.add(base)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names
