"""AnswerBox: type the result of an exercise, get a word back, and a hint for a known wrong turn."""

import math
import re
from collections.abc import Mapping
from typing import Any

import traitlets

from widgets.base import LANGUAGES, TeachingWidget, check_number, module_text

MOST_CHARACTERS = 100
_SPACE = re.compile(r"[ \t\r\n\f\v\u00a0\u2009\u202f]+")
_MINUS = re.compile("[\u2212\u2013]")
_TIMES = re.compile("[×·]")
_OVER = re.compile("[÷\u2044\u2215]")
_TOKEN = re.compile(r"sqrt|[-+*/()√]|(?:[0-9][0-9,]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")

Text = str | Mapping[str, str]


class AnswerBox(TeachingWidget):
    """A question with a numeric answer: right within `tolerance` (absolute), else a hint if the
    answer lies that close to one of `wrong_turns` ({value: hint}).

    It reads numbers (84,000, -1.732, 1e-3), + - * /, brackets and sqrt(7) or √7, and never runs
    what was typed. A comma parts thousands; a decimal comma is refused with a message that says so.
    `question` and each hint may be a text or a dict by language ({"en": ..., "ko": ...}).
    """

    parameters = ("text", "answer", "tolerance", "wrong_turns")
    _esm = module_text("answer_box")

    question = traitlets.Any().tag(sync=True)
    text = traitlets.Any("").tag(sync=True)
    answer = traitlets.Any().tag(sync=True)
    tolerance = traitlets.Any().tag(sync=True)
    wrong_turns = traitlets.Any().tag(sync=True)

    def __init__(
        self,
        name: str,
        question: Text,
        answer: float,
        tolerance: float = 0.005,
        wrong_turns: Mapping[float, Text] | None = None,
        **traits: Any,
    ):
        check_text("question", question)
        if wrong_turns is not None and not isinstance(wrong_turns, Mapping):
            raise ValueError(f"wrong_turns must be a dict {{value: hint}}, found {wrong_turns!r}")
        check_settings(answer, tolerance, list((wrong_turns or {}).items()))
        super().__init__(
            name=name,
            question=as_data(question),
            answer=float(answer),
            tolerance=float(tolerance),
            wrong_turns=[
                [float(value), as_data(hint)] for value, hint in (wrong_turns or {}).items()
            ],
            **traits,
        )

    @staticmethod
    def compute(
        text: str, answer: float, tolerance: float, wrong_turns: Any = ()
    ) -> dict[str, Any]:
        """`status` ("right", "wrong-turn", "wrong", "empty", "unreadable", "decimal-comma"),
        `value` (the number read, or None) and `turn` (index of the wrong turn taken, or -1).
        `wrong_turns`: pairs (value, hint)."""
        check_settings(answer, tolerance, wrong_turns)
        if not isinstance(text, str):
            raise ValueError(f"text must be a text, found {text!r}")
        status, value = read_number(text)
        turn = -1
        if value is not None:
            distances = [abs(value - target) for target, _ in wrong_turns]
            if near(value, answer, tolerance):
                status = "right"
            elif distances and near(value, wrong_turns[closest(distances)][0], tolerance):
                status, turn = "wrong-turn", closest(distances)
            else:
                pointed = read_number(text.replace(",", "."))[1] if "," in text else None
                meant = pointed is not None and near(pointed, answer, tolerance)
                status = "decimal-comma" if meant else "wrong"
        return {"status": status, "value": value, "turn": turn}

    @traitlets.validate("text", "answer", "tolerance", "wrong_turns")
    def _check(self, proposal: Any) -> Any:
        self.compute(**{**self.settings(), proposal["trait"].name: proposal["value"]})
        return proposal["value"]

    def extra_state(self) -> dict[str, Any]:
        return {"question": self.question}

    def rows(self) -> list[tuple[str, str]]:
        question = self.question
        if isinstance(question, dict):
            question = question.get(self.language or "en", next(iter(question.values())))
        return [("Question", question), ("Your answer", "is checked where JavaScript runs")]


