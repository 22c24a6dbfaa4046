"""The Python side: what a notebook shows, the replies to the browser, and bad input."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser
from widget_engines import run_in_browser

from book.widget_bundle import bundle, class_name
from widgets import SUM_TO_100, AnswerBox, CreditShare, GroupAdvantage, RareSuccess
from widgets.answer_box import read_number

BOX: dict[str, Any] = {"name": "a-box", "question": "How much?", "answer": 7}
WIDGETS = [GroupAdvantage, RareSuccess, CreditShare, lambda: AnswerBox(**BOX)]


# Numbers of the chapter


def test_eight_answers_by_hand() -> None:
    values = GroupAdvantage.compute(rewards=[1, 1, 1, 1, 1, 1, 0, 0])
    assert (values["mean"], values["std"]) == (0.75, pytest.approx(math.sqrt(3) / 4))
    assert values["advantages"] == pytest.approx([3**-0.5] * 6 + [-(3**0.5)] * 2)
    assert values["sum_positive"] == pytest.approx(6 / math.sqrt(3))
    assert values["sum_negative"] == pytest.approx(-6 / math.sqrt(3))
    sample = GroupAdvantage.compute(rewards=[1, 1, 1, 1, 1, 1, 0, 0], ddof=1)
    assert round(sample["std"], 3) == 0.463


def test_one_success_stands_out_by_the_root_of_g_minus_1() -> None:
    for size in (2, 8, 64, 256):
        values = RareSuccess.compute(size, 1)
        assert values["advantage_success"] == pytest.approx(math.sqrt(size - 1))
        assert values["advantage_failure"] == pytest.approx(-1 / math.sqrt(size - 1))
        assert values["bound"] == pytest.approx(math.sqrt(size - 1))
        assert values["cantelli"] == pytest.approx(values["share"])
        sample = RareSuccess.compute(size, 1, ddof=1)
        assert sample["advantage_success"] == pytest.approx((size - 1) / math.sqrt(size))


def test_the_eight_answers_are_what_the_chapter_says() -> None:
    answers, rewards = SUM_TO_100.answers, SUM_TO_100.rewards
    assert len(answers) == len(rewards) == 8
    assert sum(rewards) == 6
    for answer, reward in zip(answers, rewards, strict=True):
        assert ("5050" in answer) == bool(reward)
    assert sum("4950" in answer for answer in answers) == 1

    def credit(phrase: str) -> tuple[float, int, int]:
        values = CreditShare.compute(answers, rewards, phrase)
        return values["credit"], values["count_right"], values["count_wrong"]

    assert credit("So that is the sum.") == (pytest.approx(1 / 3**0.5 - 2 * 3**0.5), 1, 2)
    assert credit("100 × 101 / 2") == (pytest.approx(3**0.5), 3, 0)
    for phrase in SUM_TO_100.phrases:
        assert sum(credit(phrase)[1:]) >= 2


# What a notebook holds


class Mount(HTMLParser):
    """The attributes of the mount point, and the text inside it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: dict[str, str | None] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div":
            self.attributes = dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.mark.parametrize("make", WIDGETS)
def test_output_serves_jupyter_pages_and_terminals(make: Any) -> None:
    widget = make()
    data, _ = widget._repr_mimebundle_()
    view = "application/vnd.jupyter.widget-view+json"
    assert set(data) == {"text/plain", "text/html", view}
    mount = Mount(data["text/html"])
    assert mount.attributes["data-widget-mount"] == type(widget).__name__
    state = json.loads(mount.attributes["data-state"] or "")
    for key, value in widget.settings().items():
        assert state[key] == value
    assert state["name"] == widget.name
    for label, value in widget.rows():
        assert label in data["text/plain"]
        assert value in data["text/plain"]
        assert label in mount.text
    assert data["text/html"] == make()._repr_mimebundle_()[0]["text/html"]  # the same each build


def test_html_of_the_state_is_escaped() -> None:
    question = "Is \"2\" < '3' & </div><script>?"
    box = AnswerBox(**{**BOX, "question": question})
    html = box.static_html()
    assert "<script>" not in html
    assert json.loads(Mount(html).attributes["data-state"] or "")["question"] == question


def test_reply_follows_the_settings() -> None:
    group = GroupAdvantage()
    group.rewards = np.array([1, 0])
    assert group.rewards == [1.0, 0.0]
    group.ddof = 1
    settings = {"rewards": [1.0, 0.0], "ddof": 1}
    assert group.settings() == settings
    assert group.reply == {"parameters": settings, "values": GroupAdvantage.compute(**settings)}
    # several settings at once, as the browser sends them
    rare = RareSuccess(64, 40)
    rare.set_state({"group_size": 8, "successes": 7, "over": "successes"})
    assert rare.reply["values"] == RareSuccess.compute(8, 7, 0, "successes")
    assert rare.reply["parameters"] == rare.settings()
    json.dumps(rare.reply, allow_nan=False)


