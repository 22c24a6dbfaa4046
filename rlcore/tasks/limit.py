"""A limit on the time of a function of somebody else's, such as a verifier."""

from __future__ import annotations

import contextvars
import ctypes
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


class VerifierTimeout(Exception):
    """A verifier gave no verdict in time."""


class _Rang(BaseException):
    """Raised inside the function; no Exception, so `except Exception` there lets it through."""


def limited(seconds: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`; VerifierTimeout when it takes more than `seconds` (None: no limit).

    In the main thread of a POSIX system by an alarm, which ends whatever Python runs or waits for.
    Elsewhere in a thread of its own, which is asked to end and left to itself. Neither ends one
    call into compiled code that does not come back to Python: what may do that needs a process of
    its own, as the code verifier has.
    """
    if seconds is None:
        return function(*arguments)
    main = threading.current_thread() is threading.main_thread()
    call = _by_alarm if main and hasattr(signal, "setitimer") else _by_thread
    return call(seconds, function, arguments)


def _late(seconds: float) -> VerifierTimeout:
    return VerifierTimeout(f"no verdict in {seconds:g} s")


def _by_alarm(seconds: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    armed = [True]

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _Rang

    handler, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    # It rings again each second, for a function that takes the first one for an error of its own.
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            return function(*arguments)
        finally:
            armed.clear()
    except _Rang:
        armed.clear()
        raise _late(seconds) from None
    finally:
        if left:  # somebody else's alarm goes on
            left = max(left - (time.monotonic() - began), 1e-6)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)


def _by_thread(seconds: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
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
        raise _late(seconds) from None
    if not good:
        raise answer
    return answer