def read_number(text: str) -> tuple[str, float | None]:
    """("number", value), or ("empty" | "unreadable" | "decimal-comma", None). The grammar, which
    `answer_box.js` follows rule by rule:

        sum     = product (("+" | "-") product)*
        product = factor (("*" | "/" | nothing, before a bracket or a root) factor)*
        factor  = ("+" | "-") factor | number | "(" sum ")" | ("sqrt" | "√") factor
    """
    text = _SPACE.sub(" ", _OVER.sub("/", _TIMES.sub("*", _MINUS.sub("-", text)))).strip(" ")
    if not text:
        return "empty", None
    tokens: list[str] = []
    position = 0
    while position < len(text) and len(text) <= MOST_CHARACTERS:
        match = _TOKEN.match(text, position)
        if match:
            tokens.append(match.group())
        elif text[position] != " ":
            return "unreadable", None
        position = match.end() if match else position + 1
    if any("," in token and not _THOUSANDS.fullmatch(token) for token in tokens):
        return "decimal-comma", None
    try:
        value, rest = _sum([token.replace(",", "") for token in tokens])
    except (ValueError, ZeroDivisionError, OverflowError, IndexError):
        return "unreadable", None
    if rest or not math.isfinite(value):
        return "unreadable", None
    return "number", value


def _sum(tokens: list[str]) -> tuple[float, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens[0] == "+" else -1
        other, tokens = _product(tokens[1:])
        value += sign * other
    return value, tokens


def _product(tokens: list[str]) -> tuple[float, list[str]]:
    value, tokens = _factor(tokens)
    while tokens and tokens[0] in ("*", "/", "(", "sqrt", "√"):
        operator = tokens[0]
        other, tokens = _factor(tokens[1:] if operator in "*/" else tokens)
        value = value / other if operator == "/" else value * other
    return value, tokens


def _factor(tokens: list[str]) -> tuple[float, list[str]]:
    first, rest = tokens[0], tokens[1:]  # IndexError: a number was due, and the text ended
    if first in "+-":
        value, rest = _factor(rest)
        return (value if first == "+" else -value), rest
    if first == "(":
        value, rest = _sum(rest)
        if rest[0] != ")":
            raise ValueError("')' expected")
        return value, rest[1:]
    if first in ("sqrt", "√"):
        value, rest = _factor(rest)
        return math.sqrt(value), rest
    return float(first), rest  # ValueError: an operator where a number was due


def near(value: float, target: float, tolerance: float) -> bool:
    """Within the tolerance, which rounding in the last bits must not narrow."""
    return abs(value - target) <= tolerance + 1e-12 * max(1.0, abs(target))


def closest(distances: list[float]) -> int:
    return min(range(len(distances)), key=distances.__getitem__)


def check_settings(answer: object, tolerance: object, wrong_turns: Any) -> None:
    right = check_number("answer", answer)
    width = check_number("tolerance", tolerance)
    if width < 0:
        raise ValueError(f"tolerance must be 0 or more, found {tolerance!r}")
    for i, (value, hint) in enumerate(wrong_turns):
        wrong = check_number(f"wrong_turns key {i}", value)
        check_text(f"hint of wrong turn {value!r}", hint)
        if near(wrong, right, width):
            raise ValueError(
                f"wrong_turns key {value!r} must lie farther than tolerance {tolerance!r} from "
                f"answer {answer!r}: nobody would ever see its hint"
            )


def check_text(argument: str, text: object) -> None:
    texts = text.values() if isinstance(text, Mapping) else [text]
    if isinstance(text, Mapping) and not set(text) <= set(LANGUAGES):
        raise ValueError(f"{argument} must have languages {LANGUAGES} as keys, found {set(text)}")
    if not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ValueError(f"{argument} must be a text that is not empty, found {text!r}")


def as_data(text: Text) -> str | dict[str, str]:
    return text if isinstance(text, str) else dict(text)