def test_rewards_may_come_as_tensors() -> None:
    assert GroupAdvantage(torch.tensor([1, 0, 0])).rewards == [1, 0, 0]
    assert GroupAdvantage([True, False]).rewards == [1, 0]


LATE_REPLY = """(async () => {
  const listeners = {};
  const state = { ...data, saved: 0 };
  const model = {
    get: (key) => state[key],
    set(key, value) { state[key] = value; (listeners[`change:${key}`] ?? []).forEach((f) => f()); },
    on: (event, f) => (listeners[event] ??= []).push(f),
    off: (event, f) => { listeners[event] = listeners[event].filter((g) => g !== f); },
    save_changes: () => state.saved++,
  };
  const el = document.createElement("div");
  document.body.append(el);
  const stop = module.default.render({ model, el });
  const look = () => [el.querySelector("[data-badge]").dataset.badge,
    el.querySelector('[data-readout="mean"]').dataset.value];
  const seen = [look()];
  el.querySelector('[aria-label="Response 1"]').click();
  const asked = { rewards: state.rewards, ddof: state.ddof };
  seen.push(look());
  el.querySelector('[aria-label="Response 2"]').click();
  const values = (mean) => ({ ...state.reply.values, mean });
  model.set("reply", { parameters: asked, values: values(0.111) });  // late: of the click before
  seen.push(look());
  model.set("reply", { parameters: { ddof: 0, rewards: [0, 0, 1] }, values: values(0.25) });
  seen.push(look());
  model.set("rewards", [1, 1, 1]);  // set in Python, the reply on its way
  seen.push(look());
  const link = el.querySelectorAll(".rw-link").length;
  stop();
  const left = el.childElementCount + Object.values(listeners).flat().length;
  return [seen, state.saved, link, left];
})()"""


def test_reply_is_shown_only_beside_its_own_settings(browser: Browser) -> None:
    group = GroupAdvantage(rewards=[1, 1, 1])
    data = {**group.settings(), "reply": {**group.reply}}
    data["reply"]["values"] = {**group.reply["values"], "mean": 0.999}  # to be told apart
    seen, saved, links, left = run_in_browser(browser, "group_advantage", LATE_REPLY, data)
    badges = [badge for badge, _ in seen]
    means = [float(mean) for _, mean in seen]
    assert badges == ["rlcore", "browser", "browser", "rlcore", "browser"]
    assert means == pytest.approx([0.999, 2 / 3, 1 / 3, 0.25, 1])
    assert (saved, links, left) == (2, 0, 0)  # JupyterLab's address is not the widget's


# The bundle


def test_class_names() -> None:
    assert class_name("group_advantage") == "GroupAdvantage"
    assert class_name("answer_box") == "AnswerBox"


def test_bundle_refuses_a_module_without_its_exports(tmp_path: Path) -> None:
    for name in ("shared.js", "widgets.css"):
        (tmp_path / name).write_text("", "utf-8")
    (tmp_path / "my_widget.js").write_text("export default {};\n", "utf-8")
    with pytest.raises(ValueError, match=r"my_widget\.js must end with 'export"):
        bundle(tmp_path, tmp_path / "out" / "widgets-bundle.js")


