"""Run a widget's JavaScript `compute` on many parameter sets, in Node or in a browser."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from widgets.base import module_text

ENGINES = ("node", "browser")

# Both run this on the module's exports; a refusal becomes {"error": its message}.
MAP = """(compute, cases) => cases.map((parameters) => {
  try { return { values: compute(parameters) }; }
  catch (error) { return { error: `${error.name}: ${error.message}` }; }
})"""


def run_compute(
    engine: str, name: str, cases: list[dict], browser: Browser, folder: Path
) -> list[dict[str, Any]]:
    """One {"values": ...} or {"error": ...} a case."""
    return run_export(engine, name, MAP, "compute", cases, browser, folder)


def run_export(
    engine: str, name: str, function: str, export: str, data: Any, browser: Browser, folder: Path
) -> Any:
    """`function` (JavaScript, of an export of the module and of `data`) of the module as anywidget
    loads it."""
    if engine == "browser":
        return run_in_browser(browser, name, f"({function})(module.{export}, data)", data)
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node on this machine: the browser runs the same module")
    module = folder / f"{name}.mjs"
    module.write_text(module_text(name), "utf-8")
    (folder / "data.json").write_text(json.dumps(data), "utf-8")
    script = folder / "run.mjs"
    script.write_text(
        'import { readFileSync } from "node:fs";\n'
        f'import * as module from "./{module.name}";\n'
        'const data = JSON.parse(readFileSync(new URL("./data.json", import.meta.url), "utf8"));\n'
        f"process.stdout.write(JSON.stringify(({function})(module.{export}, data)));\n",
        "utf-8",
    )
    run = subprocess.run([node, str(script)], capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def run_in_browser(browser: Browser, name: str, expression: str, data: Any) -> Any:
    """The value of a JavaScript expression in `module` and `data`, on an empty page."""
    page = browser.new_page()
    try:
        return page.evaluate(
            f"""async ({{ text, data }}) => {{
              const url = URL.createObjectURL(new Blob([text], {{ type: "text/javascript" }}));
              const module = await import(url);
              return await ({expression});
            }}""",
            {"text": module_text(name), "data": data},
        )
    finally:
        page.close()
