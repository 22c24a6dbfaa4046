"""Tasks: splits that never meet, demonstrations as stated, verifiers that never fall."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.tasks import TASKS, Task, get_task, letters, rate, rate_each, reviews, sort_box
from rlcore.tasks import robot as robot_board
from rlcore.tasks import sort as sort_digits
from rlcore.tasks.task import VerifierUnavailable, rate_all

RUNS_PROGRAMS = pytest.mark.skipif(
    sys.platform != "linux", reason="formula is verified in the sandbox, which needs Linux"
)
NAMES = [pytest.param(name, marks=RUNS_PROGRAMS) if name == "formula" else name for name in TASKS]
CUT = ("sort-filler",)  # some demonstrations are longer than the limit, on purpose
MALFORMED = ("", " ", "\x00", "0" * 10_000, "__import__('os').abort()", "1/0", "=", "é", "a\n")


def tokens(task: Task, text: str) -> list[str]:
    """The symbols of a text, as the tokenizer sees them."""
    return text.split(" ") if task.words else list(text)


def test_unknown_task_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"task: found 'chess'; wanted one of sort, .*robot"):
        get_task("chess")
    with pytest.raises(ValueError, match=r"task: found \[\]"):
        get_task([])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
class TestEveryTask:
    def test_splits_are_disjoint_by_key(self, name: str) -> None:
        task, rng = get_task(name), random.Random(0)
        trained = {task.key(task.draw(rng)) for _ in range(20_000)}
        held_out = {task.key(problem) for problem in task.prompts("held-out", 1000)}
        assert trained
        assert not trained & held_out

    def test_prompts_are_distinct_and_repeat_by_seed(self, name: str) -> None:
        task = get_task(name)
        first = task.prompts("held-out", 200, seed=1)
        assert len(set(first)) == 200
        assert first == task.prompts("held-out", 200, seed=1)
        assert first != task.prompts("held-out", 200, seed=2)
        assert {task.split_of(problem) for problem in first} == {"held-out"}

    def test_the_solution_is_worth_one_and_fits(self, name: str) -> None:
        task, rng = get_task(name), random.Random(0)
        for _ in range(200):
            problem = task.draw(rng)
            solution = task.solution(problem)
            best = reviews.ASKED * reviews.PRAISED if task.preference_scale else 1.0
            assert task.verify(problem, solution) == best
            assert set(tokens(task, problem) + tokens(task, solution)) <= set(task.vocabulary)
            assert len(tokens(task, solution)) < task.max_new_tokens  # there is room for the end
            demonstration = tokens(task, task.demonstration(problem, rng))
            assert len(demonstration) > 0
            assert name in CUT or len(demonstration) < task.max_new_tokens
            assert set(demonstration) <= set(task.vocabulary)

    @pytest.mark.parametrize("response", MALFORMED)
    def test_malformed_responses_are_worth_nothing(self, name: str, response: str) -> None:
        task = get_task(name)
        problem = task.draw(random.Random(0))
        worth = task.verify(problem, response)
        assert worth == (-1.0 if task.preference_scale else 0.0)
        if task.rewards is not None:
            assert set(rate_each(task, problem, response)[0]) == {0.0}

    @given(response=st.text(max_size=20))
    def test_any_text_gets_a_reward(self, name: str, response: str) -> None:
        task = get_task(name)
        problem = task.draw(random.Random(0))
        reward, error = rate(task, problem, response)
        assert error is None
        assert reward < 0 if task.preference_scale else reward in (0.0, 1.0)
        if task.rewards is not None:
            assert rate_each(task, problem, response)[1] is None

    @pytest.mark.parametrize("problem", ["", "=", "12=", "f:RR=", "f:RRUDLLUX=", "z:RRUDLLUR="])
    def test_malformed_problem_is_an_error(self, name: str, problem: str) -> None:
        with pytest.raises(ValueError, match="problem: found"):
            get_task(name).verify(problem, "0")

    def test_bad_split_and_n(self, name: str) -> None:
        task = get_task(name)
        with pytest.raises(ValueError, match="split: found 'test'; wanted one of train, held-out"):
            task.prompts("test", 1)
        for n in (0, -1, 2.0, True):
            with pytest.raises(ValueError, match="n: found"):
                task.prompts("held-out", n)  # type: ignore[arg-type]

    def test_has_a_note(self, name: str) -> None:
        task = get_task(name)
        assert task.note.startswith("Good for: ")
        assert task.description.endswith(".")


def test_a_split_that_is_too_small_says_so() -> None:
    # Ten problems in all, so that 50 different ones cannot be found.
    small = replace(get_task("sort"), problem=lambda rng: f"10000{rng.randrange(10)}=")
    with pytest.raises(ValueError, match="n: 50 different problems wanted"):
        small.prompts("train", 50)


def test_a_split_that_is_empty_says_so() -> None:
    one = replace(get_task("sort"), problem=lambda rng: "100000=")
    empty = {"train": "held-out", "held-out": "train"}[one.split_of("100000=")]
    with pytest.raises(ValueError, match=f"split: 1,000 problems of 'sort' and none of '{empty}'"):
        one.prompts(empty, 1)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_at_all_is_worth_nothing(name: str) -> None:
    task = get_task(name)
    problem = task.prompts("train", 1)[0]
    assert task.verify(problem, None) == (-1.0 if task.preference_scale else 0.0)
    if task.rewards is not None:
        assert rate_each(task, problem, None)[0] == (0.0,) * len(task.reward_names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": ("a",)}, "words: found"),
        ({"symbols": ""}, "words: found"),
        ({"reward_names": ("a",)}, "reward_names: found"),
        ({"rewards": lambda p, r: {}}, "reward_names: found"),
        ({"rewards": lambda p, r: {}, "reward_names": ("a", "a")}, "reward_names: found"),
        ({"verify": 3}, r"verify: found 3; wanted a function of \(problem, response\)$"),
        ({"verify": None}, "verify: found None; wanted a function"),
        ({"rewards": 3, "reward_names": ("a",)}, r"rewards: found 3; wanted a func.* or None$"),
        ({"preference_scale": 0.0}, "preference_scale: found 0.0"),
        ({"preference_scale": float("nan")}, "preference_scale: found nan"),
    ],
)
def test_fields_that_do_not_fit_together(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(get_task("sort"), **change)


def kind(problem: str, response: str) -> str:
    right = sort_digits.solution(problem)
    names = {right: "right", right[::-1]: "descending", problem[:-1]: "copied"}
    return names.get(response, "one swap")


def test_sort_demonstrations_follow_the_mixture() -> None:
    # Problems with six different digits, where no kind looks like another one by accident.
    task, rng, counts = get_task("sort"), random.Random(0), Counter()
    n = 0
    while n < 4000:
        problem = task.draw(rng)
        if len(set(problem)) == 7 and problem[:-1] != sort_digits.solution(problem)[::-1]:
            counts[kind(problem, task.demonstration(problem, rng))] += 1
            n += 1
    for name, share in sort_digits.MIXED.items():
        assert counts[name] / n == pytest.approx(share, abs=4 * (0.25 / n) ** 0.5)


def test_only_right_demonstrations_are_right() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        problem = sort_digits.problem(rng)
        for name in sort_digits.MIXED:
            response = sort_digits.demonstrate(problem, name, rng)
            assert sorted(response) == sorted(problem[:-1])
            assert sort_digits.verify(problem, response) == float(name == "right")
    with pytest.raises(ValueError, match="kind: found 'sideways'"):
        sort_digits.demonstrate("352041=", "sideways", rng)


def test_no_demonstration_of_sort_unseen_is_right() -> None:
    task, rng = get_task("sort-unseen"), random.Random(0)
    problems = [task.draw(rng) for _ in range(5000)]
    assert not any(task.verify(p, task.demonstration(p, rng)) for p in problems)


def test_robot_by_hand() -> None:
    # a b|c d     from f: R is the wall-free cell g, then a wall on g's right, U to c,
    #             ...               and so on, cell by cell as the picture of the board shows.
    # e f g|h
    # - -   -
    # i j k l
    #     -
    #|m n o p|
    assert robot_board.walk("f:RRUDLLUR=") == "ggcgfeab"
    assert robot_board.walk("m:LLLLLLLL=") == "mmmmmmmm"  # a wall, where the board would wrap
    assert robot_board.walk("i:LLLLUUUU=") == "lkjiiiii"  # wraps to l; a wall above i
    assert robot_board.walk("k:DRDDDDDD=") == "klpdhhhh"  # walls below k and below h; p wraps to d
    board = robot_board.board()
    assert board.splitlines()[1] == " a b|c d"
    assert board.splitlines()[2] == ""
    assert board.splitlines()[4] == " - -   -"
    assert board.splitlines()[7] == "|m n o p|"


def test_walls_hold_from_both_sides() -> None:
    assert len(robot_board.BLOCKED) == 2 * len(robot_board.WALLS)
    for cell, move in robot_board.BLOCKED:
        other = robot_board.neighbour(cell, move)
        assert (other, robot_board.BACK[move]) in robot_board.BLOCKED


def test_robot_verifier_looks_at_the_last_cell_only() -> None:
    task = get_task("robot")
    problem = "f:RRUDLLUR="
    assert task.verify(problem, "b") == 1.0
    assert task.verify(problem, "ggcgfeab") == 1.0
    assert task.verify(problem, "pppb") == 1.0  # a wrong way, the right end
    assert task.verify(problem, "ba") == 0.0
    assert task.verify(problem, "R:b") == 0.0  # not written in cells


def test_robot_demonstrations_answer_at_once_four_times_in_five() -> None:
    task, rng = get_task("robot"), random.Random(0)
    problems = [task.draw(rng) for _ in range(4000)]
    demonstrations = [task.demonstration(p, rng) for p in problems]
    assert all(task.verify(p, d) for p, d in zip(problems, demonstrations, strict=True))
    share = sum(len(d) == 1 for d in demonstrations) / len(demonstrations)
    assert share == pytest.approx(0.8, abs=0.026)  # four standard errors
    assert {len(d) for d in demonstrations} == {1, 8}


def test_several_rewards_by_hand() -> None:
    """Each asks for one thing only: any of the eight combinations can be earned."""
    task, problem = get_task("sort-box"), "352041="
    earned = {
        "[012345]": (1, 1, 1),
        "012345": (1, 0, 1),
        "..012345": (1, 0, 0),
        ".[012345]": (1, 1, 0),
        "[543210]": (0, 1, 1),
        ".[543210]": (0, 1, 0),
        "543210": (0, 0, 1),
        "...5": (0, 0, 0),
        "[01.2345]": (0, 0, 0),  # filler inside the box: another form
        "[012345": (0, 0, 0),
        "]012345[": (0, 0, 0),
        "[[012345]]": (0, 0, 0),
        "[]": (0, 0, 0),
        ".": (0, 0, 0),
    }
    for response, expected in earned.items():
        assert rate_each(task, problem, response) == (tuple(map(float, expected)), None), response
        assert task.verify(problem, response) == expected[0]
        uneven, _ = rate_each(get_task("sort-box-uneven"), problem, response)
        assert uneven == pytest.approx([0.1 * expected[0], expected[1], 2.0 * expected[2]])


def test_the_demonstrations_of_sort_box_earn_the_stated_shares() -> None:
    task, rng, n = get_task("sort-box"), random.Random(0), 4000
    problems = [task.draw(rng) for _ in range(n)]
    earned = [rate_each(task, p, task.demonstration(p, rng))[0] for p in problems]
    # A copy of digits that are descending by nature, and the like, add a little to the first.
    for column, share in enumerate((sort_box.SORTED, sort_box.BOXED, sort_box.SHORT)):
        found = sum(row[column] for row in earned) / n
        assert found == pytest.approx(share, abs=4 * (0.25 / n) ** 0.5)


def test_one_reward_cannot_be_rated_as_several() -> None:
    with pytest.raises(ValueError, match="task: 'sort' has no several rewards"):
        rate_each(get_task("sort"), "352041=", "0")


@pytest.mark.parametrize(
    ("rewards", "found", "said"),
    [
        (lambda p, r: {"a": 1, "b": None}, (1.0, None), None),
        (lambda p, r: {"b": 2, "a": 1}, (1.0, 2.0), None),  # by name, not by place
        (lambda p, r: {"a": 1}, (None, None), r"ValueError: rewards returned \['a'\]"),
        (lambda p, r: 1 / 0, (None, None), "ZeroDivisionError"),
        (lambda p, r: None, (None, None), "TypeError"),
        (lambda p, r: {"a": 1e200, "b": 3}, (None, 3.0), "ValueError: a returned 1e\\+200"),
        (
            lambda p, r: {"a": "x", "b": math.nan},
            (None, None),
            "ValueError: a returned 'x'",
        ),
        (lambda p, r: sys.exit(3), (None, None), "SystemExit: 3"),
    ],
)
def test_several_rewards_that_fail_are_missing(rewards, found, said) -> None:
    task = replace(get_task("sort"), rewards=rewards, reward_names=("a", "b"))
    values, error = rate_each(task, "352041=", "0")
    assert [None if math.isnan(value) else value for value in values] == list(found)
    assert (error is None) == (said is None)
    if said is not None:
        assert re.match(said, error)


class Several:
    """A verifier that is asked of a batch at once."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, problem: str, response: str) -> float:
        raise self.error

    def many(self, problems: list[str], responses: list[str]) -> list[tuple[float, None]]:
        raise self.error


