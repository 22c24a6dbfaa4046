"""TensorBoard beside the run folder's own logs, through accelerate's trackers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.files import unwritten

TRACKERS = ("tensorboard",)


def check_trackers(trackers: Sequence[str], out: Any) -> None:
    """ValueError for an unknown tracker, one that is not installed, and one without a folder."""
    if isinstance(trackers, str) or not all(name in TRACKERS for name in trackers):
        raise ValueError(f"trackers: found {trackers!r}; wanted some of {', '.join(TRACKERS)}")
    if trackers and out is None:
        raise ValueError(f"trackers: {trackers[0]} writes into the run folder; wanted out too")
    for name in trackers:
        lacking = [package for package in ("accelerate", name) if find_spec(package) is None]
        if lacking:
            raise ValueError(
                f"trackers: {lacking[0]} is not installed; pip install 'accelerate' '{name}'"
            )


class Trackers:
    """The curves of a run for `tensorboard --logdir FOLDER`.

    Metrics have their own names; those of another log its name before them, `evaluations/greedy`.
    A run that goes on writes its curves anew from its logs, so that no point is there twice.
    """

    def __init__(self, names: Sequence[str], folder: Path | None) -> None:
        self.names, self.folder, self.started = names, folder, []  # type: ignore[var-annotated]

    def begin(self, logs: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Start, with the rows that the logs have already."""
        if self.folder is None or not self.names:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        for name in self.names:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            tracker = LOGGER_TYPE_TO_CLASS[name](name, self.folder)
            self._safely(tracker.start)
            self.started.append(tracker)
        for log, rows in logs.items():
            self.log(log, rows)

    def log(self, log: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """The numbers of some rows of a log. Raises WriteError where there is no room."""
        before = "" if log == "metrics" else f"{log}/"
        for row in rows if self.started else ():
            numbers = {
                before + name: value
                for name, value in row.items()
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
            }
            for tracker in self.started:
                self._safely(tracker.log, numbers, step=row["step"])

    def finish(self) -> None:
        """Close the files."""
        while self.started:
            self._safely(self.started.pop().finish)

    def _safely(self, call: Any, *arguments: Any, **settings: Any) -> None:
        try:
            call(*arguments, **settings)
        except OSError as error:
            assert self.folder is not None
            raise unwritten("", self.folder / self.names[0], error) from error
