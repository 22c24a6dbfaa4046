"""A feedback page per student: one HTML file that asks for nothing outside itself.

nbgrader's generate_feedback writes each graded notebook (with the scores of the grade book) in our
template; here the notebooks of a student become a page with a table of results on top. Formulas
become MathML, which browsers show without a script.
"""

from __future__ import annotations

import base64
import html
import logging
import re
from pathlib import Path
from typing import Any

from docutils.utils.math.latex2mathml import tex2mathml
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbgrader.converters import GenerateFeedback
from nbgrader.preprocessors import GetGrades
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

from book.homework import course

TEMPLATES = Path(__file__).parent / "templates"


class _MathML(IPythonRenderer):
    """Markdown to HTML with formulas as MathML; what docutils cannot read stays TeX."""

    def inline_math(self, body: str) -> str:
        return _mathml(body, block=False)

    def block_math(self, body: str) -> str:
        return _mathml(body, block=True)

    def latex_environment(self, name: str, body: str) -> str:
        return _mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", block=True)


def _mathml(tex: str, block: bool) -> str:
    try:
        made = tex2mathml(tex.strip(), as_block=block)
    except Exception:  # docutils raises MathError and others for TeX that it does not know
        return f"<code>{html.escape(tex.strip())}</code>"
    return made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


def exercise_text(source: str) -> str:
    """The text of an exercise as HTML."""
    renderer = _MathML(escape=False, exclude_anchor_links=True)
    return str(MarkdownWithMath(renderer=renderer).render(source))


def _base64(text: Any) -> str:
    joined = "".join(text) if isinstance(text, list) else str(text)
    return base64.b64encode(joined.encode()).decode()


def write_fragment(root: Path, assignment: str, student: str) -> Path:
    """Run nbgrader's generate_feedback for one student; returns the fragment of HTML."""
    config = Config()
    config.HTMLExporter.template_name = "homework_feedback"
    config.HTMLExporter.extra_template_basedirs = [str(TEMPLATES)]
    config.HTMLExporter.filters = {"exercise_text": exercise_text, "text_base64": _base64}
    converter = GenerateFeedback(
        coursedir=course.course(root, assignment, student),
        config=config,
        exporter_class=HTMLExporter,
        preprocessors=[GetGrades],
        force=True,
    )
    converter.log = logging.getLogger("traitlets")
    converter.start()
    return root / "feedback" / student / assignment / f"{assignment}.html"


def page(student: str, results: list[tuple[dict[str, Any], str]]) -> str:
    """The page of one student: for each notebook its result (as in report.json) and fragment."""
    parts = []
    for result, fragment in results:
        rows = "\n".join(_row(name, one) for name, one in result["exercises"].items())
        remarks = "".join(f"<li>{html.escape(text)}</li>" for text in result["remarks"])
        total = f"{result['points']:g} of {result['max']:g} points"
        parts.append(
            f"<h2>{html.escape(result['title'])}</h2>\n"
            f'<p class="total">{total}</p>\n'
            + (f"<ul>{remarks}</ul>\n" if remarks else "")
            + "<table><thead><tr><th>exercise</th><th>points</th><th>what was found</th></tr>"
            f"</thead><tbody>\n{rows}\n</tbody></table>\n{fragment}"
        )
    name = html.escape(student)
    head = (TEMPLATES / "page_head.html").read_text("utf-8")
    head = head.replace("@title@", f"Feedback: {name}").replace("@code@", _code_style())
    return f"{head}<h1>{name}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"


def _row(name: str, one: dict[str, Any]) -> str:
    message = html.escape(one["message"].removeprefix(f"{name}: "))
    return (
        f'<tr><td><a href="#{name}">{name}</a></td>'
        f"<td>{one['points']:g} / {one['max']:g}</td><td>{message}</td></tr>"
    )


def _code_style() -> str:
    def rules(style: str) -> str:
        made = HtmlFormatter(style=style).get_style_defs(".highlight")
        kept = [line for line in made.splitlines() if line.startswith(".highlight .")]
        return "\n".join(re.sub(r"/\*.*?\*/", "", line) for line in kept)

    return f"{rules('default')}\n@media (prefers-color-scheme: dark) {{\n{rules('github-dark')}\n}}"
