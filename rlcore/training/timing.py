"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Seconds on the clock by part of the work, since they were last taken."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block in."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """The parts so far, to the microsecond; counting starts anew."""
        parts, self.parts = self.parts, {}
        return {name: round(seconds, 6) for name, seconds in parts.items()}
