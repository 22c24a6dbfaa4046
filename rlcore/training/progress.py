"""A plain text progress bar with time to go and the numbers to watch."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """tqdm on stderr, in plain text also in a notebook: no widget that dies in a built page."""

    def __init__(self, title: str, steps: int, done: int, shown: bool) -> None:
        from tqdm import tqdm

        self.bar: Any = tqdm(
            total=steps,
            initial=done,
            desc=title,
            unit="step",
            file=sys.stderr,
            disable=not shown,
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def step(self, **numbers: float | None) -> None:
        """One step further; numbers that are None are not shown."""
        shown = {name: f"{value:.3g}" for name, value in numbers.items() if value is not None}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(1)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if not self.bar.disable:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()


def warn(text: str) -> None:
    """A line on stderr, above the bars that are shown there, and where none is."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)
