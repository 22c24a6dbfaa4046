"""The sandbox against programs that try to get out, to lie, or never to end.

All of them run in one batch, each between two honest programs: what one does must not show in
another. Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlcore.tasks import sandbox as module
from rlcore.tasks._sandbox_server import CALLS
from rlcore.tasks.sandbox import Limits, Outcome, Program, Sandbox, SandboxError, read_values

if sys.platform != "linux":
    pytest.skip(
        "the sandbox needs Linux; its errors elsewhere are tested in test_code.py",
        allow_module_level=True,
    )

HONEST = Program("def f(x):\n    return x + 1\n", "f", [[1], [2]])
DONE = Outcome(((True, 2), (True, 3)))
PROCESSOR = "it used up its 1 seconds of processor time"
# Tried from inside; all that succeeds is returned.
TRY = """
def f(x):
    done = []
    for attempt in ATTEMPTS:
        try:
            done.append([attempt, repr(eval(attempt))])
        except Exception:
            pass
    return done
"""
FILES = """
import os, io
ATTEMPTS = [
    "open('FOLDER/secret').read()", "open('/etc/passwd').read()", "open('FOLDER/new', 'w')",
    "io.open_code('FOLDER/secret')", "os.listdir('/')", "os.listdir('.')", "os.stat('FOLDER')",
    "os.unlink('FOLDER/secret')", "os.rename('FOLDER/secret', 'FOLDER/moved')", "os.getcwd()",
    "os.mkdir('FOLDER/new')", "os.chdir('FOLDER')", "os.symlink('/', 'FOLDER/new')", "os.dup(3)",
    "os.open('/dev/null', 0)", "os.memfd_create('x')", "os.pipe()", "os.ftruncate(3, 10**9)",
    "os.open('/proc/self/mem', 0)", "open('/proc/self/environ').read()", "os.fchmod(3, 0)",
    "open(os.path.expanduser('~/.ssh/id_rsa')).read()", "os.fstat(3)", "os.sendfile(3, 0, 0, 9)",
]
"""
PROCESSES = """
import os, signal, resource, _thread
ATTEMPTS = [
    "os.fork()", "os.vfork()", "os.execv('/bin/sh', ['sh'])", "os.system('true') == 0 or 1 / 0",
    "os.posix_spawn('/bin/true', ['true'], {})", "os.kill(os.getppid(), 9)", "os.kill(-1, 9)",
    "os.killpg(0, 9)", "os.kill(os.getpid(), 19)", "os.setsid()", "os.setuid(0)", "os.nice(-5)",
    "_thread.start_new_thread(print, ())", "signal.pidfd_send_signal(3, 9)", "os.pidfd_open(1)",
    "signal.setitimer(signal.ITIMER_REAL, 1)", "signal.alarm(1) and 1 / 0", "os.getpriority(0, 0)",
    "resource.setrlimit(resource.RLIMIT_CPU, (9, 9))", "os.sched_setaffinity(0, [0])",
]
"""
NETWORK = """
import socket
ATTEMPTS = [
    "socket.create_connection(('127.0.0.1', PORT), timeout=1)", "socket.socket()",
    "socket.socket(socket.AF_UNIX)", "socket.socketpair()", "socket.getaddrinfo('localhost', 1)",
]
"""
OPEN_FILES = """
import os
def f(x):
    done = []
    for number in range(4, 5000):
        for attempt in (lambda: os.write(number, b"{}"), lambda: os.read(number, 1)):
            try:
                attempt()
                done.append(number)
            except OSError:
                pass
    return done
"""
LOOKS_AROUND = """
import gc, sys
def f(x):
    if x == 2:
        return []
    # Everything that the interpreter knows, and the frames that called this one.
    seen, frame = gc.get_objects(), sys._getframe()
    while frame is not None:
        seen += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    texts = " ".join(map(repr, seen))
    names = ["".join(reversed(name)) for name in ("s'ruobhgien a", "detnaw eulav eht")]
    return [name for name in names if name in texts]
