"""The checks that exercises call: case E07's table, A06's hint, and what else must not slip by."""

import re
import sys

import numpy as np
import pytest
import torch

from rlcore.checking import (
    CheckFailed,
    check_choice,
    check_close,
    check_number,
    check_raises,
    no_input,
)

NAN, INF = float("nan"), float("inf")
ROWS_3 = [[1.0], [1.0], [1.0]]

# value, expected, tolerances, accepted: case E07 row by row, then its neighbours
TABLE = [
    (0.1 + 0.2, 0.3, {}, True),
    (0.999999, 1.0, {"atol": 1e-4}, True),
    (1.49985, 1.5, {"atol": 1e-4}, False),
    (NAN, 1.0, {}, False),
    (np.ones((3, 1)), np.ones(3), {}, False),
    (torch.tensor([1 / 3]), torch.tensor([1 / 3], dtype=torch.float64), {"rtol": 1e-5}, True),
    (1, 1.0, {}, True),
    (1.4999, 1.5, {"atol": 1e-4}, True),  # exactly on the tolerance
    (1.5001, 1.5, {"atol": 1e-4}, True),
    (1e9 + 1, 1e9, {"atol": 1e-4}, False),  # atol alone means atol alone
    (1e-9, 0.0, {"rtol": 0.5}, False),
    (0.1, 0.1000001, {"rtol": 0.0, "atol": 0.0}, False),  # float64, not torch's float32
    (np.float32(0.25), 0.25, {}, True),
    (np.int64(3), 3.0, {}, True),
    (np.ones(3), torch.ones(3), {}, True),
    ([1, 2.0], torch.tensor([1.0, 2.0]), {}, True),
    (ROWS_3, torch.ones(3, 1), {}, True),
    (torch.ones(1, 3), torch.ones(3, 1), {}, False),
    (torch.ones(3), 1.0, {}, False),
    (1.0, torch.ones(3), {}, False),
    (torch.ones(1), 1.0, {}, False),
    (torch.ones(3, dtype=torch.float16), torch.ones(3), {}, True),
    (torch.ones(3, dtype=torch.bfloat16), torch.ones(3), {}, True),
    (torch.ones(3, requires_grad=True), torch.ones(3), {}, True),
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, 1.0]), {"atol": 1e9}, False),
    (INF, 1.0, {"atol": 1e9}, False),
    (INF, INF, {}, True),
    (-INF, INF, {}, False),
    (1.0, INF, {"atol": 1.0}, False),
    (torch.tensor([True, False]), torch.tensor([True, False]), {}, True),
    (torch.tensor([True, False]), torch.tensor([1.0, 0.0]), {}, False),
    (True, 1.0, {}, False),
    (None, 1.0, {}, False),
    (..., 1.0, {}, False),
    ("1.0", 1.0, {}, False),
    (1 + 0j, 1.0, {}, False),
    ([[1.0], [1.0, 2.0]], 1.0, {}, False),
    ({"a": 1.0}, 1.0, {}, False),
    (torch.ones(3).to_sparse(), torch.ones(3), {}, True),  # the same numbers, stored otherwise
    (torch.eye(2).to_sparse(), torch.ones(2, 2), {}, False),
    (10**400, 1.0, {}, False),
    ([], torch.empty(0), {}, True),
    ([], 1.0, {}, False),
]


@pytest.mark.parametrize(("value", "expected", "tolerance", "accepted"), TABLE)
def test_check_close_table(value, expected, tolerance, accepted):
    if accepted:
        assert check_close(value, expected, **tolerance) is None
    else:
        with pytest.raises(CheckFailed, match=r"^shares "):
            check_close(value, expected, name="shares", **tolerance)


def test_a_message_names_the_value_and_shape_but_not_the_answer():
    with pytest.raises(CheckFailed) as caught:
        check_close(torch.tensor([0.5, -0.25, 7.0]), [0.5, 0.125, 0.375], name="advantages")
    text = str(caught.value)
    assert text.startswith("advantages at index [1] (-0.25), and 1 more,")
    assert "0.125" not in text
    assert "0.375" not in text
    with pytest.raises(CheckFailed, match=re.escape("has the shape (3, 1); (3,) is wanted")):
        check_close(np.ones((3, 1)), np.ones(3))
    with pytest.raises(CheckFailed, match=re.escape("index [1] (nan) is NaN")):
        check_close([1.0, NAN], [1.0, 1.0])
    with pytest.raises(CheckFailed, match="not answered yet"):
        check_close(None, 1.0)


def test_a_notebook_shows_the_message_and_no_code_of_the_check():
    # IPython prints what this method returns in the place of the traceback
    with pytest.raises(CheckFailed) as caught:
        check_close(1, 2, name="x", atol=0.5)
    assert caught.value._render_traceback_() == ["Not yet: x (1) is not right (tolerance 0.5)."]


def test_the_other_std_gets_a_hint_that_names_ddof():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    centred = rewards - rewards.mean()
    turns = {"this is the sample std (ddof=1)": centred / rewards.std(correction=1)}
    right = [1.73205081, -0.57735027, -0.57735027, -0.57735027]  # A06, ddof0
    check_close(centred / rewards.std(correction=0), right, wrong_turns=turns, atol=1e-3)
    with pytest.raises(CheckFailed, match=r"group_advantage: .*ddof=1"):
        check_close(
            torch.tensor([1.5, -0.5, -0.5, -0.5]),
            right,
            wrong_turns=turns,
            atol=1e-3,
            name="group_advantage",
        )
    with pytest.raises(CheckFailed) as caught:  # wrong in another way: no false hint
        check_close([9.0, 0.0, 0.0, 0.0], right, wrong_turns=turns, atol=1e-3)
    assert "ddof" not in str(caught.value)


