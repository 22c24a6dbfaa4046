"""Running programs that nobody has read: in processes of their own, with nothing in their reach.

A program gets arguments as data and gives values back as data; nothing that it gives back is
evaluated or unpickled here, and the values that are expected never leave this process. So a program
cannot report success, it can only return what is compared with the answer.

How it is kept in, see `_sandbox_server.py`: a process for each program; limits on processor time,
address space, output; and a filter (seccomp) after which the kernel refuses it every file, every
connection, every other process. That needs Linux on x86_64 or aarch64, and no privileges. There is
no weaker mode: where a protection is missing, `SandboxError` says which.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.checks import check_positive, check_whole
from rlcore.tasks.task import VerifierUnavailable

SERVER = Path(__file__).with_name("_sandbox_server.py")
LONGEST = 50_000  # characters of a program; a longer one is not run
SLACK = 60.0  # seconds beyond a program's own limits after which the server counts as broken


class SandboxError(VerifierUnavailable):
    """No program can be run here: a protection is missing, or the sandbox's process is broken."""


@dataclass(frozen=True)
class Limits:
    """What one program may use, all its calls together.

    seconds: of processor time, whole ones; a loaded machine does not change what is in time.
    wait: seconds on the clock, for a program that sleeps or waits for ever.
    memory: bytes of address space, the interpreter's 30 MB among them.
    output: bytes of returned values, written as JSON.

    Raises ValueError for what is not such a number.
    """

    seconds: int = 2
    wait: float = 20.0
    memory: int = 256 * 2**20
    output: int = 2**16

    def __post_init__(self) -> None:
        check_whole(1, seconds=self.seconds, output=self.output)
        check_whole(64 * 2**20, memory=self.memory)
        check_positive(wait=self.wait)


