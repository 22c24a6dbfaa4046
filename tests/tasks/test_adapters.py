"""Tasks from other packages: their problems and scores, and no response is ever run.

The packages are extras. What is ours is tested with stand-ins of the same calls; the tests with the
packages themselves run where they are installed. The environment of make has math-verify; for
reasoning-gym there is a job of its own, which sets NEED_EXTRAS=1: nothing is skipped there.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial

import pytest

from rlcore.tasks import rate
from rlcore.tasks.math_verify import arithmetic, math_task
from rlcore.tasks.reasoning_gym import reasoning_gym_task


def installed(name: str) -> types.ModuleType:
    """The package, or a skipped test; a failed one where NEED_EXTRAS is set."""
    if os.environ.get("NEED_EXTRAS", "") not in ("", "0"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


EVIL = "__import__('pathlib').Path('{}').write_text('run')"


class Adding:
    """A data set as the package makes them: question, answer, score_answer."""

    def __init__(self, size: int, seed: int, digits: int = 1) -> None:
        assert digits < 3, "digits must be below 3"
        self.size, self.seed, self.digits = size, seed, digits
        self.made: list[int] = []

    def __getitem__(self, i: int) -> dict:
        self.made.append(i)
        a, b = divmod(i + self.seed, 10**self.digits)
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer: str, entry: dict) -> float:
        return float(answer == entry["answer"])


RUNS = """
class Running:
    def __init__(self, size, seed):
        pass
    def __getitem__(self, i):
        return {"question": f"{i}", "answer": f" {i}", "metadata": {}}
    def score_answer(self, answer, entry):
        return float(eval(answer) == int(entry["answer"]))
"""


class Lenient(Adding):
    """One that takes any text for right."""

    def score_answer(self, answer: str, entry: dict) -> float:
        return float(bool(answer) == bool(entry["answer"]))


class Numeric(Adding):
    """One that fails on text that is no number."""

    def score_answer(self, answer: str, entry: dict) -> float:
        return float(int(answer) == int(entry["answer"]))


class Mixed(Adding):
    """Several in one, as the package's `composite`."""

    def __init__(self, size: int, seed: int, parts: dict) -> None:
        super().__init__(size, seed)
        self.datasets = {name: kind(size, seed) for name, kind in parts.items()}

    def score_answer(self, answer: str, entry: dict) -> float:
        return self.datasets[list(self.datasets)[-1]].score_answer(answer, entry)


