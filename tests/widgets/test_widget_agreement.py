"""Each module's JavaScript against the class's Python, on >= 1,000 settings, to 1e-9."""

import math
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from widget_engines import ENGINES, run_compute, run_export

from widgets import SUM_TO_100, AnswerBox, CreditShare, GroupAdvantage, RareSuccess
from widgets.base import TeachingWidget

COUNT = 1_000


def group_cases(rng: random.Random) -> list[dict]:
    kinds: list[Callable[[], float]] = [
        lambda: rng.randint(0, 1),
        lambda: int(rng.random() < 0.05),
        lambda: rng.randint(-1, 3) / 2,
        lambda: rng.gauss(0, 1),
        lambda: rng.uniform(-1e4, 1e4),
        lambda: rng.gauss(0, 1e-6),
    ]
    cases = []
    for i in range(COUNT):
        draw = kinds[i % len(kinds)]
        rewards = [draw() for _ in range(rng.randint(2, 64))]
        cases.append({"rewards": rewards, "ddof": rng.randint(0, 1)})
    for value in (0, 1, 0.1, -0.3, 1e-300, 1e300):  # equal: exactly 0, whatever the rounding
        for size in (2, 3, 7, 64):
            cases.append({"rewards": [value] * size, "ddof": size % 2})
    most = sys.float_info.max / 8  # the largest that a group of two may hold
    for rewards in (
        [most, -most],
        [1e300, 0, 0],
        [1e-300, 0],
        [-1e150, 1e150, 0],
        [0.1 + 0.2, 0.3],  # equal up to the rounding of a sum
        [0.1 + 0.2, 0.3, 0.3 + 1e-12],
        [-0.7, -0.1 * 7, -0.7],
        [1.0, 1 + 2**-48],
        [1] + [0] * 63,
        [0] * 63 + [1],
    ):
        cases += [{"rewards": rewards, "ddof": ddof} for ddof in (0, 1)]
    return cases


def rare_cases(rng: random.Random) -> list[dict]:
    cases = []
    for i in range(COUNT):
        size = rng.randint(2, 256) if i % 4 else rng.randint(2, 9)
        cases.append(
            {
                "group_size": size,
                "successes": rng.randint(1, size - 1),
                "ddof": rng.randint(0, 1),
                "over": rng.choice(["group_size", "successes"]),
            }
        )
    for size, successes in ((2, 1), (3, 1), (3, 2), (256, 1), (256, 128), (256, 255)):
        for over in ("group_size", "successes"):
            for ddof in (0, 1):
                cases.append(
                    {"group_size": size, "successes": successes, "ddof": ddof, "over": over}
                )
    return cases


def credit_cases(rng: random.Random) -> list[dict]:
    words = [
        "a",
        "A",
        "a,",
        "(a)",
        "b",
        "b.",
        '"B"',
        "×",
        "5050.",
        "...",
        "합은",
        "합은.",
        "É",
        "x",
    ]
    spaces = [" ", "  ", "\n", "\t", " \r\n"]

    def text(most: int) -> str:
        return "".join(rng.choice(words) + rng.choice(spaces) for _ in range(rng.randint(1, most)))

    cases = []
    for i in range(COUNT):
        size = rng.randint(2, 64 if i % 10 == 0 else 9)
        answers = [text(20) for _ in range(size)]
        phrase = text(3) if i % 3 else rng.choice(answers)
        rewards = [rng.randint(0, 1) for _ in range(size)]
        cases.append(
            {"answers": answers, "rewards": rewards, "phrase": phrase, "ddof": rng.randint(0, 1)}
        )
    ours = {"answers": list(SUM_TO_100.answers), "rewards": list(SUM_TO_100.rewards)}
    for phrase in (*SUM_TO_100.phrases, "the sum", "SO", "nowhere at all", "a"):
        cases += [{**ours, "phrase": phrase, "ddof": ddof} for ddof in (0, 1)]
    for answers in (["a a a a a", "b"], ["aa", "A A"]):  # occurrences that would overlap
        cases.append({"answers": answers, "rewards": [1, 0], "phrase": "a a", "ddof": 0})
    return cases


def parts(text: str) -> list[str]:
    return text.split(" ")


WELL_FORMED = parts(
    "84,000 84000 84000.4 1.5 -1.732 −1.732 3/4 -1/sqrt(7) √7 7/√8 2√3 2sqrt(3) "
    "1/sqrt(3)-2*sqrt(3) (1+2)/4 --1 +-2 1e3 1E-3 .5 5. 12,345,678.25 1÷4 3×4 3·4 1⁄2 0 -0 0/5 4(2)"
)
ILL_FORMED = parts(
    "0,577 1,5 1,00 12,34 1,2345 01,000 2,646 1/0 1/(1/0) sqrt(-1) √-4 sqrt() () ( ) 1+ *2 1//2 "
    "abc 1a 84000won $5 NaN Infinity 1e400 1e400-1e400 1/1e400 0x10 1_000 2e e5 .. . , 1.2.3 "
    "__import__('os') alert(1) ٣ ３ 1;2 7² ½ sqrt sqrtsqrt4 1,000e3 1e5,000"
)


