"""A folder that one run writes: the system's lock on a file in it, which ends with the process.

The file `.lock` is empty and stays; what counts is the lock on it. That of a killed process is gone
with it, and is not kept by the processes that it forked. Readers ask for none.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

NAME = ".lock"
BUSY = (errno.EACCES, errno.EAGAIN)  # which of the two depends on the system
_OPEN: set[int] = set()  # the files that this process has locked


class Lock:
    """The hold on a folder, from `hold`; number is the open file, None where there is no lock."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        if number is not None:
            _OPEN.add(number)

    def release(self) -> None:
        """Let go of the folder."""
        if self.number in _OPEN:
            _OPEN.remove(self.number)
            os.close(self.number)


def hold(folder: str | os.PathLike[str]) -> Lock | None:
    """Lock a folder that exists, or None where another run holds it, of this process or another.

    Where no file can be opened in it, or its file system knows no locks, none is held and nothing
    is refused: in the first case writing fails by itself.
    """
    for flags in (os.O_RDONLY, os.O_RDWR):  # NFS locks only what is open for writing
        try:
            number = os.open(Path(folder) / NAME, flags | os.O_CREAT, 0o666)
        except OSError:
            break
        try:
            _lock(number)
        except OSError as error:
            os.close(number)
            if error.errno in BUSY:
                return None
        else:
            return Lock(number)
    return Lock(None)


def is_held(folder: str | os.PathLike[str]) -> bool:
    """Whether a run holds the folder; in one that was never locked nothing is written."""
    if not (Path(folder) / NAME).exists():
        return False
    lock = hold(folder)
    if lock is not None:
        lock.release()
    return lock is None


def _let_go() -> None:
    """A forked process has its parent's open files, and would keep their locks when that dies."""
    while _OPEN:
        os.close(_OPEN.pop())


if sys.platform == "win32":

    def _lock(number: int) -> None:
        import msvcrt

        msvcrt.locking(number, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(number: int) -> None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    os.register_at_fork(after_in_child=_let_go)