@pytest.fixture
def gym(monkeypatch, tmp_path):
    """A stand-in for the package: one honest data set, and one that runs what it is given."""
    (tmp_path / "running_data.py").write_text(RUNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import running_data

    kinds = {"adding": Adding, "running": running_data.Running}
    kinds |= {"lenient": Lenient, "numeric": Numeric, "mixed": Mixed}
    package = types.ModuleType("reasoning_gym")
    package.factory = types.SimpleNamespace(DATASETS=kinds)
    package.create_dataset = lambda name, **settings: kinds[name](**settings)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    # This file holds a data set that runs text, and Adding beside it: only Adding is meant.
    monkeypatch.setattr("inspect.getsource", lambda m: RUNS if m is running_data else "")
    yield package
    sys.modules.pop("running_data", None)


def test_a_data_set_becomes_a_task(gym) -> None:
    task = reasoning_gym_task("adding", max_new_tokens=3, size=200, seed=5, digits=2)
    problem = task.draw(random.Random(0))
    assert task.solution(problem) == str(sum(map(int, problem[:-1].split(" + "))))
    assert task.verify(problem, f" {task.solution(problem)}\n") == 1.0
    assert task.verify(problem, "x") == 0.0
    assert task.verify(problem, None) == 0.0  # type: ignore[arg-type]
    held_out = task.prompts("held-out", 10)
    rng = random.Random(1)
    assert not {task.draw(rng) for _ in range(300)} & set(held_out)


def test_a_problem_is_found_by_a_task_that_never_drew_it(gym) -> None:
    """As in a resumed run, or for prompts read from a file."""
    first, second = (reasoning_gym_task("adding", max_new_tokens=3, size=50) for _ in range(2))
    problem = first.draw(random.Random(3))
    assert second.verify(problem, first.solution(problem)) == 1.0
    with pytest.raises(ValueError, match="it is none of the 50 of adding"):
        second.verify("7 + 77?", "84")


def test_template_extraction_and_mistakes(gym) -> None:
    task = reasoning_gym_task(
        "adding",
        max_new_tokens=9,
        size=90,
        mistakes=0.5,
        prompt=lambda question: f"Q: {question} A:",
        extract=lambda response: response.rpartition("=")[2],
    )
    rng = random.Random(0)
    problems = [task.draw(rng) for _ in range(600)]
    assert all(problem.startswith("Q: ") for problem in problems)
    assert task.verify(problems[0], f"1 + 1 = 3, so ={task.solution(problems[0])}") == 1.0
    right = [task.demonstration(p, rng) == task.solution(p) for p in problems]
    # Half are right on purpose; of the others about one in twelve is by accident.
    assert 0.47 < sum(right) / len(right) < 0.64


def test_a_response_is_never_run(gym, tmp_path) -> None:
    evil = EVIL.format(tmp_path / "seen")
    with pytest.raises(ValueError, match="exact: running may run a response as python"):
        reasoning_gym_task("running", max_new_tokens=3)
    task = reasoning_gym_task("running", max_new_tokens=3, size=20, exact=True)
    problem = task.draw(random.Random(0))
    assert rate(task, problem, evil) == (0.0, None)
    assert not (tmp_path / "seen").exists()
    assert task.verify(problem, problem) == 1.0
    assert task.verify(problem, f"{problem} + 0") == 0.0  # right as python, but another text
    # The stand-in would have run it:
    gym.factory.DATASETS["running"](1, 0).score_answer(evil, {"answer": "1"})
    assert (tmp_path / "seen").exists()


def test_a_part_of_a_mixture_is_never_run_either(gym) -> None:
    running = gym.factory.DATASETS["running"]
    with pytest.raises(ValueError, match=r"exact: running .a part of mixed. may run a response"):
        reasoning_gym_task("mixed", max_new_tokens=3, parts={"adding": Adding, "running": running})
    with pytest.raises(ValueError, match=r"exact: lenient .a part of mixed. scores any text"):
        reasoning_gym_task("mixed", max_new_tokens=3, parts={"lenient": Lenient})
    task = reasoning_gym_task("mixed", max_new_tokens=3, size=9, parts={"adding": Adding})
    assert task.verify("0 + 3?", "3") == 1.0


def test_a_score_that_takes_any_text_is_not_asked(gym) -> None:
    with pytest.raises(ValueError, match="exact: lenient scores any text as right"):
        reasoning_gym_task("lenient", max_new_tokens=3)
    task = reasoning_gym_task("lenient", max_new_tokens=3, size=9, exact=True)
    assert task.verify("0 + 3?", "3") == 1.0
    assert task.verify("0 + 3?", "4") == 0.0


def test_a_malformed_response_is_worth_nothing(gym) -> None:
    task = reasoning_gym_task("numeric", max_new_tokens=3, size=9)
    assert rate(task, "0 + 3?", "3") == (1.0, None)
    assert rate(task, "0 + 3?", "three") == (0.0, None)


def test_a_file_is_trusted_as_it_was_read_and_no_other(gym, monkeypatch) -> None:
    import running_data

    from rlcore.tasks import reasoning_gym

    digest = hashlib.sha256(RUNS.encode()).hexdigest()
    monkeypatch.setitem(reasoning_gym.READ, "running_data", digest)
    assert not reasoning_gym.runs_text(running_data.Running)
    monkeypatch.setattr("inspect.getsource", lambda m: RUNS + "# changed")
    assert reasoning_gym.runs_text(running_data.Running)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"name": "chess"},
            "name: found 'chess'; wanted one of adding, lenient, mixed, numeric, running",
        ),
        ({"digits": 3}, "settings: adding takes no such settings .digits must be below 3"),
        ({"colour": 1}, "settings: adding takes no such settings .*colour"),
        ({"mistakes": 2}, "mistakes: found 2"),
        ({"size": 0}, "size: found 0"),
        ({"seed": -1}, "seed: found -1"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
    ],
)
def test_bad_arguments_of_reasoning_gym(change: dict, message: str, gym) -> None:
    with pytest.raises(ValueError, match=message):
        reasoning_gym_task(**{"name": "adding", "max_new_tokens": 3, **change})


