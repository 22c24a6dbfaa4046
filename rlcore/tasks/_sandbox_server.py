"""The process that runs programs for `rlcore.tasks.sandbox`, which starts it. Linux alone.

It never reads a program: it gets two open files for each, forks, and the child reads its own job
from the first and writes what the program returned into the second. So a child has neither the
programs of others in its memory nor any expected value. Before the program starts, the child gives
up every file but the second, takes its limits, and installs a filter after which the kernel refuses
all system calls but the few of `CALLS`: no file is opened, nothing connects, no process or thread
is started, no signal sent. Nothing here relies on Python to hide anything from the program.

A file of the standard library only: it is started by its path, without site-packages.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

RESULT = 3  # the only file that a program can write to, /dev/null apart
FILES = 256  # that this process may have open, so that a child knows which to close
REFUSED = 70  # exit status of a child that could not protect itself; its result says why
# What a program may import: the file system is closed to it, so they are loaded before.
MODULES = (
    "bisect", "cmath", "collections", "collections.abc", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "heapq", "itertools", "math", "numbers",
    "operator", "random", "re", "statistics", "string", "textwrap", "time", "typing",
)  # fmt: skip
# The system calls that an interpreter at work needs, by machine: everything else is refused.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
CALLS = {
    "x86_64": {
        "read": 0, "write": 1, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
        "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24,
        "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39, "exit": 60,
        "gettimeofday": 96, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202,
        "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
        "exit_group": 231, "getrandom": 318,
    },
    "aarch64": {
        "read": 63, "write": 64, "mmap": 222, "mprotect": 226, "munmap": 215, "brk": 214,
        "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "sched_yield": 124,
        "mremap": 216, "madvise": 233, "nanosleep": 101, "getpid": 172, "exit": 93,
        "gettimeofday": 169, "sigaltstack": 132, "gettid": 178, "futex": 98,
        "restart_syscall": 128, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115,
        "exit_group": 94, "getrandom": 278,
    },
}  # fmt: skip

# linux/filter.h and linux/seccomp.h
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2


class Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def build_filter(machine: str) -> Filter:
    """A seccomp program: ALLOW for `CALLS`, EPERM for the rest, death for another machine's."""
    calls = sorted(CALLS[machine].values())
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        *((JUMP_EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)),
        (RETURN, 0, 0, DENY),
        (RETURN, 0, 0, ALLOW),
    ]
    return Filter(len(code), b"".join(struct.pack("=HBBI", *line) for line in code))


def limit(kind: int, value: int) -> None:
    """Set both limits, or keep those that are lower already."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def prctl(libc: Any, what: int, *values: Any) -> None:
    """OSError where the kernel does not do it."""
    arguments = [ctypes.c_ulong(v) if isinstance(v, int) else ctypes.byref(v) for v in values]
    arguments += [ctypes.c_ulong(0)] * (4 - len(arguments))
    if libc.prctl(what, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def protect(libc: Any, filter: Filter, limits: dict[str, Any]) -> None:
    """Take every limit, install the filter, and try what it must refuse."""
    prctl(libc, PR_SET_PDEATHSIG, int(signal.SIGKILL))
    server = os.getppid()
    limit(resource.RLIMIT_CPU, limits["seconds"])
    limit(resource.RLIMIT_AS, limits["memory"])
    limit(resource.RLIMIT_FSIZE, limits["output"])
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        limit(kind, 0)
    prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter)
    attempts: tuple[tuple[str, Callable[..., Any], tuple[Any, ...]], ...] = (
        ("open a file", os.open, ("/dev/null", os.O_RDONLY)),
        ("send a signal", os.kill, (server, 0)),
        ("start a process", os.fork, ()),
    )
    for what, attempt, given in attempts:
        try:
            attempt(*given)
        except PermissionError:
            continue
        raise OSError(f"the filter is installed, and the program could still {what}")


def run(job: dict[str, Any]) -> None:
    """Define the program's names, call its function on each test's arguments, write what came.

    A line for each test: `[true, value]`, or `[false, name of the exception]`. All of it is the
    word of the program: it can write such lines by itself. The values are compared elsewhere.
    """
    write, dumps = os.write, json.dumps
    names: dict[str, Any] = {"__name__": "program"}
    error: BaseException | None = None
    try:
        exec(compile(job["source"], "<program>", "exec"), names)
    except BaseException as raised:  # SystemExit and KeyboardInterrupt too
        error = raised
    for arguments in job["arguments"]:
        try:
            if error is not None:
                raise error
            if job["function"] not in names:
                raise NameError(job["function"])
            line = dumps([True, names[job["function"]](*arguments)], allow_nan=False)
        except BaseException as raised:
            line = dumps([False, type(raised).__name__])
        write(RESULT, line.encode() + b"\n")


def child(files: list[int], libc: Any, filter: Filter, limits: dict[str, Any]) -> NoReturn:
    """Run one job: read the first file, write into the second."""
    job, result = files
    leave = os._exit
    try:
        with open(job, "rb") as file:
            text = file.read()
        os.dup2(result, RESULT)
        os.closerange(RESULT + 1, FILES)
        try:
            protect(libc, filter, limits)
        except BaseException as error:
            os.write(RESULT, str(error).encode())
            leave(REFUSED)
        run(json.loads(text))
        leave(0)
    finally:
        leave(1)


def serve(channel: socket.socket, limits: dict[str, Any]) -> None:
    """A message with two files is a job; a message goes back for each child that has ended."""
    limit(resource.RLIMIT_NOFILE, FILES)
    libc = ctypes.CDLL(None, use_errno=True)
    filter = build_filter(platform.machine())
    for name in MODULES:
        __import__(name)
    gc.collect()
    gc.freeze()
    running: dict[int, list[Any]] = {}  # by its pidfd: number of the job, pid, deadline, killed
    events = select.poll()
    events.register(channel, select.POLLIN)
    while True:
        now = time.monotonic()
        deadlines = [deadline for _, _, deadline, killed in running.values() if not killed]
        wait = min(deadlines, default=math.inf) - now
        for fd, _ in events.poll(None if wait == math.inf else max(0, math.ceil(wait * 1000))):
            if fd in running:
                number, pid, _, killed = running.pop(fd)
                events.unregister(fd)
                os.close(fd)
                _, status, usage = os.wait4(pid, 0)
                report = {
                    "job": number,
                    "status": os.waitstatus_to_exitcode(status),
                    "seconds": usage.ru_utime + usage.ru_stime,
                    "killed": killed,
                }
                channel.send(json.dumps(report).encode())
                continue
            message, files, _, _ = socket.recv_fds(channel, 64, 2)
            if not message:  # the other side is gone
                return
            pid = os.fork()
            if pid == 0:
                child(files, libc, filter, limits)
            for file in files:
                os.close(file)
            handle = os.pidfd_open(pid)
            events.register(handle, select.POLLIN)
            running[handle] = [int(message), pid, time.monotonic() + limits["wait"], False]
        for handle, entry in running.items():
            if not entry[3] and time.monotonic() >= entry[2]:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                entry[3] = True


if __name__ == "__main__":
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
    except (ConnectionError, KeyboardInterrupt):
        pass
    finally:  # children that still run die with this process: PR_SET_PDEATHSIG
        os._exit(0)
