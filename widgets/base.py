"""What every widget shares: the browser's settings in, rlcore's numbers out.

The browser owns the settings while a reader plays: it sets the traits in `parameters`, draws from
its own `compute`, and goes on. Python recomputes and sends `reply`, which carries the parameters
it answers, so that a late reply is told from a current one and never shown beside other settings.
"""

import html
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets

FOLDER = Path(__file__).parent
LANGUAGES = ("en", "ko")


def module_text(name: str) -> str:
    """The widget's ES module: `shared.js`, then `<name>.js`. anywidget loads a module as text, so
    relative imports fail and a module must hold all it needs; joining two texts is enough."""
    return "\n".join((FOLDER / f"{part}.js").read_text("utf-8") for part in ("shared", name))


class TeachingWidget(anywidget.AnyWidget):
    """Traits and displays common to the widgets. A subclass names its `parameters` (synchronised
    traits), gives a static `compute(**parameters) -> dict` that also refuses bad input with a
    `ValueError`, and `rows()`: what a page without JavaScript shows.

    `name` is the widget's key in the page's address (`#name.setting=value`); two widgets of one
    page should differ in it. `language` is "en", "ko" or "" (the page's own).
    """

    parameters: ClassVar[tuple[str, ...]]
    compute: ClassVar[Callable[..., dict[str, Any]]]
    _css = (FOLDER / "widgets.css").read_text("utf-8")

    name = traitlets.Unicode("").tag(sync=True)
    language = traitlets.Unicode("").tag(sync=True)
    reply = traitlets.Dict().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        traits.setdefault("name", re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower())
        check_name(traits["name"])
        check_choice("language", traits.get("language", ""), ("", *LANGUAGES))
        for argument in traits:
            if not self.has_trait(argument):
                raise TypeError(f"{type(self).__name__} has no argument {argument!r}")
        super().__init__(**traits)
        self._answer()
        self.observe(self._answer, names=list(self.parameters))

    def settings(self) -> dict[str, Any]:
        """The parameters as they stand: `compute(**settings())` gives the numbers on display."""
        return {key: getattr(self, key) for key in self.parameters}

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the plain table that stands in for the drawing."""
        raise NotImplementedError

    def _answer(self, change: object = None) -> None:
        settings = self.settings()
        self.reply = {"parameters": settings, "values": self.compute(**settings)}

    def static_html(self) -> str:
        """The built page's form: a mount point with the state, holding the plain table until the
        page's script draws the widget in its place (or for good, without JavaScript)."""
        state = {**self.settings(), **self.extra_state(), "name": self.name}
        if self.language:
            state["language"] = self.language
        data = html.escape(json.dumps(state, ensure_ascii=False, allow_nan=False), quote=True)
        cells = "".join(
            f"<tr><th scope='row'>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>"
            for label, value in self.rows()
        )
        return (
            f'<div data-widget-mount="{type(self).__name__}" data-state="{data}">'
            f"<table class='rw-fallback'>{cells}</table></div>"
        )

    def extra_state(self) -> dict[str, Any]:
        """State that the drawing needs and `compute` does not (texts, offers)."""
        return {}

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        plain = "\n".join(f"{label}: {value}" for label, value in self.rows())
        return {
            **data,
            "text/plain": f"{type(self).__name__}\n{plain}",
            "text/html": self.static_html(),
        }, metadata


def check_name(name: object) -> None:
    if not (isinstance(name, str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)):
        raise ValueError(f"name must be lower-case words joined by '-', found {name!r}")


def check_choice(argument: str, value: object, choices: Sequence[object]) -> None:
    if isinstance(value, bool) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{argument} must be one of {listed}, found {value!r}")


def check_numbers(argument: str, values: object, least: int, most: int) -> list[float]:
    """`values` as floats: a list of `least` to `most` finite numbers, or a `ValueError`."""
    if hasattr(values, "tolist"):  # numpy array, torch tensor
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{argument} must be a list of numbers, found {type(values).__name__}")
    if not least <= len(values) <= most:
        raise ValueError(f"{argument} must hold {least} to {most} numbers, found {len(values)}")
    return [check_number(f"{argument}[{i}]", value) for i, value in enumerate(values)]


def check_number(argument: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, (bool, int, float)) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{argument} must be a finite number, found {value!r}")
    return number


def check_integer(argument: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{argument} must be a whole number, {least} to {most}, found {value!r}")
    return value


def signed(value: float, digits: int = 3) -> str:
    """`+0.577`, `-1.732`, and `0.000` without a sign."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text
