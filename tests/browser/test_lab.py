"""A chapter in JupyterLab as a learner meets it: double-click, run all, play, save."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from book import lab, pages, tidy

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = tidy.chapters()
# What the notebook's model holds: it does not depend on which cells are on the screen.
STATE = """() => {
  const cells = [...window.jupyterapp.shell.currentWidget.content.widgets];
  return cells.map((cell, index) => ({
    index,
    type: cell.model.type,
    source: cell.model.sharedModel.getSource(),
    done: cell.model.type !== "code" || cell.model.executionCount !== null,
    outputs: cell.model.type === "code" ? cell.model.outputs.toJSON() : [],
    values: cell.model.getMetadata("user_expressions") ?? [],
  }));
}"""
SHOW = """index => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = index;
  return notebook.scrollToItem(index, "start");
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """JupyterLab with the book's settings on a copy of the chapters: (address, folder)."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "chapters", folder / "chapters")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "tests" / "book" / "data" / "demo.md", folder / "chapters" / "demo.md")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--no-browser", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    options += ["--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True"]
    command = lab.command(options, folder)
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=lab.environment(), stdout=log, stderr=log
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: answers(address) or process.poll() is not None, 120)
        assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
        yield address, folder
    finally:
        process.terminate()
        process.wait(30)


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/api/status", timeout=10).status == 200
    except OSError:
        return False


def wait(condition, seconds: float, report=lambda: ""):
    """The first true value of `condition()`; fails with `report()` after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.5)
    pytest.fail(f"waited {seconds} s\n{report()}")


def open_chapter(browser, address: str, name: str):
    """A page with the chapter open, by a double-click in the file browser."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    outside: list[str] = []
    local = ("data:", "blob:", address, address.replace("http", "ws"))
    page.on("request", lambda r: r.url.startswith(local) or outside.append(r.url))
    page.set_default_timeout(120_000)
    page.goto(f"{address}/lab/tree/chapters?reset")
    item = page.locator(".jp-DirListing-item").filter(has_text=name)
    item.wait_for()
    item.dblclick()
    page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel"
        "?.status === 'idle'"
    )
    return page, outside


def run_all(page, seconds: float) -> list[dict]:
    """Run > Run All Cells; the cells' state when the last one has ended."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    missing: list = []

    def finished():
        cells = page.evaluate(STATE)
        for cell in cells:
            for output in cell["outputs"]:
                if output["output_type"] == "error":
                    text = "\n".join(output["traceback"])
                    pytest.fail(f"cell {cell['index']}:\n{cell['source'][:300]}\n{text}")
        missing[:] = [cell for cell in cells if not cell["done"]]
        missing.extend(
            cell
            for cell in cells
            if cell["type"] == "markdown" and "{eval}`" in prose(cell) and not cell["values"]
        )
        return None if missing else cells

    return wait(finished, seconds, lambda: [cell["source"][:200] for cell in missing])


def prose(cell: dict) -> str:
    """The Markdown of a cell without its code blocks."""
    return re.sub(r"(?ms)^```\w*\n.*?^```$", "", cell["source"])


def values(cells: list[dict]) -> dict[str, str]:
    """What JupyterLab shows for each quoted value."""
    found = {}
    for cell in cells:
        for value in cell["values"]:
            assert value["result"]["status"] == "ok", value
            text = value["result"]["data"]["text/plain"]
            found[value["expression"]] = re.sub(r"""^(["'])(.*)\1$""", r"\2", text)
    return found


def save(page, path: Path) -> None:
    """Save, as the menu does, and wait until the file has been written."""
    before = path.stat().st_mtime_ns
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    wait(lambda: path.stat().st_mtime_ns != before, 60)


def test_quoted_values_are_seen_as_on_the_page(browser, server):
    address, folder = server
    page, outside = open_chapter(browser, address, "demo.md")
    cells = run_all(page, 240)
    assert values(cells) == {"word": "six", "count": "6", "third": "0.333", "count + 1": "7"}
    first = next(cell["index"] for cell in cells if "There are {eval}" in cell["source"])
    page.evaluate(SHOW, first)
    page.get_by_text("There are six or 6 right answers").wait_for()
    save(page, folder / "chapters" / "demo.md")
    original = ROOT / "tests" / "book" / "data" / "demo.md"
    assert (folder / "chapters" / "demo.md").read_text("utf-8") == original.read_text("utf-8")
    assert outside == []
    page.context.close()


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.name)
def test_a_chapter_runs_and_its_widgets_hear_from_rlcore(browser, server, chapter, built_book):
    address, folder = server
    page, outside = open_chapter(browser, address, chapter.name)
    cells = run_all(page, 900)

    # the text says what it says on the built page
    notebook = pages.read_page(chapter.read_text("utf-8"))
    shown = values(cells)
    assert set(shown) == {expression for _, expression in pages.quoted(notebook)}
    html = (built_book / "chapters" / f"{chapter.stem}.html").read_text("utf-8")
    built = re.findall(r'<span class="quoted-value">([^<]*)</span>', html)
    # (how long the training took is the one thing that may differ)
    same = {text for name, text in shown.items() if not name.endswith("seconds")}
    assert len(same) > len(shown) / 2
    assert {text.replace("&", "&amp;") for text in same} <= set(built)

    # every widget draws, then gets rlcore's numbers
    seen = set()
    mounts = [c for c in cells if any("text/html" in o.get("data", {}) for o in c["outputs"])]
    for cell in mounts:
        names = re.findall(r'data-widget-mount=\\?"(\w+)', str(cell["outputs"]))
        if not names:
            continue
        page.evaluate(SHOW, cell["index"])
        for name in names:
            widget = page.locator(f'[data-widget="{name}"]').first
            widget.wait_for()
            widget.locator('[data-badge="rlcore"]').first.wait_for()
            seen.add(name)
    assert seen >= set(re.findall(r'data-widget-mount="(\w+)"', html))

    # and a setting changed in the browser is answered again
    if "GroupAdvantage" in seen:
        group = page.locator('[data-widget="GroupAdvantage"]').first
        index = next(c["index"] for c in mounts if "GroupAdvantage" in str(c["outputs"]))
        page.evaluate(SHOW, index)
        group.get_by_role("button", name="One of 8 correct").click()
        group.locator('[data-badge="rlcore"]').wait_for()
        top = float(group.locator('[data-readout="advantage-1"]').get_attribute("data-value"))
        assert top == pytest.approx(7**0.5, abs=1e-9)

    save(page, folder / "chapters" / chapter.name)
    saved = (folder / "chapters" / chapter.name).read_text("utf-8")
    assert saved == chapter.read_text("utf-8")
    assert outside == []
    page.context.close()
