"""Make the files with which a built page runs the widgets: no kernel, no network, `file://` too.

For the book's build:

    from book.widget_bundle import bundle
    bundle(Path("widgets"), Path("<static folder>/widgets-bundle.js"))

writes `widgets-bundle.js` and, beside it, `widgets.css`. A page loads, in this order,

    html_css_files = ["widgets.css"]
    html_js_files = ["widgets-bundle.js", "widget-host.js"]      # widget-host.js: book/static

and the host draws every `<div data-widget-mount="ClassName" data-state="...">` once the page is
parsed. myst-nb must take a widget's `text/html`, not its view (`nb_mime_priority_overrides`).

Browsers refuse `import` of a file beside the page under `file://`, and not all of them import a
blob there. So each module is wrapped in a function instead: a module ends with the two lines of
`EXPORTS`, which alone differ between the wrapped and the imported form.
"""

import shutil
from pathlib import Path

EXPORTS = "export { compute, labels };\nexport default { render };"


def class_name(stem: str) -> str:
    """`group_advantage` -> `GroupAdvantage`."""
    return "".join(word.capitalize() for word in stem.split("_"))


def bundle(widgets_dir: Path, out: Path) -> Path:
    """Write the bundle of all `widgets_dir/*.js` to `out` and the style sheet beside it; return
    `out`. Raises `ValueError` for a module that does not end with the lines of `EXPORTS`."""
    shared = (widgets_dir / "shared.js").read_text("utf-8")
    parts = []
    for path in sorted(widgets_dir.glob("*.js")):
        if path.name == "shared.js":
            continue
        text = path.read_text("utf-8").rstrip()
        body = text.removesuffix(EXPORTS)
        if body == text:
            raise ValueError(f"{path.name} must end with {EXPORTS!r}, found {text[-60:]!r}")
        parts.append(
            f"bookWidgets.{class_name(path.stem)} = (function () {{\n"
            f"{body}\nreturn {{ compute, labels, render }};\n}})();\n"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        '(function () {\n"use strict";\nconst bookWidgets = (window.bookWidgets = {});\n'
        f"{shared}\n{''.join(parts)}}})();\n",
        "utf-8",
    )
    shutil.copyfile(widgets_dir / "widgets.css", out.with_name("widgets.css"))
    return out