"""
KERNEL = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
def f(x):
    # Every number there is, and the other table of this machine (x32); those allowed apart.
    through = []
    for number in [*range(1024), *range(1 << 30, (1 << 30) + 600)]:
        if number in ALLOWED:
            continue
        result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
        if (result, ctypes.get_errno()) != (-1, 1):
            through.append(number)
    return through
"""
OTHER_DOOR = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
page = libc.mmap(None, 4096, 7, 0x22, -1, 0)
# mov eax, 20; int 0x80; ret: getpid as a program of 32 bits calls it, by a table of its own.
code = bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3])
ctypes.memmove(page, code, len(code))
def f(x): return ctypes.CFUNCTYPE(ctypes.c_int)(page)()
"""
# The kernel's own (uretprobe, uprobe of x86): it lets no filter see them, and ends by signal 4
# whoever calls them from anywhere but its probes.
PROBES = (335, 336) if os.uname().machine == "x86_64" else ()
NOTHING = ((True, []), (True, []))
ATTACKS: dict[str, tuple[str, Outcome | str]] = {
    # never ends
    "loop": ("while True: pass", Outcome(ended=PROCESSOR)),
    "loop in a call": (
        "def f(x):\n while x > 1: pass\n return x",
        Outcome(((True, 1),), PROCESSOR),
    ),
    "loop in C": ("def f(x): return 9 ** 9 ** 9", Outcome(ended=PROCESSOR)),
    "loop that hears no signal": (
        "import signal\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass",
        Outcome(ended=PROCESSOR),
    ),
    "loop that catches all": (
        "while True:\n try:\n  while True: pass\n except BaseException: pass",
        Outcome(ended=PROCESSOR),
    ),
    "fork bomb": (
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        Outcome(ended=PROCESSOR),
    ),
    "prints without end": ("while True: print('x' * 10**6)", Outcome(ended=PROCESSOR)),
    # takes too much
    "memory": ("def f(x): return len('a' * 10**9)", Outcome(((False, "MemoryError"),) * 2)),
    "memory bit by bit": (
        "def f(x):\n kept = []\n while True: kept.append(bytearray(10**6))",
        Outcome(((False, "MemoryError"),) * 2),
    ),
    "long value": ("def f(x): return 'a' * 10**5", Outcome(ended="it left with exit status 1")),
    "long lines": (
        "import os\nwhile True: os.write(3, b'[true, 2]\\n' * 1000)",
        "it left with|^$",
    ),
    "recursion": ("def f(x): return f(x)", Outcome(((False, "RecursionError"),) * 2)),
    "recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\n"
        "class A:\n def __repr__(self): return repr(self)\ndef f(x): return repr(A())",
        "it was ended by signal 11|processor time",
    ),
    "deep value": (
        "def f(x):\n a = []\n for _ in range(10**5): a = [a]\n return a",
        Outcome(((False, "RecursionError"),) * 2),
    ),
    "deep source": ("(" * 40_000, "^$|signal"),
    "long source": ("#" * 10**6, Outcome(ended="it is longer than 50000 characters")),
    # leaves
    "_exit": ("import os\nos._exit(0)", Outcome()),
    "_exit in a call": (
        "import os\ndef f(x): os._exit(7)",
        Outcome(ended="it left with exit status 7"),
    ),
    "sys.exit": ("import sys\nsys.exit(0)", Outcome(((False, "SystemExit"),) * 2)),
    "raises SystemExit": ("def f(x): raise SystemExit(0)", Outcome(((False, "SystemExit"),) * 2)),
    "raises KeyboardInterrupt": (
        "def f(x): raise KeyboardInterrupt",
        Outcome(((False, "KeyboardInterrupt"),) * 2),
    ),
    "reads what is not there": (
        "import ctypes\ndef f(x): ctypes.string_at(0)",
        Outcome(ended="it was ended by signal 11"),
    ),
    "aborts": ("import os\nos.abort()", "signal"),
    "says that it could not be protected": (
        "import os\nos._exit(70)",
        Outcome(ended="it left with exit status 70"),
    ),
    # gets out
    "files": (FILES + TRY, Outcome(NOTHING)),
    "files that are open": (OPEN_FILES, Outcome(NOTHING)),
    "processes": (PROCESSES + TRY, Outcome(NOTHING)),
    "network": (NETWORK + TRY, Outcome(NOTHING)),
    "every system call": (KERNEL, Outcome(NOTHING)),
    "system calls of 32 bits": (OTHER_DOOR, "it was ended by signal (31|11|4)$"),
    "looks around": (LOOKS_AROUND, Outcome(NOTHING)),
    "imports from the disk": (
        "import json.tool",
        Outcome(((False, "ModuleNotFoundError"),) * 2),
    ),
    "environment": (
        "import os, sys\n"  # LC_CTYPE is what Python adds
        "def f(x): return [sorted(set(os.environ) - {'LC_CTYPE'}), sys.stdin.read()]",
        Outcome(((True, [[], ""]),) * 2),
    ),
    # lies
    "equal to everything": (
        "class A:\n def __eq__(self, other): return True\ndef f(x): return A()",
        Outcome(((False, "TypeError"),) * 2),
    ),
    "an int that is another one": (
        "class A(int):\n def __eq__(self, other): return True\n def __repr__(self): return '2'\n"
        "def f(x): return A(7)",
        Outcome(((True, 7),) * 2),
    ),
    "breaks the builtins": (
        "import builtins, json\nfor name in ('print', 'len', 'repr', 'sorted'):\n"
        " setattr(builtins, name, lambda *a: 2)\njson.dumps = lambda *a, **k: '[true, 2]'\n"
        "def f(x): return 0",
        Outcome(((True, 0),) * 2),
    ),
    "no number": ("def f(x): return float('nan')", Outcome(((False, "ValueError"),) * 2)),
    "no text": ("import os\nos.write(3, b'\\xff\\xfe\\n')", Outcome()),
    "other lines": ("import os\nos.write(3, b'[true]\\n')\ndef f(x): return 2", Outcome()),
    "bytes": ("def f(x): return b'2'", Outcome(((False, "TypeError"),) * 2)),
    # is no program
    "empty": ("", Outcome(((False, "NameError"),) * 2)),
    "another function": ("def g(x): return x", Outcome(((False, "NameError"),) * 2)),
    "no function": ("f = 3", Outcome(((False, "TypeError"),) * 2)),
    "NUL": ("def f(x): return 2\0", Outcome(((False, "SyntaxError"),) * 2)),
    "half a character": ("f = '\ud800'", Outcome(((False, "UnicodeEncodeError"),) * 2)),
    "prose": ("The answer is 2.", Outcome(((False, "SyntaxError"),) * 2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def box():
    sandbox = Sandbox(Limits(seconds=1, wait=600.0), workers=4)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def outcomes(box, tmp_path_factory) -> dict[str, Outcome]:
    """Of every attack; "honest" is what became of the programs between them."""
    folder = tmp_path_factory.mktemp("around")
    (folder / "secret").write_text("the value wanted")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        words = {
            "FOLDER": str(folder),
            "PORT": str(listener.getsockname()[1]),
            "ALLOWED": str(sorted({*CALLS[os.uname().machine].values(), *PROBES})),
        }
        programs = []
        for source, _ in ATTACKS.values():
            for word, value in words.items():
                source = source.replace(word, value)
            programs += [Program(source, "f", [[1], [2]]), HONEST]
        programs.append(Program('kept = "a neighbour\'s"\ndef f(x): return x + 1', "f", [[1], [2]]))
        found = box.run(programs)
        with pytest.raises(BlockingIOError):  # nobody knocked
            listener.accept()
    assert os.listdir(folder) == ["secret"]
    assert (folder / "secret").read_text() == "the value wanted"
    assert found[1::2] == [DONE] * len(ATTACKS)
    assert found[-1] == DONE
    return dict(zip(ATTACKS, found[::2], strict=False))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_comes_to_nothing(name: str, outcomes) -> None:
    wanted = ATTACKS[name][1]
    if isinstance(wanted, str):  # how it ends is the interpreter's business
        assert re.search(wanted, outcomes[name].ended), outcomes[name]
    else:
        assert outcomes[name] == wanted


def test_what_waits_is_ended_by_the_clock() -> None:
    waits = (
        "import time\ntime.sleep(1000)",
        "import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()",
    )
    sandbox = Sandbox(Limits(wait=1.0), workers=2)
    found = sandbox.run([Program(source, "f", [[1]]) for source in waits])
    assert found == [Outcome(ended="it was not done after 1 seconds")] * 2
    sandbox.close()


def test_nothing_is_left_behind(box, outcomes) -> None:
    server = Path(f"/proc/{box._server[1].pid}")
    assert (server / "task" / server.name / "children").read_text() == ""
    assert len(os.listdir(server / "fd")) <= 5  # /dev/null three times, and the line
    here = Path("/proc/self/fd")
    kept = [os.readlink(here / n) for n in os.listdir(here) if os.path.lexists(here / n)]
    assert not [name for name in kept if "memfd:sandbox" in name]


def test_order_and_arguments_are_kept(box) -> None:
    sources = [f"def f(x, y): return [x, y, {n}]" for n in range(40)]
    found = box.run([Program(source, "f", [["a", {"k": None}]]) for source in sources])
    assert [o.returned for o in found] == [((True, ["a", {"k": None}, n]),) for n in range(40)]
    assert box.run([]) == []


def test_a_module_that_was_loaded_before_is_at_hand(box) -> None:
    source = (
        "import math, itertools, collections, heapq, re, random\ndef f(x): return math.gcd(12, x)"
    )
    assert box.run([Program(source, "f", [[18]])])[0].returned == ((True, 6),)


def test_tests_of_one_program_share_its_names(box) -> None:
    source = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    assert box.run([Program(source, "f", [[1], [1]])])[0].returned == ((True, 1), (True, 2))


def test_threads_take_turns(box) -> None:
    found: dict[int, list[Outcome]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: box.run([HONEST] * 5)}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [DONE] * 5 for n in range(4)}


def test_a_server_that_dies_is_said_and_replaced(box) -> None:
    box.run([HONEST])
    pid = box._server[1].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the sandbox's process does not answer"):
        box.run([HONEST])
    assert box.run([HONEST]) == [DONE]
    assert box._server[1].pid != pid


def test_after_an_interrupt_the_next_call_starts_anew(box, monkeypatch) -> None:
    box.run([HONEST])
    process = box._server[1]
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "_receive", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            box.run([HONEST] * 9)
    assert process.poll() is not None
    assert box.run([HONEST]) == [DONE]


def test_a_process_that_was_forked_makes_its_own(box) -> None:
    box.run([HONEST])
    pid, process, channel = box._server
    box._server = (pid + 1, process, channel)  # as a child of this process would see it
    assert box.run([HONEST]) == [DONE]
    assert box._server[1].pid != process.pid
    assert process.poll() is None  # it is its parent's
    channel.close()
    assert process.wait(60) == 0


HOLDER = """
import sys
sys.path.insert(0, {root!r})
from rlcore.tasks.sandbox import Limits, Program, Sandbox
box = Sandbox(Limits(wait=3600.0))
box.run([])
print(box._server[1].pid, flush=True)
box.run([Program("import time\\ntime.sleep(3600)", "f", [])])
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_nothing_outlives_who_started_it() -> None:
    """SIGKILL leaves no time to tidy up: the server hears that the line is dead, and goes too."""
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(root=root)], stdout=subprocess.PIPE, text=True
    ) as holder:
        server = int(holder.stdout.readline())
        children = Path(f"/proc/{server}/task/{server}/children")
        while not (running := children.read_text().split()):
            time.sleep(0.01)
        holder.kill()
    while not (gone(server) and all(gone(int(pid)) for pid in running)):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        (
            "    prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter)\n",
            "",
            "protection is not to be had on this machine: .* Too many open files",
        ),
        ("SECCOMP_MODE_FILTER = 2\n", "SECCOMP_MODE_FILTER = 9\n", "Invalid argument"),
        ("ALLOW, DENY, KILL = 0x7FFF0000, ", "ALLOW, DENY, KILL = 0, ", "ended so"),
        ("    limit(resource.RLIMIT_NOFILE, FILES)\n", "    os._exit(3)\n", "does not answer"),
    ],
)  # fmt: skip
def test_a_protection_that_is_missing_is_an_error(
    line: str, instead: str, message: str, tmp_path, monkeypatch
) -> None:
    """As on a kernel without it; nothing runs then."""
    source = module.SERVER.read_text()
    assert source.count(line) == 1
    (tmp_path / "server.py").write_text(source.replace(line, instead))
    monkeypatch.setattr(module, "SERVER", tmp_path / "server.py")
    with pytest.raises(SandboxError, match=message):
        Sandbox().run([HONEST])


@pytest.mark.parametrize(
    "change",
    [{"seconds": 0}, {"seconds": 0.5}, {"wait": 0}, {"memory": 10**6}, {"output": 0}],
)
def test_bad_limits(change: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))}: found"):
        Limits(**change)
    with pytest.raises(ValueError, match="workers: found 0"):
        Sandbox(workers=0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"", ()),
        (b"[true, 1]", ()),  # a line without its end
        (b'[true, 1]\n[false, "E"]\n', ((True, 1), (False, "E"))),
        (b"[true, 1]\nx\n[true, 2]\n", ((True, 1),)),
        (b"[1, 1]\n", ()),
        (b'{"a": 1}\n', ()),
        (b"[true, NaN]\n", ()),
        (b"[true, -Infinity]\n", ()),
        (b"[true, " + b"9" * 5000 + b"]\n", ()),
        (b"[true, " + b"[" * 60_000 + b"\n", ()),
        (b"[true, " + b"[" * 30_000 + b"]" * 30_000 + b"]\n", ()),
        (b"[true, \xff]\n", ()),
    ],
)
def test_what_a_program_left_is_read_as_data(text: bytes, wanted: tuple) -> None:
    assert read_values(text) == wanted
