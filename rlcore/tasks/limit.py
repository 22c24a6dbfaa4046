"""A limit on the time of a function of somebody else's, such as a verifier."""

from __future__ import annotations

import contextvars
import ctypes
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class VerifierTimeout(Exception):
    """A verifier gave no verdict in time."""


class _Rang(BaseException):
    """Raised inside the function; no Exception, so `except Exception` there lets it through."""


Call = Callable[..., Any]


@contextmanager
def limited(seconds: float | None) -> Iterator[Call]:
    """In the block, `call(function, *arguments)` has so many seconds each time (None: no limit).

    It raises VerifierTimeout when they are over. In the main thread of a POSIX system by an alarm,
    which ends whatever Python runs or waits for. Elsewhere in a thread of its own, which is asked
    to end and left to itself. Neither ends one call into compiled code that does not come back to
    Python: what may do that needs a process of its own, as the code verifier has.
    """
    if seconds is None:
        yield lambda function, *arguments: function(*arguments)
    elif threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        with _alarm(seconds) as call:
            yield call
    else:
        yield lambda function, *arguments: _by_thread(seconds, function, arguments)


@contextmanager
def _alarm(seconds: float) -> Iterator[Call]:
    armed: list[bool] = []

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _Rang

    def call(function: Call, *arguments: Any) -> Any:
        try:
            try:
                armed.append(True)
                # It rings again each second, for what takes the first one for an error of its own.
                signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
                end = time.monotonic() + seconds
                found = function(*arguments)
            finally:
                armed.clear()
            if time.monotonic() > end:  # it swallowed what rang
                raise _Rang
        except _Rang:
            armed.clear()
            raise VerifierTimeout(f"no verdict in {seconds:g} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return found

    began, others = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        yield call
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if others[0]:  # somebody else's alarm goes on
            left = others[0] - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), others[1])


def _by_thread(seconds: float, function: Call, arguments: tuple[Any, ...]) -> Any:
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            answers.put((True, context.run(function, *arguments)))
        except _Rang:
            pass
        except BaseException as error:  # the caller's business, Ctrl-C too
            answers.put((False, error))

    thread = threading.Thread(target=work, daemon=True, name="verifier")
    thread.start()
    try:
        good, answer = answers.get(timeout=seconds)
    except queue.Empty:
        number = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(_Rang))
        raise VerifierTimeout(f"no verdict in {seconds:g} s") from None
    if not good:
        raise answer
    return answer
