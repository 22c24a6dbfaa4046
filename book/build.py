"""`python -m book build`: run the chapters, then let Sphinx write the pages."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock
from sphinx_external_toc.parsing import parse_toc_yaml

from book import config
from book.bootstrap import ROOT
from book.execute import ChapterError, execute_page


def pages(source: Path, toc: Path) -> list[Path]:
    """The files of the table of contents, in its order."""
    found = []
    for name in parse_toc_yaml(toc):
        path = source / f"{name}.md"
        if not path.is_file():
            raise ChapterError(f"{toc} lists {name!r}, but {path} does not exist")
        found.append(path)
    return found


def run_chapters(source: Path, toc: Path, work: Path, timeout: int) -> None:
    """Execute what is not in the cache; raise one ChapterError that tells all that failed."""
    failures = []
    for path in pages(source, toc):
        name = path.relative_to(source).as_posix()
        start = time.monotonic()
        try:
            if execute_page(path, name, work, timeout=timeout):
                print(f"  ran {name} in {time.monotonic() - start:.0f} s", flush=True)
        except ChapterError as error:
            failures.append(str(error))
    if failures:
        raise ChapterError("\n\n".join(failures))


def run_sphinx(source: Path, toc: Path, work: Path, builder: str, out: Path) -> bool:
    """One pass of Sphinx, every warning an error; False if there was one."""
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-q", "-W", "--keep-going"]
    command += ["-c", str(ROOT / "book"), "-d", str(work / "doctrees")]
    command += ["-D", f"external_toc_path={toc}", str(source), str(out)]
    command[-2:-2] = ["-D", f"nb_execution_cache_path={work / '.jupyter_cache'}"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return subprocess.run(command, cwd=source, env=environment).returncode == 0


def build(
    source: Path = ROOT,
    toc: Path | None = None,
    work: Path = ROOT / "build",
    *,
    timeout: int | None = None,
    builder: str = "html",
) -> Path:
    """Build the pages of `source` into work/html and return the address of the first one.

    Raises ChapterError when a chapter fails or Sphinx warns. A failed build leaves no work/html:
    what was there is moved to work/html-failed, and the next build reads all sources again.
    """
    toc = toc or source / "book" / "_toc.yml"
    out, failed = work / builder, work / f"{builder}-failed"
    work.mkdir(parents=True, exist_ok=True)
    limit = timeout or config.read()["execute"]["timeout"]
    with FileLock(work / ".lock"):  # a second build of the same folder waits
        shutil.rmtree(failed, ignore_errors=True)
        good = False
        try:
            run_chapters(source, toc, work, limit)
            good = run_sphinx(source, toc, work, builder, out)
            if not good:
                raise ChapterError("Sphinx warned (above); warnings are errors here")
        finally:
            if not good:
                shutil.rmtree(work / "doctrees", ignore_errors=True)
                if out.exists():
                    out.rename(failed)
    return out / "index.html"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m book build", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="working folder")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    print("Running the chapters that changed, then writing the pages", flush=True)
    try:
        page = build(work=options.out.resolve())
    except ChapterError as error:
        print(f"\nThe book was not built.\n\n{error}", file=sys.stderr)
        return 1
    print(f"\nBuilt in {time.monotonic() - start:.0f} s. Open this page:\n\n  {page.as_uri()}\n")
    return 0