def test_bundle_is_one_classic_script(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "widgets"
    out = bundle(folder, tmp_path / "new" / "widgets-bundle.js")
    text = out.read_text("utf-8")
    assert re.search(r"^\s*(import|export)\b", text, re.MULTILINE) is None
    assert set(re.findall(r"^bookWidgets\.(\w+) =", text, re.MULTILINE)) == {
        "GroupAdvantage",
        "RareSuccess",
        "CreditShare",
        "AnswerBox",
    }
    assert (out.parent / "widgets.css").read_bytes() == (folder / "widgets.css").read_bytes()
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1]}, "rewards must hold 2 to 64 numbers, found 1"),
        ({"rewards": []}, "rewards must hold 2 to 64 numbers, found 0"),
        ({"rewards": [0] * 65}, "rewards must hold 2 to 64 numbers, found 65"),
        ({"rewards": [1, math.nan]}, r"rewards\[1\] must be a finite number, found nan"),
        ({"rewards": [-math.inf, 1]}, r"rewards\[0\] must be a finite number, found -inf"),
        ({"rewards": [1, None]}, r"rewards\[1\] must be a finite number, found None"),
        ({"rewards": [1, "0"]}, r"rewards\[1\] must be a finite number, found '0'"),
        ({"rewards": [1, 10**400]}, r"rewards\[1\] must be a finite number, found 1000"),
        ({"rewards": torch.zeros(2, 2)}, r"rewards\[0\] must be a finite number"),
        ({"rewards": "1100"}, "rewards must be a list of numbers, found str"),
        ({"rewards": 1}, "rewards must be a list of numbers, found int"),
        ({"rewards": [1.7e308, 1.7e308, 0]}, "rewards must be at most .* in size"),
        ({"rewards": [1.7e308, -1.7e308]}, "rewards must be at most .* in size"),
        ({"rewards": [1, 0], "ddof": 2}, "ddof must be one of 0, 1, found 2"),
        ({"rewards": [1, 0], "ddof": True}, "ddof must be one of 0, 1, found True"),
        ({"rewards": [1, 0], "ddof": "sample"}, "ddof must be one of 0, 1, found 'sample'"),
    ],
)
def test_group_advantage_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupAdvantage.compute(**arguments)
    with pytest.raises(ValueError, match=message):
        GroupAdvantage(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 1}, "group_size must be a whole number, 2 to 256, found 1"),
        ({"group_size": 257}, "group_size must be a whole number, 2 to 256, found 257"),
        ({"group_size": 8.0}, "group_size must be a whole number, 2 to 256, found 8.0"),
        ({"successes": 0}, "successes must be a whole number, 1 to 7, found 0"),
        ({"successes": 8}, "successes must be a whole number, 1 to 7, found 8"),
        ({"successes": True}, "successes must be a whole number, 1 to 7, found True"),
        ({"ddof": 2}, "ddof must be one of 0, 1, found 2"),
        ({"over": "G"}, "over must be one of 'group_size', 'successes', found 'G'"),
    ],
)
def test_rare_success_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RareSuccess.compute(**{"group_size": 8, "successes": 1, **arguments})
    with pytest.raises(ValueError, match=message):
        RareSuccess(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"answers": []}, "answers must be a list of 2 to 64 texts, found 0"),
        ({"answers": ["one"], "rewards": [1]}, "answers must be a list of 2 to 64 texts, found 1"),
        ({"answers": "one two"}, "answers must be a list of 2 to 64 texts, found str"),
        ({"answers": ["a", " "]}, r"answers\[1\] must hold at least one word, found ' '"),
        ({"answers": ["a", 3]}, r"answers\[1\] must be a text, found 3"),
        ({"rewards": [1]}, "rewards must hold 2 to 64 numbers, found 1"),
        ({"rewards": [1, 0, 0]}, r"rewards must hold one an answer \(2\), found 3"),
        ({"rewards": [1, 0.5]}, r"rewards\[1\] must be one of 0, 1, found 0\.5"),
        ({"rewards": [math.nan, 0]}, r"rewards\[0\] must be a finite number, found nan"),
        ({"phrase": ""}, "phrase must hold at least one word, found ''"),
        ({"phrase": 5050}, "phrase must be a text, found 5050"),
        ({"ddof": -1}, "ddof must be one of 0, 1, found -1"),
    ],
)
def test_credit_share_refuses(arguments: dict, message: str) -> None:
    good = {"answers": ["a b", "b c"], "rewards": [1, 0], "phrase": "b", "ddof": 0}
    CreditShare(**good)
    with pytest.raises(ValueError, match=message):
        CreditShare.compute(**{**good, **arguments})
    with pytest.raises(ValueError, match=message):
        CreditShare(**{**good, **arguments})


def test_credit_share_refuses_an_empty_offer() -> None:
    with pytest.raises(ValueError, match=r"phrases\[1\] must hold at least one word, found ''"):
        CreditShare(phrases=["a", ""])
    with pytest.raises(ValueError, match="phrases must be a list of texts, found 'the sum'"):
        CreditShare(phrases="the sum")
    with pytest.raises(ValueError, match="question must be a text, found 3"):
        CreditShare(question=3)
    with pytest.raises(ValueError, match=r"phrases\[0\] must hold at most 200 characters"):
        CreditShare(phrases=["é" * 201])
    CreditShare(phrases=["é" * 200])


@pytest.mark.parametrize("answers", [None, [], 7, [None, "b"], [7, "b"], "ab"])
def test_credit_share_refuses_answers_without_a_phrase(answers: Any) -> None:
    with pytest.raises(ValueError, match="answers"):
        CreditShare(answers, [1, 0])


@pytest.mark.parametrize("make", [GroupAdvantage, RareSuccess, CreditShare, AnswerBox])
def test_unknown_names_are_refused(make: Any) -> None:
    arguments = BOX if make is AnswerBox else {}
    with pytest.raises(TypeError, match=f"{make.__name__} has no argument 'foo'"):
        make(**arguments, foo=1)