@dataclass(frozen=True)
class Program:
    """Python source, the function to call, and the arguments of each call: plain data (JSON)."""

    source: str
    function: str
    arguments: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    returned: for each call in order, (True, value) or (False, name of what it raised); fewer than
    there were calls where the program ended before. Values are JSON's: a tuple is a list here, the
    keys of a dict are strings. All of it is the word of the program.
    ended: "" for a program that came to its end, else why it did not.
    """

    returned: tuple[tuple[bool, Any], ...] = ()
    ended: str = ""


@dataclass
class Sandbox:
    """Runs programs side by side, `workers` at a time (None: the cores of this process).

    The process that starts them is made at the first call and kept: a program then costs about a
    millisecond. It ends with this one, or with `close`.
    """

    limits: Limits = Limits()
    workers: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _server: tuple[int, subprocess.Popen[bytes], socket.socket] | None = field(
        default=None, repr=False
    )

    def __post_init__(self) -> None:
        check_whole(1, workers=1 if self.workers is None else self.workers)

    def run(self, programs: Sequence[Program]) -> list[Outcome]:
        """What became of each program. Raises SandboxError where none can be run."""
        with self._lock:
            try:
                channel = self._channel()
                return self._run(channel, programs)
            except BaseException:  # an interrupt too: what is under way is of no use any more
                self.close()
                raise

    def close(self) -> None:
        """End the process and whatever it runs; the next call makes another."""
        server, self._server = self._server, None
        if server is None or server[0] != os.getpid():  # of the process this one was forked from
            return
        _, process, channel = server
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        channel.close()
        process.wait()

    def __del__(self) -> None:
        # At the interpreter's end modules are gone already; the server sees its line close.
        if sys is not None and not sys.is_finalizing():
            self.close()

    def _channel(self) -> socket.socket:
        if self._server is None or self._server[0] != os.getpid():
            check_platform()
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            here.settimeout(self.limits.wait + SLACK)
            with there:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(SERVER), str(there.fileno()), self._settings],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    cwd="/",
                    env={},
                    start_new_session=True,  # so that Ctrl-C reaches this process alone
                )
            self._server = os.getpid(), process, here
            self._try_out(here)
        return self._server[2]

    @property
    def _settings(self) -> str:
        return json.dumps({name: getattr(self.limits, name) for name in Limits.__annotations__})

    def _try_out(self, channel: socket.socket) -> None:
        """The first child runs nothing of anybody's: its word on what is missing can be trusted."""
        from rlcore.tasks._sandbox_server import REFUSED

        with _file() as job, _file() as result:
            job.write(json.dumps({"source": "", "function": "", "arguments": []}).encode())
            self._send(channel, 0, job, result)
            report = self._receive(channel)
            if report["status"] == REFUSED:
                result.seek(0)
                raise SandboxError(
                    "the sandbox's protection is not to be had on this machine: "
                    + result.read().decode()
                )
            if report["status"] != 0:
                raise SandboxError(f"the sandbox's first process ended so: {report}")

    def _send(self, channel: socket.socket, number: int, job: Any, result: Any) -> None:
        job.seek(0)
        with _answering():
            socket.send_fds(channel, [str(number).encode()], [job.fileno(), result.fileno()])

    def _receive(self, channel: socket.socket) -> Any:
        with _answering():
            message = channel.recv(4096)
            if not message:
                raise ConnectionError("it ended")
            return json.loads(message)

    def _run(self, channel: socket.socket, programs: Sequence[Program]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(programs)
        under_way: dict[int, Any] = {}
        workers = self.workers or len(os.sched_getaffinity(0))
        try:
            for number, program in enumerate(programs):
                if len(program.source) > LONGEST:
                    outcomes[number] = Outcome(ended=f"it is longer than {LONGEST} characters")
                    continue
                if len(under_way) >= workers:
                    self._finish(channel, under_way, outcomes)
                under_way[number] = result = _file()
                with _file() as job:
                    job.write(json.dumps(vars(program)).encode())
                    self._send(channel, number, job, result)
            while under_way:
                self._finish(channel, under_way, outcomes)
        finally:
            for file in under_way.values():
                file.close()
        return [outcome for outcome in outcomes if outcome is not None]

    def _finish(
        self, channel: socket.socket, under_way: dict[int, Any], outcomes: list[Outcome | None]
    ) -> None:
        report = self._receive(channel)
        with under_way.pop(report["job"]) as result:
            result.seek(0)
            text = result.read(self.limits.output)
        outcomes[report["job"]] = Outcome(read_values(text), self._why(report))

    def _why(self, report: dict[str, Any]) -> str:
        """Why a program did not come to its end: from the server, which is not the program."""
        status, limits = report["status"], self.limits
        if report["killed"]:
            return f"it was not done after {limits.wait:g} seconds"
        if status == -signal.SIGKILL and report["seconds"] > limits.seconds - 0.5:
            return f"it used up its {limits.seconds} seconds of processor time"
        if status < 0:
            return f"it was ended by signal {-status}"
        return f"it left with exit status {status}" if status else ""


def check_platform() -> None:
    """SandboxError that says what this system does not have."""
    if sys.platform != "linux":
        raise SandboxError(
            f"the sandbox needs Linux's seccomp filters; this is {sys.platform}, which has none: "
            "use Linux, a Linux container or a virtual machine"
        )
    from rlcore.tasks._sandbox_server import CALLS  # which imports what only Unix has

    if platform.machine() not in CALLS:
        raise SandboxError(
            f"the sandbox knows the system calls of {' and '.join(CALLS)}; this is "
            f"{platform.machine()}"
        )
    if not hasattr(os, "pidfd_open"):
        raise SandboxError("the sandbox needs os.pidfd_open: Linux 5.3 or later")


def read_values(text: bytes) -> tuple[tuple[bool, Any], ...]:
    """The lines that a program left, up to the first that is none: JSON, never evaluated."""
    found = []
    for line in text.split(b"\n")[:-1]:
        try:
            returned = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError):
            break
        if not isinstance(returned, list) or len(returned) != 2 or type(returned[0]) is not bool:
            break
        found.append((returned[0], returned[1]))
    return tuple(found)


def _no_number(name: str) -> Any:
    raise ValueError(name)


def _file() -> Any:
    """A file in memory without a name: gone when it is closed everywhere."""
    return open(os.memfd_create("sandbox"), "w+b", buffering=0)


@contextmanager
def _answering() -> Iterator[None]:
    """An error on the line to the server, as a SandboxError."""
    try:
        yield
    except OSError as error:
        raise SandboxError(f"the sandbox's process does not answer ({error})") from error