def test_a_missing_package_says_how_to_get_it(monkeypatch) -> None:
    for name in ("reasoning_gym", "math_verify"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        reasoning_gym_task("chain_sum", max_new_tokens=3)
    with pytest.raises(ValueError, match="pip install math-verify"):
        math_task("m", [("q", "1")], max_new_tokens=3)


@pytest.fixture
def verifier(monkeypatch):
    """A stand-in for math-verify: numbers alone, and it notes what it was given."""
    package = types.ModuleType("math_verify")
    package.given = []

    def parse(text: str, *, parsing_timeout: float | None) -> list[float]:
        package.given.append(text)
        return [float(word) for word in text.split() if word.replace(".", "").isdigit()]

    def verify(gold: list[float], found: list[float], *, timeout_seconds: float | None) -> bool:
        return gold[-1:] == found[-1:]

    package.parse, package.verify = parse, verify
    monkeypatch.setitem(sys.modules, "math_verify", package)
    return package


QUESTIONS = [(f"{n} + {n}?", str(2 * n)) for n in range(40)]


def test_questions_become_a_task(verifier) -> None:
    task = math_task("sums", QUESTIONS, max_new_tokens=4, mistakes=0.25)
    assert task.verify("3 + 3?", "I think 6.0") == 1.0
    assert task.verify("3 + 3?", "7") == task.verify("3 + 3?", None) == 0.0  # type: ignore[arg-type]
    assert task.verify("3 + 3?", "") == 0.0
    with pytest.raises(ValueError, match="problem: found '1'; it is none of the 40"):
        task.verify("1", "1")
    rng = random.Random(0)
    problems = [task.draw(rng) for _ in range(800)]
    assert {task.split_of(p) for p in problems} == {"train"}
    right = sum(task.verify(p, task.demonstration(p, rng)) for p in problems) / 800
    assert right == pytest.approx(0.75 + 0.25 / 40, abs=4 * (0.19 / 800) ** 0.5)


def test_only_the_end_of_a_long_response_is_looked_at(verifier) -> None:
    task = math_task("sums", QUESTIONS, max_new_tokens=4)
    assert task.verify("3 + 3?", "9 " * 5000 + "6") == 1.0
    assert max(map(len, verifier.given)) == 2000


def test_outside_the_main_thread_the_reward_is_missing(verifier) -> None:
    import threading

    task, found = math_task("sums", QUESTIONS, max_new_tokens=4), []
    thread = threading.Thread(target=lambda: found.append(rate(task, "3 + 3?", "6")))
    thread.start()
    thread.join()
    reward, error = found[0]
    assert reward != reward
    assert "can only be stopped in the main thread" in error


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([], "problems: found none"),
        ([("a", "1"), ("a", "2")], "problems: found 'a' twice"),
        ([("a", "hello")], "problems: found the answer 'hello'; wanted mathematics"),
    ],
)
def test_bad_questions(problems, message: str, verifier) -> None:
    with pytest.raises(ValueError, match=message):
        math_task("m", problems, max_new_tokens=4)


# What the score of these data sets does with a response, so that they need exact=True, or more.
REFUSED = {
    "may run a response as python": {
        "binary_matrix", "countdown", "intermediate_integration", "n_queens",
        "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
        "string_insertion",
    },
    "scores any text as right": {"game_of_life_halting"},
    "no task is made of it": {"propositional_logic", "rubiks_cube"},
}  # fmt: skip
UNANSWERED = {"boxnet", "graph_color", "rush_hour"}  # no answer of their own
MIXED = "composite"  # of others: tested by itself
WRONG = ("", "nothing", "[]", "{}", "-7919", "1e999", "((((", "\u0663", "a, b\n7 = 7")


def made(name: str, **settings):
    """(task, the first problems of a data set)"""
    task = reasoning_gym_task(name, max_new_tokens=8, size=20, seed=1, **settings)
    rng = random.Random(0)
    return task, [task.problem(rng) for _ in range(3)]