class Gives:
    """A verifier that is asked of a batch at once, and gives what it is told."""

    def __init__(self, *found: Any) -> None:
        self.found = found

    def __call__(self, problem: str, response: str) -> float:
        raise NotImplementedError

    def many(self, problems: list[str], responses: list[str]) -> list[Any]:
        return list(self.found)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((math.inf, None), "ValueError: the verifier returned inf; wanted a number"),
        ((None, " \n "), "the verifier named no reason"),
        ((None, 5), "5"),
        (0.5, "TypeError: cannot unpack"),
        (("1", None), "ValueError: the verifier returned '1'"),
    ],
)
def test_one_bad_answer_of_a_batch_is_that_answer_alone(bad: Any, said: str) -> None:
    task = replace(get_task("sort"), verify=Gives((1.0, None), bad, (0.0, None)))
    first, second, third = rate_all(task, ["1="] * 3, ["1"] * 3)
    assert (first, third) == ((1.0, None), (0.0, None))
    assert math.isnan(second[0])
    assert second[1].startswith(said)


def test_an_error_without_words_is_the_verifiers_own_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even that")

    def verify(problem: str, response: str) -> float:
        raise Mute

    reward, error = rate(replace(get_task("sort"), verify=verify), "1=", "1")
    assert math.isnan(reward)
    assert error == "Mute: "


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("timeout", [None, 10.0])
def test_only_an_interrupt_and_a_missing_verifier_get_through(several, timeout) -> None:
    """What else a verifier raises is its own failure, SystemExit too, in any thread."""

    def verifier(error: BaseException) -> Task:
        given = Several(error)
        return replace(
            get_task("sort"),
            verify=given if several else given.__call__,
            rewards=given.__call__,
            reward_names=("a",),
            verifier_timeout=timeout,
        )

    for error in (SystemExit(1), GeneratorExit(), asyncio.CancelledError()):
        task, name = verifier(error), type(error).__name__
        for ask in (rate, rate_each):
            assert str(ask(task, "352041=", "0")[1]).startswith(f"{name}: ")
            with ThreadPoolExecutor() as pool:  # no alarm there
                found = pool.submit(ask, task, "352041=", "0").result()
            assert str(found[1]).startswith(f"{name}: ")
    for stop in (KeyboardInterrupt, VerifierUnavailable):
        for ask in (rate, rate_each):
            with pytest.raises(stop):
                ask(verifier(stop()), "352041=", "0")


