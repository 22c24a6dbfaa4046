"""Tasks: splits that never meet, demonstrations as stated, verifiers that never fall."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.tasks import TASKS, get_task
from rlcore.tasks import robot as robot_board
from rlcore.tasks import sort as sort_digits

NAMES = list(TASKS)
MALFORMED = ("", " ", "\x00", "0" * 10_000, "__import__('os').abort()", "1/0", "=", "é", "a\n")


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
            assert task.verify(problem, solution) == 1.0
            assert set(problem) | set(solution) <= set(task.symbols)
            assert len(solution) < task.max_new_tokens  # there is room for the end
            demonstration = task.demonstration(problem, rng)
            assert 0 < len(demonstration) < task.max_new_tokens
            assert set(demonstration) <= set(task.symbols)

    @pytest.mark.parametrize("response", MALFORMED)
    def test_malformed_responses_are_worth_nothing(self, name: str, response: str) -> None:
        task = get_task(name)
        assert task.verify(task.draw(random.Random(0)), response) == 0.0

    @given(response=st.text(max_size=20))
    def test_any_text_gets_a_reward(self, name: str, response: str) -> None:
        task = get_task(name)
        assert task.verify(task.draw(random.Random(0)), response) in (0.0, 1.0)

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
    from dataclasses import replace

    # Ten problems in all, so that 50 different ones cannot be found.
    small = replace(get_task("sort"), problem=lambda rng: f"10000{rng.randrange(10)}=")
    with pytest.raises(ValueError, match="n: 50 different problems wanted"):
        small.prompts("train", 50)


def test_a_split_that_is_empty_says_so() -> None:
    from dataclasses import replace

    one = replace(get_task("sort"), problem=lambda rng: "100000=")
    empty = {"train": "held-out", "held-out": "train"}[one.split_of("100000=")]
    with pytest.raises(ValueError, match=f"split: 1,000 problems of 'sort' and none of '{empty}'"):
        one.prompts(empty, 1)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_at_all_is_worth_nothing(name: str) -> None:
    assert get_task(name).verify(get_task(name).prompts("train", 1)[0], None) == 0.0


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
