"""Programs as answers: what is extracted, what is compared, and what is said where none can run."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore import models, training
from rlcore.tasks import FORMULA, CodeProblem, SandboxError, code_task, formula, rate, rate_all
from rlcore.tasks.code import CodeVerifier, equal, python_block
from rlcore.tasks.sandbox import Limits, Sandbox, check_platform

ROOT = Path(__file__).resolve().parents[2]
needs_sandbox = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

SQUARE = CodeProblem("Square x.", "f", (((2,), 4), ((-3,), 9)), "def f(x): return x * x")
WORDS = CodeProblem(
    "Count words.",
    "count",
    ((("a b a",), {"a": 2, "b": 1}), (("",), {})),
    "def count(text):\n    return {w: text.split().count(w) for w in text.split()}",
)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("def f(): pass", "def f(): pass"),
        ("", ""),
        ("So:\n```python\nx = 1\ny = 2\n```\nDone.", "x = 1\ny = 2"),
        ("```\nx\n```", "x"),
        ("```py\nx\n```\nNo, better:\n```Python\ny\n```", "y"),
        ("```python\nx\n```\n```bash\nrm\n```", "x"),
        ("```bash\nrm\n```", ""),
        ("~~~python\nx = '```'\n```\n~~~", "x = '```'\n```"),
        ("````python\n```\n````", "```"),
        ("```python\nx = 1", "x = 1"),  # cut by the limit
        ("  ```python\n  x\n  ```", "  x"),
        ("```python\n```", ""),
        ("use `f` and ```g```", "use `f` and ```g```"),
    ],
)
def test_the_program_in_a_response(response: str, program: str) -> None:
    assert python_block(response) == program


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (2, 2, True),
        (2.0, 2, True),
        (True, 1, False),
        (1, True, False),
        (0, False, False),
        (None, 0, False),
        ("2", 2, False),
        (2, "2", False),
        ([1, 2], (1, 2), True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": [1.0]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        ({}, [], False),
        ([[True]], [[1]], False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_values_are_compared_as_data(found, wanted, same: bool) -> None:
    assert equal(found, wanted) is same


def test_numbers_are_equal_up_to_a_tolerance() -> None:
    assert equal([0.1 + 0.2, 1e-9], [0.3, 0], tolerance=1e-6)
    assert not equal(1.1, 1.0, tolerance=1e-6)
    assert not equal(True, 1.0, tolerance=0.5)
    assert not equal(10**400, 1.0, tolerance=1e-6)


@pytest.fixture(scope="module")
def box():
    sandbox = Sandbox(Limits(seconds=1))
    yield sandbox
    sandbox.close()


@needs_sandbox
class TestVerifier:
    def test_problems_become_a_task(self, box) -> None:
        task = code_task("two", [SQUARE, WORDS], max_new_tokens=99, sandbox=box)
        assert task.verify("Square x.", "```python\ndef f(x): return x ** 2\n```") == 1.0
        assert task.verify("Square x.", "def f(x): return 2 * x") == 0.0
        assert task.verify("Square x.", "4") == task.verify("Square x.", None) == 0.0
        assert task.verify("Count words.", task.solution("Count words.")) == 1.0
        with pytest.raises(ValueError, match=r"problem: found 'Cube x.'; it is none of the 2"):
            task.verify("Cube x.", "")

    def test_all_or_share(self, box) -> None:
        half = "def f(x): return 2 * x"
        worth = {"all": 0.0, "share": 0.5}
        for reward, wanted in worth.items():
            task = code_task("one", [SQUARE], max_new_tokens=9, reward=reward, sandbox=box)
            assert task.verify("Square x.", half) == wanted
            # What it passed before it left counts, and what it writes besides does not.
            leaves = "import os\ndef f(x):\n if x < 0: os._exit(0)\n return 4"
            assert task.verify("Square x.", leaves) == wanted
            more = "import os\nos.write(3, b'[true, 0]\\n' * 9)\ndef f(x): return x * x"
            assert task.verify("Square x.", more) == 0.0

    def test_a_response_that_does_not_end_is_wrong_and_named(self, box) -> None:
        task = code_task("one", [SQUARE], max_new_tokens=9, sandbox=box)
        responses = ["while True: pass", "def f(x): return x * x", "import os\nos._exit(3)"]
        assert rate_all(task, ["Square x."] * 3, responses) == [
            (0.0, "it used up its 1 seconds of processor time"),
            (1.0, None),
            (0.0, "it left with exit status 3"),
        ]
        assert rate(task, "Square x.", responses[2]) == (0.0, "it left with exit status 3")

    def test_claims_of_success_are_worth_nothing(self, box) -> None:
        task = code_task("one", [SQUARE], max_new_tokens=9, sandbox=box)
        liar = "class A:\n def __eq__(self, o): return True\n def __bool__(self): return True\n"
        for response in (
            liar + "def f(x): return A()",
            "print('passed')\ndef f(x): return 'passed'",
            "def f(x): return True",
            "import sys\nsys.exit(0)",
            "def f(x): return [4, 9]",
            "f = 'x * x'",
        ):
            assert task.verify("Square x.", response) == 0.0, response

    def test_the_same_program_is_run_once(self, box, monkeypatch) -> None:
        ran: list[str] = []
        run = Sandbox.run
        monkeypatch.setattr(
            Sandbox, "run", lambda self, p: ran.extend(one.source for one in p) or run(self, p)
        )
        verify = code_task("one", [SQUARE], max_new_tokens=9, sandbox=box).verify
        assert ran == [SQUARE.solution]
        verify.many(["Square x."] * 5, ["a", "a", "b", SQUARE.solution, "a"])
        assert ran == [SQUARE.solution, "a", "b"]

    def test_a_solution_that_fails_its_own_tests(self, box) -> None:
        wrong = replace(SQUARE, solution="def f(x): return 2 * x")
        with pytest.raises(ValueError, match=r"the solution of 'Square x.' fails its tests"):
            code_task("one", [wrong], max_new_tokens=9, sandbox=box)
        loops = replace(SQUARE, solution="while True: pass")
        with pytest.raises(ValueError, match=r"fails its tests \(it used up its 1 seconds"):
            code_task("one", [loops], max_new_tokens=9, sandbox=box)

    def test_demonstrations_with_mistakes(self, box) -> None:
        task = code_task("two", [SQUARE, WORDS], max_new_tokens=9, mistakes=0.5, sandbox=box)
        rng = random.Random(0)
        right = [task.demonstration("Square x.", rng) == SQUARE.solution for _ in range(400)]
        assert sum(right) / 400 == pytest.approx(0.75, abs=4 * (0.19 / 400) ** 0.5)

    def test_a_run_counts_what_does_not_end_as_wrong(self, box) -> None:
        """And lists it; a reward that is missing would leave such a response unpunished."""
        task = replace(
            FORMULA,
            verify=CodeVerifier(
                FORMULA.verify.tests, lambda response: "import os\nos._exit(3)", sandbox=box
            ),
        )
        tokenizer = models.build_tokenizer(task.symbols)
        run = training.train_policy(
            models.build_model("nano", tokenizer, seed=0),
            tokenizer,
            task,
            training.row("grpo"),
            steps=1,
            prompts_per_step=2,
            group_size=2,
            learning_rate=1e-3,
            seed=0,
            progress=False,
        )
        (step,) = run.metrics
        assert (step["reward"], step["missing_rewards"], step["verifier_errors"]) == (0.0, 0, 4)
        assert {row["error"] for row in run.errors} == {"it left with exit status 3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problems": []}, "problems: found none"),
        (
            {"problems": [SQUARE, replace(SQUARE, function="g")]},
            "problems: found 'Square x.' twice",
        ),
        ({"mistakes": 2}, "mistakes: found 2"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
        ({"reward": "half"}, "reward: found 'half'; wanted one of all, share"),
        ({"tolerance": -1}, "tolerance: found -1"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code_task(**{"name": "c", "problems": [SQUARE], "max_new_tokens": 9, **change})


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ((), "tests: found none for 'q'"),
        ((3,), "tests: found 3; wanted .arguments, value."),
        (((1, 2),), "wanted .arguments, value."),
        ((((1,), {1, 2}),), "wanted plain data"),
        ((((1,), math.nan),), "wanted plain data"),
        ((((1,), {1: 2}),), "wanted plain data"),
        (((([1], object()), 1),), "wanted plain data"),
    ],
)
def test_bad_tests(tests, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeProblem("q", "f", tests, "")


# --- where no program can be run ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("sys.platform", "darwin", "needs Linux's seccomp filters; this is darwin"),
        ("sys.platform", "win32", "needs Linux's seccomp filters; this is win32"),
        ("platform.machine", lambda: "riscv64", "x86_64 and aarch64; this is riscv64"),
    ],
)
def test_a_system_without_protection_is_an_error(target, value, message, monkeypatch) -> None:
    """And no reward is missing or 0 for it: a run stops."""
    if target != "sys.platform":
        monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(target, value)
    with pytest.raises(SandboxError, match=message):
        check_platform()
    fresh = CodeVerifier(FORMULA.verify.tests, FORMULA.verify.program, sandbox=Sandbox())
    with pytest.raises(SandboxError, match=message):
        rate(replace(FORMULA, verify=fresh), "+3*2-4*5=", "x")


@needs_sandbox
def test_an_old_kernel_is_an_error(monkeypatch) -> None:
    monkeypatch.delattr("os.pidfd_open")
    with pytest.raises(SandboxError, match=r"needs os.pidfd_open: Linux 5.3"):
        check_platform()


def test_the_tasks_can_be_imported_without_any_of_it() -> None:
    """On Windows there is no `resource`, and nothing to run programs with."""
    code = (
        "import sys\nsys.modules['resource'] = None\nsys.platform = 'win32'\n"
        "from rlcore.tasks import FORMULA, SandboxError, rate\n"
        "assert FORMULA.solution('+3*2-4*5=') == '((x+3)*2-4)*5'\n"
        "try: rate(FORMULA, '+3*2-4*5=', 'x')\nexcept SandboxError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("the sandbox needs Linux's seccomp filters; this is win32")


# --- the task of expressions --------------------------------------------------------------------


@needs_sandbox
def test_every_expression_of_the_same_values_is_right() -> None:
    worth = {
        "((x+3)*2-4)*5": 1.0,
        "5*(2*(x+3)-4)": 1.0,
        "x*10+10": 1.0,
        "10*x+10 ": 1.0,
        "(x+1)*10\n    x": 1.0,
        "x*10+10.0": 1.0,
        "x+3*2-4*5": 0.0,
        "((x+3)*2-4)": 0.0,
        "((x+3)*2-4)*": 0.0,
        "": 0.0,
        "x(3)": 0.0,
        "x>0": 0.0,
        "20": 0.0,
    }
    for response, reward in worth.items():
        assert rate(FORMULA, "+3*2-4*5=", response) == (reward, None), response


def test_demonstrations_of_formula_follow_the_mixture(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(formula, "demonstrate", lambda problem, kind, rng: kind)
        rng, n = random.Random(0), 4000
        counts = Counter(FORMULA.demonstration("+3*2-4*5=", rng) for _ in range(n))
    for kind, share in formula.MIXED.items():
        assert counts[kind] / n == pytest.approx(share, abs=4 * (0.25 / n) ** 0.5)
    written = {kind: formula.demonstrate("+3*2-4*5=", kind, rng) for kind in formula.MIXED}
    assert written.pop("one step short") in {
        "(x*2-4)*5",
        "(x+3-4)*5",
        "(x+3)*2*5",
        "(x+3)*2-4",
    }
    assert written == {
        "right": "((x+3)*2-4)*5",
        "no parentheses": "x+3*2-4*5",
        "reversed": "(x*5-4)*2+3",
    }


def test_what_the_steps_mean() -> None:
    assert formula.value("+3*2-4*5=", 5) == 60
    assert formula.value("*2-3*9+2=", -1) == -43
    rng = random.Random(0)
    for _ in range(300):
        problem = FORMULA.draw(rng)
        for x in (-4, 0, 3):
            assert eval(formula.solution(problem), {"x": x}) == formula.value(problem, x)
        flat = formula.demonstrate(problem, "no parentheses", rng)
        assert any(eval(flat, {"x": x}) != formula.value(problem, x) for x in formula.TESTS)
    with pytest.raises(ValueError, match="kind: found 'x'"):
        formula.demonstrate("+3*2-4*5=", "x", rng)
