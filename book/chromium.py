"""Find a Chromium for the browser tests, or install one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def find() -> str | None:
    """Path of a browser that starts: BOOK_CHROMIUM, one on the PATH, or Playwright's own."""
    chosen = os.environ.get("BOOK_CHROMIUM")
    for path in [chosen] if chosen else [*map(shutil.which, NAMES), *PLACES]:
        if path and Path(path).exists() and _starts(path):
            return path
    own = None if chosen else _playwrights_own()
    return own if own and Path(own).exists() else None


def _starts(path: str) -> bool:
    """Whether it answers (on some systems the command is an empty shell of a package)."""
    if os.name == "nt":
        return True  # there --version opens a window
    try:
        run = subprocess.run([path, "--version"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0


def _playwrights_own() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return playwright.chromium.executable_path


def install() -> str:
    """Install a Chromium: from the system's packages where that is possible, else Playwright's.

    Raises RuntimeError that says what to do when neither works.
    """
    apt = shutil.which("apt-get")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    sudo = [] if root else ["sudo", "-n"]
    if apt and _is_debian() and (root or _may_sudo()):
        options = ["-y", "-q", "--no-install-recommends"]
        _run([*sudo, apt, "update", "-q"])
        _run([*sudo, apt, "install", *options, "chromium", "fonts-dejavu-core"])
    if not find():
        command = [sys.executable, "-m", "playwright", "install", "chromium"]
        _run([*command, "--with-deps"] if apt and root else command)
    path = find()
    if path is None:
        raise RuntimeError(
            "No Chromium was found and none could be installed. Install Chromium or Chrome, or set "
            "BOOK_CHROMIUM to the path of one, and run the command again."
        )
    return path


def _is_debian() -> bool:
    """Debian itself: on Ubuntu the package `chromium` is an empty shell for a snap."""
    release = Path("/etc/os-release")
    return release.is_file() and "ID=debian" in release.read_text().splitlines()


def _may_sudo() -> bool:
    if not shutil.which("sudo"):
        return False
    return subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    print("  " + " ".join(command), flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL)