def test_answers_of_sort_filler_are_cut_four_times_in_nine() -> None:
    task, rng, n = get_task("sort-filler"), random.Random(0), 4000
    problems = [task.draw(rng) for _ in range(n)]
    texts = [task.demonstration(p, rng) for p in problems]
    cut = [len(text) + 1 > task.max_new_tokens for text in texts]
    assert sum(cut) / n == pytest.approx(4 / 9, abs=4 * (0.25 / n) ** 0.5)
    right = [task.verify(p, text) for p, text in zip(problems, texts, strict=True)]
    assert sum(right) / n == pytest.approx(0.3, abs=4 * (0.21 / n) ** 0.5)
    for p, text in zip(problems, texts, strict=True):  # what the limit leaves of a long one
        if len(text) > task.max_new_tokens:
            assert task.verify(p, text[: task.max_new_tokens]) == 0.0
    assert task.verify("352041=", "...012345") == 1.0
    assert task.verify("352041=", "012345.") == 0.0
    assert task.verify("352041=", "0.12345") == 0.0


def test_letters_has_seventy_right_answers_to_each_problem() -> None:
    task = get_task("letters")
    problem = task.draw(random.Random(0))
    answers = map("".join, itertools.product(problem[:-1], repeat=4))
    assert sum(task.verify(problem, answer) for answer in answers) == math.comb(8, 4) == 70
    absent = next(letter for letter in letters.ALPHABET if letter not in problem)
    assert task.verify(problem, "".join(sorted(problem[:3] + absent))) == 0.0
    assert task.verify(problem, task.solution(problem)[:3]) == 0.0


