"""Ctrl-C, or a kernel's stop button, between two steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """The first SIGINT in the block only makes the yielded function true; the next one raises.

    Outside the main thread, and where SIGINT is ignored, nothing is changed.
    """
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = signal.getsignal(signal.SIGINT)
        if before in (signal.SIG_IGN, None):
            raise ValueError
        signal.signal(signal.SIGINT, note)
    except ValueError:  # from signal.signal: not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
