"""`python -m book test`: which steps it has, and what its exit status and last line say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from book import test as command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch):
    """run(arguments, broken) -> (status, the calls of pytest); nothing is really called."""
    monkeypatch.setattr(command.chromium, "find", lambda: "chromium")

    def play(arguments: list[str], broken: tuple[str, ...] = (), status: int = 3):
        calls = []

        def call(line: list[str], **_) -> int:
            calls.append(line[2:])
            return status if any(word in line for word in broken) else 0

        monkeypatch.setattr(command.subprocess, "call", call)
        return command.main(arguments), [line[1:] for line in calls if line[0] == "pytest"]

    return play


def test_parity_with_trl_is_a_step_of_its_own(run, capsys):
    status, (everything, parity) = run([])
    assert status == 0
    assert everything[-3:] == [*(f"--ignore={file}" for file in command.TRL), "tests"]
    assert parity == [*command.TRL]
    assert all((ROOT / file).is_file() for file in command.TRL)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("== ")] == [
        "== ruff (lint)",
        "== ruff (format)",
        "== mypy (types)",
        "== pytest",
        "== parity with TRL",
    ]


def test_help_runs_nothing(run, capsys):
    assert run(["--help"]) == (0, [])
    assert capsys.readouterr().out.startswith("`python -m book test`")


def test_arguments_are_the_only_call_of_pytest(run):
    _, calls = run(["tests/objectives", "-k", "float16"])
    assert calls == [[*command.PARALLEL, "tests/objectives", "-k", "float16"]]


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("mypy", "mypy (types)"),
        ("tests", "pytest"),
        (command.TRL[0], "parity with TRL"),
    ],
)
def test_a_failed_step_fails_the_run_and_is_named(run, capsys, broken, named):
    status, _ = run([], broken=(broken,))
    assert status == 3
    assert capsys.readouterr().err == f"failed: {named}\n"


def test_parity_that_finds_no_test_is_a_failure_unless_trl_is_missing(run, monkeypatch):
    assert run([], broken=command.TRL, status=command.NO_TESTS)[0] == command.NO_TESTS
    monkeypatch.setitem(sys.modules, "trl", None)
    assert run([], broken=command.TRL, status=command.NO_TESTS)[0] == 0
    assert run([], broken=command.TRL, status=1)[0] == 1
    assert run([], broken=("tests",), status=command.NO_TESTS)[0] == command.NO_TESTS


def test_without_trl_pytest_says_why_in_one_line_each():
    code = (
        "import sys, pytest; sys.modules['trl'] = None; "
        f"sys.exit(pytest.main(['-p', 'no:cacheprovider', *{command.TRL!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == command.NO_TESTS, done.stdout
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 2, done.stdout
    for reason, missing in zip(reasons, ("parity with", "training in"), strict=True):
        assert f"no {missing} TRL: it is not installed; `pip install '.[trl]'`" in reason
