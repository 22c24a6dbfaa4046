"""More than one process: who takes which rows, and how what they found comes together.

Every process goes through the same steps with the same batch, and does the costly part of a step
(sampling, rewards, forward and backward pass) on its own share of the rows only. What it found is
then gathered, so that rewards, group statistics, divisors and metrics are those of the whole batch,
by the same lines of code as in one process, wherever the members of a group were sampled. The
gradients are added up. All weights start equal, and stay so bit for bit.

torchrun says how many processes there are, accelerate joins them: nccl and a device for each on
CUDA, gloo on the CPU. One process alone pays for none of this.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlcore.checks import brief
from rlcore.devices import choose_device

T = TypeVar("T")
BUCKET = 2**25  # numbers that are added up in one call: 128 MiB of float32
PATIENCE = timedelta(hours=2)  # how long one process may wait for another, at an evaluation say


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; they are numbered by `rank`, 0 is the main one.

    With size 1 every method is what one process does alone, at no cost.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """The one that writes files and shows progress."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """Which of n rows are this process's: neighbours, as many as others have, or one more."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def most_parts(self, n: int, rows: int | None) -> int:
        """The parts of the largest share of n rows, `rows` at a time (None: all at once)."""
        share = -(-n // self.size)
        return -(-share // (rows or max(share, 1)))

    def rows(self, n: int, work: Callable[[slice], T]) -> list[T]:
        """`work` on n rows, each process on its share; the results of all, in order of the rows.

        A process without a row has no part in it. Errors are as in `gather`.
        """
        own = self.share(n)
        found = self.gather(lambda: [work(own)] if self.size == 1 or own.start < own.stop else [])
        return [part for parts in found for part in parts]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives in each process, in order of their ranks, on this process's device.

        Its own result is the very object that `work` gave. An exception in one process is raised
        in all of them: none goes on with half a batch, none waits for ever.
        """
        if self.size == 1:
            return [work()]
        from accelerate.utils import gather_object

        found, failed = _tried(work)
        parcels = gather_object([_pack(found, failed)])
        if failed is not None:
            raise failed
        whole: list[Any] = [
            found if rank == self.rank else self._unpack(parcel, rank)
            for rank, parcel in enumerate(parcels)
        ]
        return whole

    def agree(self, work: Callable[[], T]) -> T:
        """What `work` gives in this process, after an exception in any was raised in all."""
        found: list[T] = []
        self.gather(lambda: found.append(work()))
        return found[0]

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` gives in the main process, which alone does it; an exception is for all."""
        if self.size == 1:
            return work()
        from accelerate.utils import broadcast_object_list

        found, failed = _tried(work) if self.is_main else (None, None)
        parcel: list[Any] = [_pack(found, failed) if self.is_main else None]
        broadcast_object_list(parcel)
        if failed is not None:
            raise failed
        result: Any = found if self.is_main else self._unpack(parcel[0], 0)
        return result

    def _unpack(self, parcel: bytes, rank: int) -> Any:
        """What another process packed, or its exception raised. Its CUDA tensors come here."""
        ours = self.device

        def place(storage: Any, where: str) -> Any:
            return storage.cuda(ours.index) if where.startswith("cuda") else storage

        # From a process of this run, with classes of rlcore in it, so not weights_only.
        found, failed = torch.load(io.BytesIO(parcel), map_location=place, weights_only=False)
        if failed is not None:
            failed.add_note(f"in process {rank} of {self.size}")
            raise failed
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in some process: the same answer for all."""
        return any(self.gather(lambda: flag))

    def sum(self, work: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Of the numbers that `work` gives in each process, by name; one that lacks a name adds 0.

        Added up in order of the ranks, so that all have the same bits.
        """
        parts = self.gather(work)
        total = dict(parts[0])
        for part in parts[1:]:
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of all processes, in place; where there is one, it takes part.

        The loss of each process is divided by the totals of the whole step, so the sum is the
        step's gradient. This is what DistributedDataParallel does in hooks of the backward pass
        (times the number of processes, since it takes the mean), but after the last part of the
        pass: a process whose rows all drop out adds zeros instead of being waited for, models are
        called as they are (sampling, scalar heads, adapters), and no backward pass but the last
        one's would have run beside the communication anyway. Numbers narrower than float32 are
        added in float32. Gradients that are shared out (`sharding.py`) are sums already.
        """
        if self.size == 1:
            return
        found = [p.grad for p in parameters if p.grad is not None]
        for bucket in _buckets([g for g in found if not hasattr(g, "full_tensor")]):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([gradient.reshape(-1).to(wide) for gradient in bucket])
            torch.distributed.all_reduce(flat)
            for gradient, whole in zip(
                bucket, flat.split([g.numel() for g in bucket]), strict=True
            ):
                gradient.copy_(whole.view_as(gradient))

    def synchronize(self, *models: Any) -> None:
        """Give every process the main one's parameters and buffers; None is skipped."""
        if self.size == 1:
            return
        for model in filter(None, models):
            tensors = [*model.parameters(), *model.buffers()]
            for bucket in _buckets([tensor.detach() for tensor in tensors]):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                torch.distributed.broadcast(flat, 0)
                for tensor, whole in zip(
                    bucket, flat.split([t.numel() for t in bucket]), strict=True
                ):
                    tensor.copy_(whole.view_as(tensor))

    def check(self, settings: Mapping[str, Any]) -> None:
        """ValueError where two processes were called with unlike settings."""
        for rank, theirs in enumerate(self.gather(lambda: dict(settings))):
            for name in sorted({*settings, *theirs}):
                if settings.get(name) != theirs.get(name):
                    raise ValueError(
                        f"{name}: found {settings.get(name)!r} in process {self.rank} and "
                        f"{theirs.get(name)!r} in process {rank}; wanted the same in all"
                    )

    def check_enough(self, **numbers: int) -> None:
        """ValueError for a number of rows or prompts that leaves a process without any."""
        for name, value in numbers.items():
            if value < self.size:
                raise ValueError(
                    f"{name}: found {value} for {self.size} processes; wanted at least one each"
                )

    def words(self, n: int, things: str) -> str:
        """How n things are shared out: "2 processes, 16 prompts each"."""
        least, most = n // self.size, -(-n // self.size)
        each = f"{least}" if least == most else f"{least} or {most}"
        return f"{self.size} processes, {each} {things} each"


ALONE = Processes()


def processes(device: str | torch.device | None = None) -> Processes:
    """The processes that the launcher started, joined; or this one alone. `device` is its device.

    torchrun sets WORLD_SIZE, RANK and LOCAL_RANK, and so does `accelerate launch` where it starts
    several. Each process takes the CUDA device of its number on the machine, or the CPU.
    Raises ValueError for a device that the processes would have to share, and where
    `accelerate launch` was asked for several processes and started one: on the CPU it starts one
    without a word.
    """
    chosen = choose_device(device)
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"WORLD_SIZE: found {size!r}; wanted the number of processes")
    if size == "1":
        _check_launcher()
        return Processes(device=chosen)
    if chosen.type == "cuda":
        here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if chosen.index is not None:
            raise ValueError(
                f"device: found {chosen} for {size} processes; wanted 'cuda': each takes its own"
            )
        if here > devices:
            raise ValueError(
                f"device: found {here} processes on a machine with {devices} CUDA devices; wanted "
                "one each, or device='cpu' (--device cpu)"
            )
    from accelerate import PartialState

    state = PartialState(cpu=chosen.type == "cpu", timeout=PATIENCE)
    if state.device.type != chosen.type:
        raise ValueError(
            f"device: found {chosen.type!r}; the processes were joined on {state.device.type!r}"
        )
    return Processes(state.process_index, state.num_processes, state.device)


def leave() -> None:
    """Part from the other processes, at the end of a program; nothing where there are none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _check_launcher() -> None:
    """`accelerate launch` gives the one process that it starts an address to meet others at, where
    it was asked for more than one, and no WORLD_SIZE (accelerate 1.15, simple_launcher)."""
    lonely = "WORLD_SIZE" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    if lonely and "MASTER_PORT" in os.environ:
        raise ValueError(
            "processes: accelerate launch was asked for several and started 1, as it does on the "
            "CPU; wanted torchrun --nproc-per-node N, or --num_processes 1"
        )


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _pack(found: Any, failed: Exception | None) -> bytes:
    """Result and exception as bytes; an exception that cannot be pickled goes by its words."""
    if failed is not None:
        try:
            pickle.loads(pickle.dumps(failed))
        except Exception:
            failed = RuntimeError(brief(failed))
    buffer = io.BytesIO()
    torch.save((found, failed), buffer)
    return buffer.getvalue()


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype, at most `BUCKET` numbers together, or a single larger one."""
    found: dict[torch.dtype, list[list[Tensor]]] = {}
    for tensor in tensors:
        lists = found.setdefault(tensor.dtype, [[]])
        if lists[-1] and sum(t.numel() for t in lists[-1]) + tensor.numel() > BUCKET:
            lists.append([])
        lists[-1].append(tensor)
    return [bucket for lists in found.values() for bucket in lists]
