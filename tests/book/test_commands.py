"""The commands around the book: set-up, help, server, tidy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from book import bootstrap, serve, tidy
from book.__main__ import COMMANDS
from book.__main__ import main as run

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "book", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_help_lists_every_command_without_any_package(tmp_path):
    """On a bare machine nothing is installed: -S hides the packages, -I the environment."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from book.__main__ import main; "
    line = [sys.executable, "-I", "-S", "-c", code + "sys.exit(main(['help']))"]
    result = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


def test_an_unknown_command_lists_the_known_ones(capsys):
    assert run(["bulid"]) == 2
    message = capsys.readouterr().err
    assert "'bulid'" in message
    assert "build" in message


def test_every_make_target_is_a_line_over_the_command():
    lines = (ROOT / "Makefile").read_text("utf-8").splitlines()
    targets = {line[:-1] for line in lines if line.endswith(":") and not line.startswith("\t")}
    assert targets == set(COMMANDS) - {"build"}
    for line in lines:
        if line.startswith("\t@$"):
            assert line.startswith("\t@$(PYTHON) -m book ")


def test_the_machine_runs_the_readme_s_command():
    assert "exec make test" in (ROOT / ".ci" / "run").read_text("utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_pins_are_exact_and_name_no_place():
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 100
    for pin in pins:
        assert "==" in pin
        assert "@" not in pin
        assert "/" not in pin
        assert "+" not in pin.split(";")[0]


# ---- set-up


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A project of its own with empty requirements, to be set up from nothing."""
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements.txt").write_text("# nothing\n", encoding="utf-8")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / ".venv" / "installed.sha256")
    monkeypatch.delenv("FRTP_NO_VENV", raising=False)
    return tmp_path


def test_set_up_installs_once_and_again_when_a_pin_moves(bare, monkeypatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "run_pip", lambda *args, show=True: calls.append(args))
    monkeypatch.setattr(bootstrap, "inside_venv", lambda: False)
    entered: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, line: entered.append(line))
    monkeypatch.setattr(os, "chdir", lambda path: None)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("VIRTUAL_ENV", "")
    bootstrap.enter(["build"])
    assert bootstrap.venv_python().exists()
    assert len(calls) == 2
    bootstrap.enter(["build"])
    assert len(calls) == 2  # nothing to do
    assert entered[-1] == [str(bootstrap.venv_python()), "-m", "book", "build"]
    (bare / "requirements.txt").write_text("tqdm==4.0\n", encoding="utf-8")
    bootstrap.enter(["build"])
    assert len(calls) == 4


def test_a_set_up_that_fails_is_tried_again(bare, monkeypatch):
    def fail(*args, show=True):
        raise bootstrap.SetupError("no")

    monkeypatch.setattr(bootstrap, "inside_venv", lambda: False)
    monkeypatch.setattr(bootstrap, "run_pip", fail)
    for _ in range(2):
        with pytest.raises(bootstrap.SetupError):
            bootstrap.enter(["build"])
        assert not bootstrap.is_current()


def test_an_environment_of_one_s_own_is_taken_as_it_is(bare, monkeypatch):
    monkeypatch.setenv("FRTP_NO_VENV", "1")
    monkeypatch.setattr(bootstrap, "install", lambda: pytest.fail("installed"))
    bootstrap.enter(["build"])


def test_an_old_python_is_refused(bare, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(bootstrap.SetupError, match=r"needs Python 3\.11 or newer"):
        bootstrap.enter(["build"])


def test_a_full_disk_is_said_before_anything_is_made(bare, monkeypatch):
    usage = shutil.disk_usage(bare)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(bootstrap.SetupError, match=r"1\.0 GB are free .* about 4 GB are needed"):
        bootstrap.enter(["build"])
    assert not (bare / ".venv").exists()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError: Failed to establish a new connection", "could not be reached"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no build for Python"),
        ("something else", "last lines above"),
    ],
)
def test_a_failure_of_pip_is_explained(output, reason):
    assert reason in bootstrap.explain(output)


def test_pip_s_exit_status_counts(bare, monkeypatch):
    """A real pip that cannot reach any index: the error is ours, in one sentence."""
    monkeypatch.setattr(bootstrap, "venv_python", lambda: Path(sys.executable))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(bootstrap.SetupError, match="could not be reached"):
        bootstrap.run_pip("download", "--retries", "1", "no-such-package-xyz", show=False)


# ---- serve


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "index.html").write_text("<p>the book", encoding="utf-8")
    return tmp_path


def test_serve_answers_on_this_machine_only(folder):
    server = serve.start(folder, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/index.html") as answer:
            assert answer.read() == b"<p>the book"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_serve_says_that_the_port_is_in_use(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.main(["--folder", str(folder), "--port", str(port)]) == 1
    message = capsys.readouterr().err
    assert f"port {port} cannot be used" in message
    assert "serve --port" in message


def test_serve_wants_a_built_book(tmp_path, capsys):
    assert serve.main(["--folder", str(tmp_path)]) == 1
    assert "python -m book build" in capsys.readouterr().err


# ---- the chapters' own form


@pytest.mark.parametrize("path", tidy.chapters(), ids=lambda path: path.name)
def test_a_round_trip_through_jupytext_changes_nothing(path):
    assert tidy.saved_form(path) == path.read_text("utf-8")


def test_there_is_a_chapter():
    assert ROOT / "chapters" / "11-grpo.md" in tidy.chapters()


def test_clean_keeps_the_grades_unless_told(tmp_path, monkeypatch) -> None:
    from book import __main__ as commands

    def make() -> None:
        for name in ("html/index.html", "grades/scores.csv", ".lock"):
            path = tmp_path / "build" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")

    monkeypatch.setattr(commands.bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(commands.bootstrap, "VENV", tmp_path / ".venv")
    make()
    commands.clean([])
    kept = [path.name for path in (tmp_path / "build").iterdir()]
    assert kept == ["grades"]
    make()
    commands.clean(["--all"])
    assert not (tmp_path / "build").exists()
