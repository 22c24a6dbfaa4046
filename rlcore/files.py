"""Files that are written whole or not at all, and logs of whole lines.

What is promised. When the process dies at any moment (SIGKILL, out of memory), a reader finds the
old file or the new one, and complete lines in a log but for the last. When the power fails, the
same of files written by `write_whole`: the content is on the disk before the name points to it, and
the name is there when the call returns. A log is on the disk when `sync` returns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rlcore.checks import brief


class WriteError(OSError):
    """A file of a run could not be written; the message names it, and `errno` is the system's.

    run: the `Run` that it stopped, as far as it came; the model is as trained so far.
    """

    def __init__(self, message: str, cause: BaseException | None = None, run: Any = None) -> None:
        super().__init__(message)
        reason = system_error(cause)
        self.errno = None if reason is None else reason.errno
        self.run = run


def system_error(error: BaseException | None) -> OSError | None:
    """The OSError behind an error, such as the one that torch hides in a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def unwritten(what: str, path: Path, error: Exception) -> WriteError:
    """The error that says which file could not be written, and why."""
    reason = system_error(error)
    why = brief(error) if reason is None or reason.strerror is None else reason.strerror
    return WriteError(f"{what}{path} could not be written: {why}", error)


def write_whole(path: Path, write: Callable[[IO[bytes]], Any], what: str = "") -> None:
    """Let `write` fill a new file, then put it in the place of an old one of that name.

    Raises WriteError naming the file where it cannot be written; the old one is then still there.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise unwritten(what, path, error) from error


def append(path: Path, text: str) -> None:
    """Add `text` to a log, all of it or nothing. Raises WriteError naming the log."""
    try:
        with open(path, "ab", buffering=0) as file:
            start, rest = file.tell(), memoryview(text.encode())
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except BaseException:
                with contextlib.suppress(OSError):  # what is no file has no end to cut
                    os.ftruncate(file.fileno(), start)
                raise
    except OSError as error:
        raise unwritten("", path, error) from error


def sync(path: Path) -> None:
    """Return when the file is on the disk. Raises WriteError naming it."""
    try:
        with open(path, "rb+") as file:  # Windows syncs what is open for writing
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritten("", path, error) from error


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk; a system that cannot say so is passed."""
    if os.name != "posix":  # Windows opens no folder
        return
    number = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems know no such thing
            os.fsync(number)
    finally:
        os.close(number)