def test_huge_rewards_have_a_std() -> None:
    """Of two rewards a and 0 it is a / 2; squares of 1e300 would overflow."""
    assert GroupAdvantage.compute([1e300, 0])["std"] == pytest.approx(5e299)
    assert GroupAdvantage.compute([1e-300, 0])["std"] == pytest.approx(5e-301)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"answer": math.nan}, "answer must be a finite number, found nan"),
        ({"answer": "7"}, "answer must be a finite number, found '7'"),
        ({"tolerance": -0.1}, "tolerance must be 0 or more, found -0.1"),
        ({"tolerance": math.inf}, "tolerance must be a finite number, found inf"),
        ({"wrong_turns": {7.001: "near"}}, "wrong_turns key 7.001 must lie farther than tolerance"),
        ({"wrong_turns": {math.inf: "far"}}, "wrong_turns key 0 must be a finite number"),
        ({"wrong_turns": {8: ""}}, "hint of wrong turn 8 must be a text that is not empty"),
        ({"wrong_turns": [8]}, "wrong_turns must be a dict"),
        ({"question": " "}, "question must be a text that is not empty"),
        ({"question": {"fr": "Combien?"}}, "question must have languages"),
        ({"name": "Two Words"}, "name must be lower-case words joined by '-'"),
        ({"name": ""}, "name must be lower-case words joined by '-'"),
        ({"language": "fr"}, "language must be one of '', 'en', 'ko', found 'fr'"),
    ],
)
def test_answer_box_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnswerBox(**{**BOX, **arguments})


def test_settings_of_a_drawn_widget_are_checked_too() -> None:
    group, rare, credit, box = (make() for make in WIDGETS)
    for widget, trait, value in (
        (group, "rewards", [1]),
        (group, "rewards", [1.7e308, -1.7e308]),
        (group, "ddof", 3),
        (rare, "successes", 8),
        (credit, "phrase", " "),
        (credit, "rewards", [1]),
        (box, "text", 7),
    ):
        before = widget.settings()
        with pytest.raises(ValueError, match="must"):
            setattr(widget, trait, value)
        assert widget.settings() == before


# Reading numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("84,000", 84000),
        ("12,345,678.5", 12345678.5),
        ("3/4", 0.75),
        ("−1.732", -1.732),
        ("sqrt(7)", math.sqrt(7)),
        ("2√3", 2 * math.sqrt(3)),
        ("-1/sqrt(7)", -1 / math.sqrt(7)),
        ("1/√3 − 2√3", 1 / math.sqrt(3) - 2 * math.sqrt(3)),
        ("(8 - 1) / sqrt(8)", 7 / math.sqrt(8)),
        ("2 × 3 ÷ 4", 1.5),
        ("8/2/2", 2),
        ("8-2-2", 4),
        ("2+3*4", 14),
        ("-2*-3", 6),
        ("1e-3", 0.001),
        (" 7 ", 7),
    ],
)
def test_numbers_that_are_read(text: str, value: float) -> None:
    assert read_number(text) == ("number", pytest.approx(value, rel=1e-15))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", "empty"),
        (" \t\u00a0", "empty"),
        ("0,577", "decimal-comma"),
        ("1,5", "decimal-comma"),
        ("96,00", "decimal-comma"),
        ("1 2", "unreadable"),
        ("1/0", "unreadable"),
        ("sqrt(-1)", "unreadable"),
        ("2**3", "unreadable"),
        ("__import__('os').getcwd()", "unreadable"),
        ("NaN", "unreadable"),
        ("1e999", "unreadable"),
        ("(" * 100, "unreadable"),
        ("1" * 101, "unreadable"),
        ("٣", "unreadable"),
    ],
)
def test_texts_that_are_not(text: str, status: str) -> None:
    assert read_number(text) == (status, None)


def test_comma_meant_as_a_point_is_told() -> None:
    """2,646 reads as thousands; where 2.646 is the answer, that is surely not what was meant."""
    assert AnswerBox.compute("2,646", 2.646, 0.005)["status"] == "decimal-comma"
    assert AnswerBox.compute("2,646", 3, 0.005)["status"] == "wrong"
    assert AnswerBox.compute("2,646", 2646, 0.005)["status"] == "right"


def test_nearest_wrong_turn_gives_the_hint() -> None:
    turns = [[0.463, "sample std"], [0.47, "another"]]
    assert AnswerBox.compute("0.469", 0.433, 0.01, turns)["turn"] == 1
    assert AnswerBox.compute("0.4634", 0.433, 0.01, turns)["turn"] == 0
    assert AnswerBox.compute("0.4", 0.433, 0.01, turns) == {
        "status": "wrong",
        "value": 0.4,
        "turn": -1,
    }