def test_a_wrong_turn_may_have_another_shape_or_several_values():
    with pytest.raises(CheckFailed, match="keepdim"):
        check_close(torch.ones(3, 1), torch.ones(3), wrong_turns={"keepdim": torch.ones(3, 1)})
    with pytest.raises(CheckFailed, match="sign"):
        check_close(-2.0, 1.0, wrong_turns={"mind the sign": (-1.0, -2.0)})
    check_close(1.0, 1.0, wrong_turns={"a wrong turn that happens to be right": 1.0})


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((1.0, None), {}),
        ((1.0, NAN), {}),
        ((1.0, "one"), {}),
        ((1.0, 1.0), {"rtol": -1.0}),
        ((1.0, 1.0), {"atol": NAN}),
        ((1.0, 1.0), {"rtol": "x"}),
        ((1.0, 1.0), {"atol": 10**400}),
        ((1.0, 1.0), {"atol": torch.tensor([1.0, 2.0])}),
        ((1.0, 2.0), {"wrong_turns": {"hint": "text"}}),
    ],
)
def test_a_mistake_in_the_test_itself_is_a_value_error(arguments, options):
    with pytest.raises(ValueError, match="check_close"):
        check_close(*arguments, **options)


class Shy:
    """An answer that cannot even be shown."""

    def __repr__(self):
        raise KeyError("no name")


class Prickly(Shy):
    def __array__(self, dtype=None, copy=None):
        raise KeyError("no numbers")


@pytest.mark.parametrize("value", [Shy(), Prickly(), [Shy()]])
def test_an_answer_that_cannot_be_shown_is_a_wrong_answer(value):
    for check in (lambda: check_close(value, 1.0), lambda: check_choice(value, choices="AB")):
        with pytest.raises(CheckFailed, match=r"is a .* that cannot be shown"):
            check()


def test_check_number_looks_at_the_form_only():
    check_number(3)
    check_number([1.0, 2.0], shape=(2,))
    for value, says in [(None, "not answered"), (NAN, "finite"), (INF, "finite"), ("3", "str")]:
        with pytest.raises(CheckFailed, match=f"share .*{says}"):
            check_number(value, name="share")
    with pytest.raises(CheckFailed, match=re.escape("(2,) is wanted")):
        check_number([1.0], shape=(2,))
    with pytest.raises(CheckFailed, match="True or False"):
        check_number(True)


def test_check_choice():
    check_choice(" b ", "B", choices="ABC")
    check_choice("A", choices="ABC")
    check_choice({"C", "a"}, ["A", "C"], choices="ABC")
    check_choice("A", ["A"], choices="ABC")
    for value in (None, ..., "", "D", 1, ["A"], ("B", "C")):
        with pytest.raises(CheckFailed, match="cause"):
            check_choice(value, "B", choices="ABC", name="cause")
    for value in ([], (), set(), " "):
        for expected in (None, "B", ["A", "C"]):
            with pytest.raises(CheckFailed, match="cause is not answered yet"):
                check_choice(value, expected, choices="ABC", name="cause")
    check_choice([], [], choices="ABC")  # none of them is the answer
    with pytest.raises(CheckFailed, match="one of A, B, C is wanted"):
        check_choice(np.array(["A", "B"]), choices="ABC")
    with pytest.raises(CheckFailed, match="not right"):
        check_choice({"A"}, {"A", "C"}, choices="ABC")
    with pytest.raises(CheckFailed, match="cause: the other axis"):
        check_choice("c", "B", choices="ABC", name="cause", wrong_turns={"the other axis": "C"})
    with pytest.raises(CheckFailed) as caught:
        check_choice("A", "B", choices="ABC", name="cause")
    assert "B" not in str(caught.value)
    with pytest.raises(ValueError, match="not among"):
        check_choice("A", "D", choices="ABC")


def test_check_raises():
    def refuse():
        raise ValueError("group_ids: a group of one row")

    check_raises(refuse, ValueError, mentions="Group")
    for call, says in [
        (lambda: 1, "raises nothing"),
        (sys.exit, "raises SystemExit .* ValueError is wanted"),
        (lambda: [][0], "raises IndexError .* ValueError is wanted"),
    ]:
        with pytest.raises(CheckFailed, match=f"f {says}"):
            check_raises(call, ValueError, name="f")
    check_raises(lambda: sys.exit("enough"), SystemExit, mentions="enough")
    with pytest.raises(CheckFailed, match="does not say 'eps'"):
        check_raises(refuse, ValueError, mentions="eps")


@pytest.mark.parametrize("error", [ValueError, RuntimeError, Exception])
def test_an_unwritten_exercise_does_not_pass_for_an_error(error):
    def stub():
        raise NotImplementedError

    with pytest.raises(CheckFailed, match="not written yet"):
        check_raises(stub, error)


def test_input_says_that_it_is_not_available():
    with pytest.raises(RuntimeError, match=re.escape("input() is not available")):
        no_input("n? ")
