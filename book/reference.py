r"""The pages made from docstrings: their mathematics, their paragraphs, and links to the source.

A docstring of this project is reStructuredText with the mathematics of the chapters: `$...$` in a
line, `$$` on lines of its own around a displayed formula.  What Sphinx needs beyond that is done
here, so that a docstring reads well in an editor too.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.autodoc import DataDocumenter, ModuleDocumenter
from sphinx.util import logging

from book.bootstrap import ROOT

logger = logging.getLogger(__name__)
LITERAL_OR_MATH = re.compile(r"(``.+?``)|\$(?=[^\s$])((?:[^$\\]|\\.)*?(?<!\s))\$", re.DOTALL)
OPENING = "'\"([{<-/:\n\t \u2014\u2013"  # what reStructuredText allows before a role
CLOSING = "'\")]}>-/:.,;!?\n\t \u2014\u2013"  # and after it
ENTRY = re.compile(r"(\w+(?:, \w+)*(?: and \w+)?)(?: (\([^:>]*?\)))?(: | -> )")
HEADS = (
    "Raises ",
    "Returns ",
    "Source: ",
    "Sources: ",
    "ValueError",
    "Metrics per step: ",
)


class UnevenMath(ValueError):
    """A $ without its partner."""


def prepare(text: str, parameters: tuple[str, ...] = ()) -> str:
    """A docstring as reStructuredText that Sphinx reads.

    - `$...$` becomes a math role, a block between lines of `$$` a math directive; what stands in
      double backticks or in a literal block stays as it is;
    - a line that tells what one of the `parameters` is, or what is raised, starts a paragraph.

    UnevenMath: a $ is left over.
    """
    blocks = []
    for literal, lines in _by_literal_blocks(text.split("\n")):
        if not literal:
            lines = _displays(_paragraphs(lines, parameters))
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _by_literal_blocks(lines: list[str]) -> list[tuple[bool, list[str]]]:
    """The lines in runs: text, and what is indented below a paragraph that ends in `::`."""
    runs: list[tuple[bool, list[str]]] = [(False, [])]
    edge: int | None = None  # indentation of the paragraph above an open literal block
    for line in lines:
        if edge is not None and line.strip() and _indent(line) <= edge:
            edge = None
        if runs[-1][0] != (edge is not None):
            runs.append((edge is not None, []))
        runs[-1][1].append(line)
        if edge is None and line.rstrip().endswith("::"):
            edge = _indent(line.replace("- ", "  ", 1) if line.lstrip().startswith("- ") else line)
    return runs


def _paragraphs(lines: list[str], parameters: tuple[str, ...]) -> list[str]:
    """A blank line before each line that begins a new matter; parameters set as code."""
    result: list[str] = []
    display = False
    for line in lines:
        display ^= line.strip() == "$$"
        entry = ENTRY.match(line)
        named = re.split(r", | and ", entry[1]) if entry and not display else []
        if named and set(named) <= set(parameters):
            assert entry is not None
            names = ", ".join(f"``{name}``" for name in named)
            shape = f" {entry[2]}" if entry[2] else ""
            result += ["", f"{names}{shape}{entry[3]}{line[entry.end() :]}"]
        elif not display and line.startswith(HEADS):
            result += ["", line]
        else:
            result.append(line)
    return result


def _displays(lines: list[str]) -> list[str]:
    """Blocks between `$$` lines as directives, and the text between them with its roles."""
    result: list[str] = []
    text: list[str] = []
    formula: list[str] | None = None
    for line in lines:
        if line.strip() != "$$":
            (text if formula is None else formula).append(line)
        elif formula is None:
            formula = []
            result.append(_roles("\n".join(text)))
            text = []
        else:
            margin = " " * _indent(line)
            body = [f"{margin}   {part.strip()}" for part in formula if part.strip()]
            result += ["", f"{margin}.. math::", "", *body, ""]
            formula = None
    if formula is not None:
        raise UnevenMath("a line of $$ that nothing closes")
    return [*result, _roles("\n".join(text))]


def _roles(text: str) -> str:
    done, end = "", 0
    for match in LITERAL_OR_MATH.finditer(text):
        done += _no_dollar(text[end : match.start()])
        end = match.end()
        if match[1]:
            done += match[1]
            continue
        before = "" if not done or done[-1] in OPENING else "\\ "
        after = "" if end == len(text) or text[end] in CLOSING else "\\ "
        done += f"{before}:math:`{' '.join(match[2].split())}`{after}"
    return done + _no_dollar(text[end:])


def _no_dollar(text: str) -> str:
    if "$" in text:
        around = text.split("$")
        raise UnevenMath(f"a $ without its partner: {around[0][-30:]}${around[1][:30]}")
    return text


def process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Autodoc's docstrings, through `prepare`."""
    parameters: tuple[str, ...] = ()
    if callable(obj):
        with contextlib.suppress(TypeError, ValueError):  # a class of C has no signature
            parameters = tuple(inspect.signature(obj).parameters)
    try:
        lines[:] = prepare("\n".join(lines), parameters).split("\n")
    except UnevenMath as error:
        logger.warning(f"docstring of {name}: {error}")


