"""Set up the environment of the book: a `.venv` beside this package, with the pinned packages.

Only the standard library is used here, since this runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed.sha256"
MINIMUM = (3, 11)
NEEDED_GB = 4.0


class SetupError(Exception):
    """The environment could not be made; the message says why and what to do."""


def venv_python() -> Path:
    """The interpreter inside `.venv` (Windows keeps it elsewhere)."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def inside_venv() -> bool:
    """Whether this very process runs in `.venv`."""
    return Path(sys.prefix).resolve() == VENV.resolve()


def wanted_stamp(version: str) -> str:
    """Hash of all that decides what is installed: the two files and the Python version."""
    digest = hashlib.sha256(version.encode())
    for name in ("requirements.txt", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def is_current() -> bool:
    """Whether `.venv` exists and holds what requirements.txt asks for now."""
    if not (STAMP.is_file() and venv_python().exists()):
        return False
    lines = STAMP.read_text().split()
    return len(lines) == 2 and lines[1] == wanted_stamp(lines[0])


def explain(output: str) -> str:
    """Turn the tail of pip's output into the cause and the remedy."""
    low = output.lower()
    if "no space left" in low or "errno 28" in low:
        return "The disk is full. Free a few GB and run the same command again."
    signs = "newconnectionerror|name resolution|network is unreachable|proxyerror|connecttimeout"
    signs += "|read timed out|getaddrinfo failed|connection refused|failed to establish"
    if re.search(signs, low):
        return (
            "The package index could not be reached. Check the network connection (behind a "
            "proxy: set HTTPS_PROXY), then run the same command again; what was downloaded is kept."
        )
    if "no matching distribution" in low or "could not find a version" in low:
        version = ".".join(map(str, sys.version_info[:2]))
        return (
            f"A pinned package has no build for Python {version} on this machine. The pins in "
            "requirements.txt are tested with Python 3.11: try that one."
        )
    return "pip failed; its last lines above say why."


def run_pip(*arguments: str, show: bool = True) -> None:
    """Run pip in `.venv`, show its output as it comes (or only if it fails), explain a failure."""
    command = [str(venv_python()), "-m", "pip", "--disable-pip-version-check", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
        cwd=ROOT,
    )
    assert process.stdout is not None
    tail: list[str] = []
    for line in process.stdout:
        tail = [*tail[-60:], line]
        if show and not line.startswith(("Requirement already satisfied", "Looking in")):
            print("  " + line.rstrip()[:160], flush=True)
    if process.wait() != 0:
        if not show:
            print("".join(tail))
        raise SetupError(explain("".join(tail)))


def create_venv() -> None:
    """Make an empty `.venv` from the interpreter that runs this."""
    if inside_venv():
        raise SetupError(f"{VENV} is damaged. Leave it (`deactivate`) and run the command again.")
    print(f"Making {VENV} with Python {sys.version.split()[0]}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        output = made.stdout + made.stderr
        if "ensurepip" in output:
            name = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            raise SetupError(f"This Python lacks its venv module. On Debian: apt install {name}")
        raise SetupError(f"python -m venv failed: {output.strip()[-400:]}")


def install() -> None:
    """Install the pins and this project into `.venv`, then leave the stamp."""
    free = shutil.disk_usage(ROOT).free / 1e9
    fresh = not venv_python().exists()
    if fresh and free < NEEDED_GB:
        raise SetupError(
            f"{free:.1f} GB are free on the disk of {ROOT}; about {NEEDED_GB:.0f} GB are needed "
            "(8 GB with the CUDA build of PyTorch)."
        )
    if fresh:
        create_venv()
    STAMP.unlink(missing_ok=True)
    print("Installing the pinned packages (a few minutes the first time)", flush=True)
    run_pip("install", "-r", "requirements.txt")
    run_pip("install", "--no-deps", "--no-build-isolation", "-e", ".", show=False)
    probe = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    version = subprocess.check_output([str(venv_python()), "-c", probe], text=True).strip()
    STAMP.write_text(f"{version}\n{wanted_stamp(version)}\n")


def check_python() -> None:
    """Refuse a Python that is too old, before anything else can fail on it."""
    if sys.version_info < MINIMUM:
        raise SetupError(
            f"Python {sys.version.split()[0]} is too old: this project needs Python "
            f"{MINIMUM[0]}.{MINIMUM[1]} or newer ({sys.executable})."
        )


def enter(arguments: list[str]) -> None:
    """Return inside a ready environment; else make it and start `python -m book` again in it.

    With FRTP_NO_VENV=1 the running interpreter is taken as it is (a container or a Conda
    environment in which requirements.txt and the project are installed already).
    """
    check_python()
    if os.environ.get("FRTP_NO_VENV", "") not in ("", "0"):
        return
    if not is_current():
        install()
    if inside_venv():
        return
    command = [str(venv_python()), "-m", "book", *arguments]
    os.environ["VIRTUAL_ENV"] = str(VENV)
    scripts = str(venv_python().parent)
    os.environ["PATH"] = scripts + os.pathsep + os.environ.get("PATH", "")
    sys.stdout.flush()
    if os.name == "nt":  # exec would return to the shell before the command ends
        sys.exit(subprocess.call(command, cwd=ROOT))
    os.chdir(ROOT)
    os.execv(command[0], command)