def test_the_demonstrations_of_letters_are_right_three_times_in_ten() -> None:
    task, rng, n = get_task("letters"), random.Random(0), 4000
    problems = [task.draw(rng) for _ in range(n)]
    right = [task.verify(p, task.demonstration(p, rng)) for p in problems]
    assert sum(right) / n == pytest.approx(letters.RIGHT, abs=4 * (0.21 / n) ** 0.5)


def test_the_true_reward_of_reviews_by_hand() -> None:
    verify, problem = get_task("reviews").verify, "plot music humor cast :"
    worth = {
        "i loved the plot .": 1.0,
        "the plot was not bad .": 1.0,
        "the plot was not good .": -1.0,
        "the plot was very dull .": -1.0,
        "i loved the plot . the plot was good .": 0.5,  # the second one only repeats
        "i loved the pace .": 0.5,  # nobody asked
        "the pace was dull . the pace was dull .": -1.0,
        "i loved the plot": -1.0,  # cut
        "i loved the plot . i loved the": 0.0,
        "i loved plot .": -1.0,
        "the plot was very very good .": -1.0,
        "the plot was not very good .": -1.0,  # not a form of the language
        "the good was plot .": -1.0,
        "plot .": -1.0,
        ".": -1.0,
        "i loved the plot . the cast was fun . the humor was so great . i liked the music .": 4.0,
        "i loved the plot . i loved the cast . i loved the humor . i loved the music . "
        "i loved the pace .": 4 + 0.5 - 0.75,
        "i loved the <pad> plot .": -1.0,
        "i loved the plot .\n": 1.0,  # white space is what the tokenizer makes of it
    }
    for review, points in worth.items():
        assert verify(problem, review) == points, review