def process_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """A default that a factory makes is written `<factory>`, which is no Python: show `...`."""
    if signature is None or "<factory>" not in signature:
        return None
    return signature.replace("<factory>", "..."), returns


def skip_member(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Whether autodoc leaves a member out; None: it decides itself.

    Of a module it shows what that offers (`exported`), of a class the methods with a docstring of
    their own: fields are explained in the docstring of the class.
    """
    if what == "module":
        module = importlib.import_module(app.env.temp_data["autodoc:module"])
        app.env.note_dependency(str(_package(module).__file__))  # its __all__
        return None if name in exported(module) else True
    text = str(getattr(obj, "__doc__", None) or "")
    routine = inspect.isroutine(obj) or isinstance(obj, property)
    if not routine or not text or text.startswith("Alias for field number"):
        return True
    return None


class ConstantDocumenter(DataDocumenter):
    """Shows the constants of a module with their values; autodoc passes those without a text by."""

    objtype = "constant"
    directivetype = "data"
    priority = DataDocumenter.priority + 1

    @classmethod
    def can_document_member(cls, member: Any, membername: str, isattr: bool, parent: Any) -> bool:
        return isinstance(parent, ModuleDocumenter) and membername.isupper()

    def get_doc(self) -> list[list[str]] | None:
        """Its own comment, if any; what Python says of its type is no description of it."""
        comment = self.get_module_comment(self.objpath[-1])
        return [comment] if comment else []


@cache
def exported(module: Any) -> set[str]:
    """The names that a module offers: those of its `__all__`; else those that it defines itself
    and that its package exports; else, if there are none, all that it defines and documents.
    """
    if hasattr(module, "__all__"):
        return set(module.__all__)
    defined = _assigned(module) & vars(module).keys()
    documented = {
        name
        for name in defined
        if not name.startswith("_")
        and (inspect.isroutine(vars(module)[name]) or inspect.isclass(vars(module)[name]))
        and vars(module)[name].__doc__
    }
    return defined & set(getattr(_package(module), "__all__", ())) or documented


def _package(module: Any) -> Any:
    return importlib.import_module(module.__name__.rpartition(".")[0] or module.__name__)


def _assigned(module: Any) -> set[str]:
    """The names that the source of a module binds at its top level, imports left out."""
    names: set[str] = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                part.id for t in targets for part in ast.walk(t) if isinstance(part, ast.Name)
            }
    return names


def source_address(domain: str, info: dict[str, str], url: str, branch: str) -> str | None:
    """Where the repository shows the lines of an object; None for what has no lines (a constant).

    info: the module and the full name, as sphinx.ext.linkcode gives them.
    """
    if domain != "py" or not info.get("module"):
        return None
    target: Any = importlib.import_module(info["module"])
    for part in info["fullname"].split("."):
        target = getattr(target, part, None)
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(target)) or "").resolve()
        lines, first = inspect.getsourcelines(inspect.unwrap(target))
    except TypeError:
        return None
    if ROOT not in file.parents:
        return None
    path = file.relative_to(ROOT).as_posix()
    return f"{url}/blob/{branch}/{path}#L{first}-L{first + len(lines) - 1}"


def offer_sources(app: Sphinx, config: Any) -> None:
    options = config.html_theme_options
    url, branch = options["repository_url"], options["repository_branch"]
    config.linkcode_resolve = lambda domain, info: source_address(domain, info, url, branch)


def setup(app: Sphinx) -> dict[str, Any]:
    app.setup_extension("sphinx.ext.autodoc")
    app.setup_extension("sphinx.ext.linkcode")
    app.add_autodocumenter(ConstantDocumenter)
    app.connect("config-inited", offer_sources)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-skip-member", skip_member)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
