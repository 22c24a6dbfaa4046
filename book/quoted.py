"""Run inside a chapter's kernel: store the values that its prose quotes with {eval}`name`."""

from __future__ import annotations

from typing import Any

from IPython.display import display

KEY = "quoted values"  # one output of myst-nb's glue holds them all
MIME = "application/vnd.quoted-values+json"


def as_text(expression: str, value: Any) -> str:
    """What the page shows for a value; JupyterLab shows the same."""
    if isinstance(value, str):
        return value
    if type(value) in (int, float):
        return str(value)
    raise TypeError(
        f"{{eval}}`{expression}` is a {type(value).__name__}; bind a str (formatted as it should "
        "read), an int or a float"
    )


def quote(expressions: list[str], namespace: dict[str, Any]) -> None:
    """Evaluate each expression and put the texts into an output that the page's roles read."""
    values = {name: as_text(name, eval(name, namespace)) for name in expressions}
    metadata = {"scrapbook": {"name": KEY, "mime_prefix": "application/glue+"}}
    display({"application/glue+" + MIME: values}, raw=True, metadata=metadata)
