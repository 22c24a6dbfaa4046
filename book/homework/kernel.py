"""One kernel under a student's cells, with limits, that never leaves the grader waiting.

A cell counts as run only when the kernel itself answered so. Timeouts, memory and a kernel that
died are told apart, and what a cell prints is cut.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from nbformat.v4 import new_output, output_from_msg

from book.homework.chapter import ROOT

TIMEOUT, MEMORY, DIED = "timeout", "out of memory", "kernel died"
MAX_OUTPUT = 20_000  # characters of printed text kept per cell
MAX_RICH = 2_000_000  # characters of figures and the like kept per cell


@dataclass(frozen=True)
class Limits:
    """What one notebook may use. Seconds per cell; MiB beyond what the set-up took."""

    seconds: float = 30.0
    memory_mb: int = 2048
    setup_seconds: float = 180.0


@dataclass
class Outcome:
    """What became of one cell. `ok` only if the kernel said so; `fatal` if it had to go.

    answer: the value of the text that was asked for after the cell.
    """

    ok: bool = False
    answer: str = ""
    fatal: str = ""
    error: str = ""
    outputs: list = field(default_factory=list)


class Kernel:
    """A fresh IPython kernel of this very interpreter, in `folder`. Use it in a `with`."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.limits = limits
        self.folder = folder
        specs = KernelSpecManager()
        specs.kernel_dirs = []  # no installed kernelspec: the interpreter that runs the grader
        self.manager = KernelManager(kernel_name="python3", kernel_spec_manager=specs)
        self.group = 0
        self.key = ""  # with which the kernel signs its verdicts, after limit()
        self.start_mb = float("inf")  # no limit until the set-up is done

    def __enter__(self) -> Kernel:
        self.manager.start_kernel(
            cwd=str(self.folder),
            stdout=subprocess.DEVNULL,  # what the cells print comes by message
            stderr=subprocess.DEVNULL,
            env=_environment(self.folder),
            extra_arguments=["--HistoryManager.hist_file=:memory:"],
        )
        pid = getattr(self.manager.provisioner, "pid", None)
        self.process = psutil.Process(pid) if pid else None
        if pid and os.name == "posix":
            self.group = os.getpgid(pid)  # the kernel leads a group: it started a session
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=self.limits.setup_seconds)
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        if self.group and self.group != os.getpgrp():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)  # with all that the cells started
        with contextlib.suppress(Exception):
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def run(self, code: str, seconds: float | None = None, ask: str = "") -> Outcome:
        """Run code; returns when it has ended, or has to be given up. ask: then evaluated."""
        asked = {"answer": ask} if ask else {}
        request = self.client.execute(code, allow_stdin=False, user_expressions=asked)
        deadline = time.monotonic() + (self.limits.seconds if seconds is None else seconds)
        kept, fatal, idle, next_check = Kept(), "", False, 0.0
        reply: Mapping | None = None
        while not fatal and not (idle and reply is not None):
            message = self._printed(request)
            if message is not None:
                state = message["content"].get("execution_state")
                idle = message["msg_type"] == "status" and state == "idle"
                kept.add(message)
                if not idle and time.monotonic() < next_check:
                    continue  # a flood of output: look at the rest five times a second
            next_check = time.monotonic() + 0.2
            if reply is None and (reply := self._reply(request, 2.0 if idle else 0.0)) is not None:
                deadline = min(deadline, time.monotonic() + 2.0)  # for the rest of its output
            elif time.monotonic() > deadline:
                if reply is not None:
                    break
                fatal = TIMEOUT
            elif reply is None and not self.manager.is_alive():
                reply = self._reply(request, 0.2)
                fatal = DIED if reply is None else ""
            elif reply is None and self._resident_mb() > self.start_mb + self.limits.memory_mb:
                fatal = MEMORY
        outcome = Outcome(fatal=fatal, outputs=kept.outputs)
        if reply is not None:
            outcome.ok = reply["status"] == "ok"
            outcome.error = "" if outcome.ok else explain(reply)
            value = reply.get("user_expressions", {}).get("answer", {})
            outcome.answer = str(value.get("data", {}).get("text/plain", "")).strip("'")
            if reply.get("ename") == "MemoryError" or "t allocate memory" in outcome.error:
                outcome.fatal = MEMORY
        return outcome

    def limit(self) -> None:
        """From now on the memory limit holds and tests can run; call it after the set-up cells."""
        code = "__import__('book.homework.inside', fromlist=['begin']).begin({})"
        outcome = self.run(code.format(self.limits.memory_mb), self.limits.setup_seconds)
        if not outcome.ok:
            raise RuntimeError(f"the grader could not set itself up in the kernel: {outcome.error}")
        self.key = "".join(one.get("text", "") for one in outcome.outputs).strip()
        self.start_mb = self._resident_mb()

    def _printed(self, request: str) -> Mapping | None:
        """The next message that this request caused on the kernel's public channel."""
        with contextlib.suppress(queue.Empty):
            message = self.client.get_iopub_msg(timeout=0.1)
            if message["parent_header"].get("msg_id") == request:
                return message
        return None

    def _reply(self, request: str, wait: float) -> Mapping | None:
        """The kernel's answer to this request: the only evidence that it was run."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = self.client.get_shell_msg(timeout=wait)
                if message["parent_header"].get("msg_id") == request:
                    return message["content"]
        return None

    def _resident_mb(self) -> float:
        if self.process is None:
            return 0.0
        try:
            return self.process.memory_info().rss / 2**20
        except psutil.Error:
            return 0.0


class Kept:
    """The outputs of a cell in the notebook's form, cut where they become too long."""

    def __init__(self) -> None:
        self.outputs: list = []
        self.text = self.rich = 0
        self.cut = False

    def add(self, message: Mapping) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            text = content["text"][: max(0, MAX_OUTPUT - self.text)]
            self.text += len(content["text"])
            last = self.outputs[-1] if self.outputs else None
            if text and last and last.output_type == "stream" and last.name == content["name"]:
                last.text += text
            elif text:
                self.outputs.append(new_output("stream", name=content["name"], text=text))
            if self.text > MAX_OUTPUT and not self.cut:
                self.cut = True
                note = "\n... the rest of the output is left out ...\n"
                self.outputs.append(new_output("stream", name="stdout", text=note))
        elif kind in ("display_data", "execute_result"):
            self.rich += sum(len(str(part)) for part in content["data"].values())
            if self.rich <= MAX_RICH:
                self.outputs.append(output_from_msg(message))
        elif kind == "error":
            self.outputs.append(output_from_msg(message))
        elif kind == "clear_output":
            self.outputs.clear()


def explain(reply: Mapping) -> str:
    """One line for an error reply of the kernel."""
    name, value = reply.get("ename", ""), str(reply.get("evalue", "")).strip()
    if name == "TestFailed":
        return value
    if name == "StdinNotImplementedError":
        return "input() is not available: nobody can type while the notebook is graded"
    return f"{name}: {value}" if value else name or f"the kernel says {reply.get('status')!r}"


def _environment(folder: Path) -> dict[str, str]:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    new = {"PYTHONPATH": path, "HOME": str(home), "USERPROFILE": str(home)}
    new["PYTHONDONTWRITEBYTECODE"] = "1"
    return {"OMP_NUM_THREADS": "1", **os.environ, **new}