def answer_cases(rng: random.Random) -> list[dict]:
    pieces = [*"0123456789.,+-*/()√ ", "sqrt(", "1,000", "0.5", "−", "×", " ", "e", "x", "\u00a0"]
    texts = [*WELL_FORMED, *ILL_FORMED, "", "  ", "\t", " 1 / 2 ", "1 2", "9" * 100, "9" * 101]
    texts += ["(" * 50 + "1" + ")" * 50, "-" * 99 + "1", "(" * 100]
    while len(texts) < COUNT:
        texts.append("".join(rng.choice(pieces) for _ in range(rng.randint(1, 12))))
    targets = [84000, 0.75, -1.732, 2.646, 0, 1, 7, 0.577, 0.5]
    cases = []
    for text in texts:
        answer = rng.choice(targets)
        turns = [[value, "hint"] for value in rng.sample([2.0, -1.0, 12000.0, 0.7, 1e3, 5.0], 3)]
        if all(abs(value - answer) > 0.05 for value, _ in turns):
            settings = {"answer": answer, "tolerance": rng.choice([0, 0.001, 0.04])}
            cases.append({"text": text, **settings, "wrong_turns": turns})
        cases.append({"text": text, "answer": 84000, "tolerance": 0.5, "wrong_turns": []})
    return cases


WIDGETS: dict[str, tuple[type[TeachingWidget], Callable[[random.Random], list[dict]]]] = {
    "group_advantage": (GroupAdvantage, group_cases),
    "rare_success": (RareSuccess, rare_cases),
    "credit_share": (CreditShare, credit_cases),
    "answer_box": (AnswerBox, answer_cases),
}


@cache
def cases_with_values(name: str) -> tuple[list[dict], list[dict]]:
    cls, make_cases = WIDGETS[name]
    cases = make_cases(random.Random(11))
    return cases, [cls.compute(**case) for case in cases]


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float) and not isinstance(found, bool):
        if found is None or not math.isfinite(found) or not math.isfinite(wanted):
            return False
        return abs(found - wanted) <= 1e-9 * max(1.0, abs(wanted))
    return type(found) is type(wanted) and found == wanted


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", WIDGETS)
def test_javascript_agrees_with_python(
    name: str, engine: str, browser: Browser, tmp_path: Path
) -> None:
    cases, values = cases_with_values(name)
    assert len(cases) >= 1_000
    results = run_compute(engine, name, cases, browser, tmp_path)
    for case, result, wanted in zip(cases, results, values, strict=True):
        assert "error" not in result, (case, result)
        assert same(result["values"], wanted), (case, result["values"], wanted)


def test_comparison_sees_a_difference() -> None:
    assert not same({"a": [1.0]}, {"a": [1.0 + 1e-8]})
    assert not same({"a": None}, {"a": 1.0})
    assert not same(1.0, math.inf)
    assert not same(math.inf, math.inf)
    assert not same(1.0, True)
    assert not same([1.0], [1.0, 2.0])


REFUSED: dict[str, list[dict]] = {
    "group_advantage": [
        {"rewards": [1]},
        {"rewards": [0] * 65},
        {"rewards": [1, None]},
        {"rewards": [1, "1"]},
        {"rewards": "10"},
        {"rewards": [1, 0], "ddof": 2},
        {"rewards": [1.7e308, 1.7e308, 0]},
        {"rewards": [math.nextafter(sys.float_info.max / 8, math.inf), 0]},
        {"rewards": [1.7e308, -1.7e308], "ddof": 1},
        {"rewards": [1e308, -1e308, 1e308]},
        {"rewards": [1.7e308, 1.7e308]},
    ],
    "rare_success": [
        {"group_size": 1, "successes": 1},
        {"group_size": 257, "successes": 1},
        {"group_size": 8, "successes": 0},
        {"group_size": 8, "successes": 8},
        {"group_size": 8.5, "successes": 1},
        {"group_size": 8, "successes": 1, "ddof": 3},
        {"group_size": 8, "successes": 1, "over": "G"},
    ],
    "credit_share": [
        {"answers": ["a"], "rewards": [1], "phrase": "a"},
        {"answers": ["a", " "], "rewards": [1, 0], "phrase": "a"},
        {"answers": ["a", "b"], "rewards": [1], "phrase": "a"},
        {"answers": ["a", "b"], "rewards": [1, 0.5], "phrase": "a"},
        {"answers": ["a", "b"], "rewards": [1, 0], "phrase": " \n"},
        {"answers": ["a", "b"], "rewards": [1, 0], "phrase": "a", "ddof": -1},
        {"answers": ["a", "b"], "rewards": [1, 0], "phrase": "a" * 201},
    ],
    "answer_box": [
        {"text": "1", "answer": None, "tolerance": 0},
        {"text": "1", "answer": 1, "tolerance": -0.1},
        {"text": 1, "answer": 1, "tolerance": 0},
        {"text": "1", "answer": 1, "tolerance": 0.1, "wrong_turns": [[1.05, "hint"]]},
    ],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", WIDGETS)
def test_both_refuse_the_same_parameters(
    name: str, engine: str, browser: Browser, tmp_path: Path
) -> None:
    cases = REFUSED[name]
    for case, result in zip(
        cases, run_compute(engine, name, cases, browser, tmp_path), strict=True
    ):
        assert result.get("error", "").startswith("RangeError: "), (case, result)
        with pytest.raises(ValueError, match="must"):
            WIDGETS[name][0].compute(**case)


@pytest.mark.parametrize("name", WIDGETS)
def test_labels_are_complete_in_both_languages(name: str, browser: Browser, tmp_path: Path) -> None:
    """The same keys, of the same kind, as many arguments and list items; Korean that has Hangul."""
    shape = """(labels) => {
      const look = (value) => {
        if (typeof value === "function") return `function of ${value.length}`;
        if (typeof value !== "object") return typeof value;
        if (Array.isArray(value)) return value.map(look);
        return Object.fromEntries(Object.keys(value).sort().map((key) => [key, look(value[key])]));
      };
      return [Object.keys(labels).sort(), look(labels.en), look(labels.ko),
        /[가-힣]/.test(labels.ko.title)];
    }"""
    languages, english, korean, hangul = run_export(
        "browser", name, shape, "labels", None, browser, tmp_path
    )
    assert languages == ["en", "ko"]
    assert english == korean
    assert hangul
