"""Ctrl-C, a kernel's stop button, a cluster's SIGTERM: between two steps, never within one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether a signal asked the run to stop: the first is noted, the next raises at once.

    several: of several processes. There none raises: Ctrl-C reaches a process from the terminal and
    from torchrun as well, and torchrun kills what has not ended after 30 seconds.
    """

    def __init__(self, several: bool = False) -> None:
        self.several = several
        self.signals: list[int] = []
        self.holding = False

    def __call__(self) -> bool:
        return bool(self.signals)

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler. Raises KeyboardInterrupt from the second signal on, unless it is held."""
        self.signals.append(number)
        if len(self.signals) > 1 and not self.holding and not self.several:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on no signal raises: what is left is to write down what was done."""
        self.holding = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that a second signal does not break; it raises at the end of it."""
        before = len(self.signals)
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        if len(self.signals) > max(before, 1) and not self.several:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt(several: bool = False) -> Iterator[Stop]:
    """In the block, the first SIGINT or SIGTERM is only noted, see `Stop`.

    After a block that was left in order, a SIGTERM has its effect: the handler that was there is
    called; where it was the system's, SystemExit(143) is raised, as by a shell.
    Outside the main thread, and for a signal that is ignored, nothing is changed.
    """
    stop, handlers = Stop(several), {}
    try:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                signal.signal(number, stop.note)
                handlers[number] = before
    except ValueError:  # from signal.signal: not the main thread
        pass
    try:
        yield stop
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
    if signal.SIGTERM in stop.signals:
        before = handlers[signal.SIGTERM]
        if not callable(before):
            print("stopped by SIGTERM; what was done is kept", file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM)
        before(signal.SIGTERM, None)
