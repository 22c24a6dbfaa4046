"""A verifier that hangs is stopped, wherever it is called."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlcore.tasks import SORT, VerifierTimeout, limit, rate, rate_each

SHORT = 0.3


def limited(seconds: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
    with limit.limited(seconds) as call:
        return call(function, *arguments)


def busy() -> None:
    while True:
        pass


def sleeps() -> None:
    time.sleep(3600)


def waits() -> None:
    threading.Event().wait(3600)


def swallows() -> None:
    while True:
        try:
            busy()
        except Exception:
            continue


def backtracks() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


def calls_a_program() -> None:
    import subprocess

    subprocess.run(["sleep", "3600"], check=True)


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


posix = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")


@posix
@pytest.mark.parametrize("hangs", [busy, sleeps, waits, swallows, backtracks, calls_a_program])
def test_a_hang_in_the_main_thread(hangs) -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(VerifierTimeout, match=r"no verdict in 0\.3 s"):
        limited(SHORT, hangs)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer[0] > 0)


@pytest.mark.parametrize("hangs", [busy, swallows])
def test_a_hang_in_another_thread(hangs) -> None:
    before = threading.active_count()
    found = in_a_thread(lambda: limited(SHORT, hangs))
    assert isinstance(found, VerifierTimeout)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before  # what runs Python is ended


def test_one_that_waits_in_another_thread_is_left_alone() -> None:
    free = threading.Event()
    found = in_a_thread(lambda: limited(SHORT, free.wait))
    assert isinstance(found, VerifierTimeout)
    free.set()


@posix
def test_somebody_elses_alarm_goes_on() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 2 * SHORT)
    try:
        with pytest.raises(VerifierTimeout):
            limited(SHORT, busy)
        assert limited(60, lambda: 3) == 3
        assert rang == []
        deadline = time.monotonic() + 60
        while not rang and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rang == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("where", ["main", "thread"])
def test_what_comes_in_time_comes_through(where: str) -> None:
    def stops() -> None:
        raise KeyboardInterrupt

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        work = lambda: limited(60, function, *arguments)  # noqa: E731
        return in_a_thread(work) if where == "thread" else work()

    assert call(lambda a, b: a + b, 1, 2) == 3
    if where == "main":
        with pytest.raises(KeyboardInterrupt):
            call(stops)
        with pytest.raises(ZeroDivisionError):
            call(lambda: 1 / 0)
    else:
        assert isinstance(call(stops), KeyboardInterrupt)
        assert isinstance(call(lambda: 1 / 0), ZeroDivisionError)


def test_no_limit() -> None:
    assert limited(None, lambda: threading.current_thread()) is threading.current_thread()


@posix
def test_an_interrupt_breaks_a_hang() -> None:
    """Ctrl-C is not kept waiting until the limit."""
    timer = threading.Timer(SHORT, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        limited(3600, busy)
    timer.join()


def test_a_verifier_that_hangs_leaves_its_reward_missing() -> None:
    task = replace(SORT, verify=lambda p, r: busy() if r == "x" else 1.0, verifier_timeout=SHORT)
    reward, error = rate(task, "312>", "x")
    assert math.isnan(reward)
    assert error == "VerifierTimeout: no verdict in 0.3 s"
    assert rate(task, "312>", "y") == (1.0, None)


def test_several_rewards_that_hang_are_missing() -> None:
    task = replace(
        SORT, rewards=lambda p, r: busy(), reward_names=("a", "b"), verifier_timeout=SHORT
    )
    rewards, error = rate_each(task, "312>", "x")
    assert all(map(math.isnan, rewards))
    assert error == "VerifierTimeout: no verdict in 0.3 s"


@pytest.mark.parametrize("found", [0, -1.0, math.inf, True, "long"])
def test_bad_limits(found) -> None:
    with pytest.raises(ValueError, match="verifier_timeout: found"):
        replace(SORT, verifier_timeout=found)


def test_who_swallows_the_alarm_and_answers_late_is_late() -> None:
    def stubborn() -> float:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                busy_until(end)
            except BaseException:
                continue
        return 1.0

    def busy_until(end: float) -> None:
        while time.monotonic() < end:
            pass

    with pytest.raises(VerifierTimeout, match=r"no verdict in 0.1 s"):
        limited(0.1, stubborn)
    assert limited(10.0, stubborn) == 1.0
