"""Where the browser of the tests comes from."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from book import chromium


@pytest.fixture
def machine(monkeypatch):
    """A machine without a browser; the commands that would install one are recorded instead."""
    commands: list[list[str]] = []
    found: list[str | None] = [None]
    monkeypatch.setattr(chromium, "find", lambda: found[0])
    monkeypatch.setattr(chromium, "_run", commands.append)
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(chromium, "_is_debian", lambda: True)
    return commands, found


def test_debian_s_own_package_comes_first(machine, monkeypatch):
    commands, found = machine

    def run(command):
        commands.append(command)
        if "install" in command:
            found[0] = "/usr/bin/chromium"

    monkeypatch.setattr(chromium, "_run", run)
    assert chromium.install() == "/usr/bin/chromium"
    assert [command[1] for command in commands] == ["update", "install"]
    assert "chromium" in commands[1]


@pytest.mark.parametrize(("debian", "root"), [(False, True), (True, False)])
def test_elsewhere_playwright_brings_one(machine, monkeypatch, debian, root):
    commands, found = machine
    monkeypatch.setattr(chromium, "_is_debian", lambda: debian)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000, raising=False)
    monkeypatch.setattr(chromium, "_may_sudo", lambda: False)

    def run(command):
        commands.append(command)
        found[0] = "/home/me/chromium"

    monkeypatch.setattr(chromium, "_run", run)
    assert chromium.install() == "/home/me/chromium"
    assert commands[0][:5] == [sys.executable, "-m", "playwright", "install", "chromium"]
    assert ("--with-deps" in commands[0]) is root


def test_when_nothing_works_it_says_what_to_do(machine):
    with pytest.raises(RuntimeError, match="set BOOK_CHROMIUM"):
        chromium.install()


def test_a_browser_of_one_s_own_choice(tmp_path, monkeypatch):
    path = tmp_path / "browser"
    path.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("BOOK_CHROMIUM", str(path))
    assert chromium.find() == str(path)
    path.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")  # a shell of a package: no browser
    assert chromium.find() is None