def said(call, *arguments) -> str:
    """What the ValueError of a call says; nothing where it succeeds."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def test_every_data_set_of_reasoning_gym() -> None:
    """Its own answer scores in full, no wrong one does; or an error says why it is refused."""
    names = set(installed("reasoning_gym").factory.DATASETS)
    found: dict[str, set[str]] = {reason: set() for reason in REFUSED}
    wrong: list[tuple] = []
    unanswered = set()
    for name in sorted(names - {MIXED}):
        why = said(made, name)
        if why:
            assert why.startswith((f"exact: {name} ", f"name: {name} "))
            found[next(reason for reason in REFUSED if reason in why)].add(name)
        if "no task" in why:
            assert said(partial(made, name, exact=True)) == why
            continue
        task, problems = made(name, exact=bool(why))
        for problem in problems:
            none = said(task.solution, problem)
            if none:
                assert f"{name} gives no answer" in none
                unanswered.add(name)
            elif rate(task, problem, task.solution(problem)) != (1.0, None):
                wrong.append((name, problem, task.solution(problem)))
            for text in WRONG:
                reward, error = rate(task, problem, text)
                if reward >= 1 or (error is not None and not (none and why)):
                    wrong.append((name, problem, text, reward, error))
    assert not wrong
    assert found == REFUSED
    assert unanswered == UNANSWERED


def test_a_mixture_of_reasoning_gym() -> None:
    installed("reasoning_gym")
    from reasoning_gym.composite import DatasetSpec

    def mixture(*names: str) -> dict:
        return {"datasets": [DatasetSpec(name=name, weight=1, config={}) for name in names]}

    task, problems = made(MIXED, **mixture("gcd", "number_sorting"))
    for problem in problems:
        assert rate(task, problem, task.solution(problem)) == (1.0, None)
        assert rate(task, problem, "nothing") == (0.0, None)
    with pytest.raises(ValueError, match=r"exact: spiral_matrix .a part of composite. may run"):
        made(MIXED, **mixture("gcd", "spiral_matrix"))
    with pytest.raises(ValueError, match="settings: composite takes no such settings"):
        made(MIXED)


def test_reasoning_gym_evaluates_nothing(tmp_path) -> None:
    """By the interpreter's own account, of every data set: whatever is compiled, it reports."""
    installed("reasoning_gym")
    code = """if True:
        import json, random, sys
        import reasoning_gym
        from rlcore.tasks import rate
        from rlcore.tasks.reasoning_gym import reasoning_gym_task

        responses, compiled, tried = json.load(sys.stdin), [], 0

        def hook(event, arguments):
            if event == "compile" and any(m in repr(arguments[0]) for m in ("7919", "pathlib")):
                compiled.append((name, repr(arguments)[:200]))
            elif event in ("os.system", "subprocess.Popen"):
                compiled.append((name, event))

        tasks = {}
        for name in sorted(reasoning_gym.factory.DATASETS):
            for exact in (False, True):
                try:
                    task = reasoning_gym_task(
                        name, max_new_tokens=8, size=9, seed=1, exact=exact
                    )
                except ValueError:
                    continue
                tasks[name] = task, [task.problem(random.Random(i)) for i in range(2)]
                break
        sys.addaudithook(hook)
        name = "itself"
        eval("7919")
        for name, (task, problems) in tasks.items():
            for problem in problems:
                for response in responses:
                    rate(task, problem, response)
        json.dump((compiled, len(tasks)), open(sys.argv[1], "w"))  # some programs of codeio print
    """
    evil = EVIL.format(tmp_path / "seen")
    forms = (evil, f"[{evil}]", f'{{"a": {evil}}}', f"x = {evil}", f"lambda: {evil}", f"1, {evil}")
    forms += ("7919*7907", "[7919, 7907]", "(7919)", "x**7919", "A \u2228 7919", "7919/7907")
    line = [sys.executable, "-c", code, str(tmp_path / "found")]
    done = subprocess.run(line, input=json.dumps(forms), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled, tried = json.loads((tmp_path / "found").read_text())
    assert [name for name, _ in compiled] == ["itself"], compiled
    assert tried > 100
    assert not (tmp_path / "seen").exists()


HOSTILE = [
    EVIL,
    f"${EVIL}$",
    rf"\boxed{{{EVIL}}}",
    rf"The final answer is $\operatorname{{exec}}({EVIL})$. I hope",
    "9**9**9**9",  # not finished in the life of the universe
    r"$9^{9^{9^9}}$",
    r"\boxed{99999999!}",
    "(" * 1900 + "1" + "+1)" * 33,
    "1+" + "(" * 900 + "1" + ")" * 900,
    "$" + "(" * 900 + "1" + ")" * 900 + "$",
    "$" + "{" * 900 + "1" + "}" * 900 + "$",
    "7" * 1_000_000,
    "1 " * 1_000_000,
    r"\boxed{" * 300,
    "1+" * 900 + "1",
    "2/(1-1)",
    "1e999999999",
    "$1e999999999$",
    "\u0663+\u0664",  # digits too, but not of ours
    "\0",
]


def test_the_real_math_verify() -> None:
    installed("math_verify")
    problems = [("half?", r"\frac{1}{2}"), ("square?", "$x^2+2x+1$"), ("n?", "42"), ("pi?", "3.14")]
    task = math_task("m", problems, max_new_tokens=8)
    worth = {
        ("half?", "0.5"): 1.0,
        ("half?", "1/2"): 1.0,
        ("half?", "2**(-1)"): 1.0,
        ("half?", "50%"): 1.0,
        ("half?", r"so it is \boxed{\frac12}"): 1.0,
        ("half?", "2"): 0.0,
        ("square?", "$(x+1)^2$"): 1.0,
        ("n?", "the answer is 42."): 1.0,
        ("n?", "(6)*(7)"): 1.0,
        ("n?", "6*(5+4/2)"): 1.0,
        ("n?", "2 - -40"): 1.0,
        ("n?", "(6)*(8)"): 0.0,
        ("pi?", "314/100"): 1.0,
        ("n?", ""): 0.0,
    }
    for (problem, response), reward in worth.items():
        assert rate(task, problem, response) == (reward, None), response


def test_math_verify_evaluates_nothing_and_comes_back(tmp_path) -> None:
    """By the interpreter's own account: whatever is compiled, for eval and exec too, it reports."""
    installed("math_verify")
    code = """if True:
        import json, os, sys, time
        from rlcore.tasks import rate
        from rlcore.tasks.math_verify import arithmetic, math_task

        task = math_task("m", [("n?", "42")], max_new_tokens=8)
        compiled, found = [], []

        def hook(event, arguments):
            if event == "compile" and not os.path.exists(str(arguments[1])):
                compiled.append(repr(arguments)[:200])
            elif event in ("os.system", "subprocess.Popen"):
                compiled.append(event)

        sys.addaudithook(hook)
        eval("1")
        for response in json.load(sys.stdin):
            began = time.monotonic()
            reward = rate(task, "n?", response)
            found.append((reward, time.monotonic() - began))
        print(json.dumps((compiled, found)))
    """
    responses = [text.replace("{}", str(tmp_path / "seen")) for text in HOSTILE]
    responses += ["(6)*(7)", "$42$", "42.0"]
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(responses), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    compiled, found = json.loads(done.stdout)
    assert len(compiled) >= 1  # the hook works: it saw the `eval` that it was tried with
    # The others are sympy's own text, which multiplies monomials.
    assert all(text.startswith("(b'def monomial_") for text in compiled[1:]), compiled
    assert not (tmp_path / "seen").exists()
    for response, (reward, seconds) in zip(responses, found, strict=True):
        right = response in responses[-3:]
        assert reward == [float(right), None], response[:60]
        assert seconds < 60, response[:60]  # four and a little, on a machine with nothing to do


def test_a_limit_around_math_verify_still_holds_after_it() -> None:
    installed("math_verify")
    task = math_task("m", [("n?", "42")], max_new_tokens=8)

    def slow(problem: str, response: str) -> float:
        task.verify(problem, response)
        while True:
            pass

    stuck = replace(task, verify=slow, verifier_timeout=0.5)
    reward, error = rate(stuck, "n?", "42")
    assert reward != reward
    assert "no verdict in 0.5 s" in error


def test_sympy_is_as_it_was_outside_the_adapter() -> None:
    installed("math_verify")
    import sympy

    math_task("m", [("n?", "42")], max_new_tokens=8).verify("n?", "6*7")
    assert sympy.sympify("x + 2*3") == sympy.Symbol("x") + 6
    assert str(sympy.Number("2.5")) == "2.50000000000000"


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("-1.5", -1.5), ("1+2*3", 7), ("2**3**2", 512), ("-2**2", -4), ("2**-1", 0.5),
     ("(1+2)*-3", -9), ("8/4/2", 1), ("1 - 2 - 3", -4), ("- - 2+.5", 2.5), ("1e3", 1000)],
)  # fmt: skip
def test_plain_arithmetic_is_read_by_a_grammar(text: str, value: float) -> None:
    assert float(arithmetic(text).doit()) == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "1+", "(1", "1)", "2 3", "1//2", "a.b", "1;2", "(" * 2000, "-" * 200 + "1", "3(4)"],
)
def test_other_text_is_no_arithmetic(text: str) -> None:
    with pytest.raises(SyntaxError):
        arithmetic(text)


def test_arithmetic_computes_nothing() -> None:
    assert len(arithmetic("9**9**9**9").args) == 2
    with pytest.raises(SyntaxError, match="a number was wanted"):
        arithmetic("9**9", evaluate=True)
