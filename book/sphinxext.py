"""The book's Sphinx extension: quoted values, exercise cells, printed sources, widgets, notebooks.

Each part is a few lines; a page is read in pages.py and run in execute.py.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from book import notebooks, pages
from book.bootstrap import ROOT
from book.quoted import KEY, MIME
from book.widget_bundle import bundle

logger = logging.getLogger(__name__)
EXERCISE_TAGS = ("exercise", "solution", "test", "hidden-test")


class QuotedValue(SphinxRole):
    """{eval}`name`: the text of a value that a cell of this page computed (stored by quoted.py).

    Works on cached outputs, and in a translation of the page, which has no outputs of its own.
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        store: dict[str, dict[str, str]] = self.env.__dict__.setdefault("quoted_values", {})
        renderer = self.inliner.document.attributes.get("nb_renderer")
        if renderer is not None:
            output = renderer.renderer.nb_client.glue_data.get(KEY, {"data": {}})
            store[self.env.docname] = dict(output["data"].get(MIME, {}))
        values = store.get(self.env.docname, {})
        if self.text not in values:
            message = f"{{eval}}`{self.text}`: the page computes no value of this name"
            logger.error(message, location=self.get_location())
            return [], []
        return [nodes.inline(self.rawtext, values[self.text], classes=["quoted-value"])], []


def name_exercise_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Give the stub of an exercise the anchor `exercise-<id>`, so that text can link to it."""
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") != "cell_code":
            continue
        metadata = cell.get("cell_metadata", {})
        name = metadata.get("exercise", {}).get("id")
        if name and "exercise" in metadata.get("tags", []):
            cell["ids"].append(f"exercise-{name}")


class PrintedSource(SphinxPostTransform):
    """Show `IPython.display.Code` as the page's other code: its own HTML carries fixed colours."""

    default_priority = 3  # before myst-nb selects one form of each output

    def run(self, **_: Any) -> None:
        for outputs in list(self.document.findall(nodes.container)):
            if outputs.get("nb_element") != "mime_bundle":
                continue
            forms = {form["mime_type"]: form for form in outputs.children}
            html = forms.get("text/html")
            if html is None or "text/plain" not in forms:
                continue
            if not re.match(r"<style>pre \{ line-height.*class=\"highlight\"", html.astext(), re.S):
                continue
            plain = forms["text/plain"]
            for block in plain.findall(nodes.literal_block):
                block["language"] = "python"
                block["classes"] = ["printed-source"]
            for form in forms.values():
                if form is not plain:
                    outputs.remove(form)


def open_fold(self: Any, node: nodes.Element) -> None:
    """A fold that is called what it says; myst-nb's own calls every one "Toggle hidden content"."""
    self.body.append(f'<details class="admonition hide {" ".join(node["classes"])}">\n<summary>\n')
    for state in ("show", "hide"):
        kind = "collapsed" if state == "show" else "expanded"
        text = escape(node[f"prompt_{state}"])
        self.body.append(f'<p class="{kind} admonition-title">{text}</p>\n')
    self.body.append("</summary>\n")


def close_fold(self: Any, node: nodes.Element) -> None:
    self.body.append("</details>\n")


def pages_with_new_outputs(app: Sphinx, env: Any, *_: Any) -> list[str]:
    """The pages that Sphinx must read again although their text is as it was: other code or data
    was run, and the execution cache holds new outputs."""
    known: dict[str, str] = env.__dict__.setdefault("used_on_pages", {})
    stale = []
    for page in sorted(env.found_docs):
        path = Path(env.doc2path(page))
        used = pages.used(path.read_text(encoding="utf-8")) if path.suffix == ".md" else ""
        if known.get(page, used) != used:
            stale.append(page)
        known[page] = used
    return stale


def write_widgets(app: Sphinx, _config: Any) -> None:
    """Put the widgets' modules, joined in one classic script, among the page's static files."""
    folder = Path(app.doctreedir).parent / "widget-static"
    bundle(ROOT / "widgets", folder / "widgets-bundle.js")
    app.config.html_static_path.append(str(folder))
    app.add_css_file("widgets.css")
    for name in ("widgets-bundle.js", "widget-host.js"):
        app.add_js_file(name, loading_method="defer")


def offer_notebook(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Write the page's .ipynb beside its source and let the theme's download menu list it."""
    if doctree is None or "kernelspec" not in app.env.metadata.get(page, {}):
        return
    source = Path(app.env.doc2path(page))
    values = app.env.__dict__.get("quoted_values", {}).get(page, {})
    out = Path(app.outdir, "_sources", page).with_suffix(".ipynb")
    out.parent.mkdir(parents=True, exist_ok=True)
    options = app.config.html_theme_options
    text = notebooks.convert(
        source.read_text(encoding="utf-8"),
        values,
        options["repository_url"],
        options["repository_branch"],
    )
    out.write_text(text, encoding="utf-8")
    context["ipynb_source"] = page + ".ipynb"


def add_colab_button(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """A button that opens the published .ipynb of the page in Colab."""
    if "ipynb_source" not in context or not app.config.colab_url:
        return
    repository = urlsplit(app.config.html_theme_options["repository_url"]).path
    context["header_buttons"].insert(
        0,
        {
            "type": "link",
            "text": "Colab",
            "tooltip": "Run this chapter in Google Colab",
            "icon": "fas fa-rocket",
            "url": f"{app.config.colab_url}/github{repository}/blob/{app.config.colab_branch}"
            f"/{page}.ipynb",
            "label": "colab-button",
        },
    )


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("colab_url", "", "html", str)
    app.add_config_value("colab_branch", "notebooks", "html", str)
    app.setup_extension("myst_nb")
    app.add_role("eval", QuotedValue(), override=True)
    app.connect("env-get-outdated", pages_with_new_outputs)
    app.connect("doctree-read", name_exercise_cells)
    app.add_post_transform(PrintedSource)
    app.add_node(HideCodeCellNode, override=True, html=(open_fold, close_fold))
    app.connect("config-inited", write_widgets)
    app.connect("html-page-context", offer_notebook, priority=100)
    app.connect("html-page-context", add_colab_button, priority=900)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