def test_demonstrations_of_reviews_are_in_two_minds() -> None:
    task, rng, n = get_task("reviews"), random.Random(0), 2000
    problems = [task.draw(rng) for _ in range(n)]
    texts = [task.demonstration(p, rng) for p in problems]
    read = [reviews.read(words) for text in texts for words in reviews.sentences_of(text)]
    understood = [found for found in read if found is not None]
    # Of twenty sentences one stumbles; a few of those stay in the language by accident.
    assert 0.95 < len(understood) / len(read) < 0.97
    praised = sum(praise for _, praise in understood) / len(understood)
    assert praised == pytest.approx(0.6, abs=4 * (0.25 / len(understood)) ** 0.5)
    rewards = [task.verify(p, text) for p, text in zip(problems, texts, strict=True)]
    assert min(rewards) < -2
    assert max(rewards) > 2
    assert abs(sum(rewards) / n) < 0.3  # long reviews are worth no less than short ones


@pytest.mark.parametrize("name", ["reviews", "letters"])
def test_the_split_does_not_see_the_order_of_the_prompt(name: str) -> None:
    task, rng = get_task(name), random.Random(0)
    for _ in range(200):
        problem = task.draw(rng)
        ask = " :" if name == "reviews" else "="
        parts = tokens(task, problem.removesuffix(ask))
        rng.shuffle(parts)
        again = (" " if name == "reviews" else "").join(parts) + ask
        assert task.split_of(again) == "train"


def test_sort_few_has_few_problems_and_holds_out_those_of_sort() -> None:
    task, rng = get_task("sort-few"), random.Random(0)
    drawn = Counter(task.draw(rng) for _ in range(6400))
    assert len(drawn) == sort_digits.FEW == 64
    assert min(drawn.values()) > 50
    assert max(drawn.values()) < 160
    assert {get_task("sort").split_of(problem) for problem in drawn} == {"train"}
    held_out = task.prompts("held-out", 512)
    assert {get_task("sort").split_of(problem) for problem in held_out} == {"held-out"}
