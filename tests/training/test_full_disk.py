"""A disk that takes no more: a clear error, the last good checkpoint, and the same bits later."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from rlcore import files, models
from rlcore.__main__ import main
from rlcore.training import Run, WriteError, record, row, train_policy, train_sft
from rlcore.training.record import read_lines

resource = pytest.importorskip("resource", reason="limits and mounts are those of POSIX")

STEPS = 3
POLICY = {
    "steps": STEPS,
    "prompts_per_step": 2,
    "group_size": 4,
    "learning_rate": 1e-2,
    "seed": 0,
    "checkpoint_every": 1,
    "samples_every": 1,
    "evaluate_every": 2,
    "evaluate_n": 2,
    "progress": False,
    "threads": 1,
    "device": "cpu",
}
LOGS = ("metrics", "evaluations", "samples", "errors")


@pytest.fixture(autouse=True, scope="module")
def no_git() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "commit", lambda: "0" * 40)
        yield


@pytest.fixture(scope="module")
def go(coin, make) -> Callable[..., tuple[Run, torch.nn.Module]]:
    """go(out, **changes) trains the same run each time, or what is left of it."""

    def train(out: Path | None, task=coin, **changes):
        model, tokenizer = make()
        settings = {**POLICY, "resume": out is not None, **changes}
        try:
            return train_policy(model, tokenizer, task, row("grpo"), **settings, out=out), model
        except WriteError as error:
            error.model = model  # what a notebook still has
            raise

    return train


@pytest.fixture(scope="module")
def whole(go, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """The undisturbed run: its folder and its weights."""
    out = tmp_path_factory.mktemp("undisturbed") / "whole"
    return out, weights(go(out)[1])


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def checkpointed(out: Path) -> int | None:
    """The step of the checkpoint that is there, whole."""
    if not (out / "checkpoint.pt").exists():
        return None
    return torch.load(out / "checkpoint.pt", weights_only=True)["step"]


def check_stopped(error: WriteError, out: Path, why: str) -> None:
    """What is promised of an error, and of the folder and the memory that it leaves."""
    said, step = str(error), len(error.run.metrics)
    assert f"could not be written: {why}. The run stopped after step {step}; " in said
    assert str(out) in said
    good = checkpointed(out)
    if good is None:
        assert "there is no checkpoint yet" in said
    else:
        assert f"the last good checkpoint, {out / 'checkpoint.pt'}, is of step {good}:" in said
    assert "\n" not in said
    assert error.__notes__ == ["Model and `run` of this error are usable."]
    for name in LOGS:
        rows, path = read_lines(out / f"{name}.jsonl"), out / f"{name}.jsonl"
        if path.exists():
            assert path.read_bytes().count(b"\n") == len(rows)
            assert path.read_bytes()[-1:] in (b"", b"\n")
        assert rows == getattr(error.run, name)[: len(rows)]
    assert not list(out.glob("*.tmp"))
    assert not (out / "model.new").exists()
    assert weights(error.model).isfinite().all()
    if step:
        assert error.run.curve("loss")[0] == list(range(1, step + 1))


def check_same(out: Path, model, whole: tuple[Path, torch.Tensor]) -> None:
    assert torch.equal(weights(model), whole[1])
    for name in LOGS:
        assert (out / f"{name}.jsonl").read_bytes() == (whole[0] / f"{name}.jsonl").read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in whole[0].iterdir()}


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes; skips the test where this user may mount none."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = None
    if shutil.which("mount"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done is None or done.returncode:
        pytest.skip(f"mounting a small disk: {'no mount' if done is None else done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


@pytest.mark.parametrize(("share", "good"), [(0.5, None), (1.5, 1)])
def test_a_real_disk_that_is_full(share: float, good, go, whole, tmp_path: Path) -> None:
    """Room for half a checkpoint, and for one and a half."""
    checkpoint = (whole[0] / "checkpoint.pt").stat().st_size
    with small_disk(tmp_path / "disk", int(share * checkpoint)) as disk:
        out = disk / "run"
        for _ in range(2):  # the second time it is still full
            with pytest.raises(WriteError) as caught:
                go(out)
            assert caught.value.errno == errno.ENOSPC
            check_stopped(caught.value, out, "No space left on device")
            assert checkpointed(out) == good
        remount(disk, f"size={8 * checkpoint}")
        check_same(out, go(out)[1], whole)


def test_a_model_on_a_full_disk(make, tmp_path: Path) -> None:
    """The older model stays, and nothing of the new one."""
    model, tokenizer = make()
    size = sum(f.stat().st_size for f in models.save(model, tokenizer, tmp_path / "m").iterdir())
    with small_disk(tmp_path / "disk", int(1.5 * size) + 2**15) as disk:
        models.save(model, tokenizer, disk / "model")
        before = (disk / "model" / "model.safetensors").read_bytes()
        for _ in range(2):
            with pytest.raises(WriteError, match=r"model .*/disk/model could not be written: "):
                models.save(make(seed=1)[0], tokenizer, disk / "model")
            assert [path.name for path in disk.iterdir()] == ["model"]
            assert (disk / "model" / "model.safetensors").read_bytes() == before


def test_a_real_disk_that_becomes_read_only(go, coin, whole, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**22) as disk:
        seen = {"n": 0}

        def verify(problem: str, response: str) -> float | None:
            seen["n"] += 1
            if seen["n"] == 4 + 2 * 8 + 3:  # in the evaluation after step 2
                remount(disk, "ro")
            return coin.verify(problem, response)

        out = disk / "run"
        with pytest.raises(WriteError) as caught:
            go(out, task=replace(coin, verify=verify))
        check_stopped(caught.value, out, "Read-only file system")
        assert checkpointed(out) == 1
        with pytest.raises(WriteError, match=r"Read-only file system\. The run stopped after step"):
            go(out)
        remount(disk, "rw")
        check_same(out, go(out)[1], whole)


def test_a_folder_without_permission(go, coin, whole, tmp_path: Path) -> None:
    closed, out = tmp_path / "closed", tmp_path / "run"
    closed.mkdir(0o555)
    if os.access(closed, os.W_OK):
        pytest.skip("permissions do not bind this user (root)")
    seen = {"n": 0}

    def verify(problem: str, response: str) -> float | None:
        seen["n"] += 1
        if seen["n"] == 4 + 2 * 8 + 3:
            out.chmod(0o555)
        return coin.verify(problem, response)

    try:
        with pytest.raises(WriteError) as caught:
            go(out, task=replace(coin, verify=verify))
        check_stopped(caught.value, out, "Permission denied")
    finally:
        out.chmod(0o755)
    check_same(out, go(out)[1], whole)


@pytest.mark.parametrize(("limit", "what"), [(100_000, "checkpoint"), (2_000, "samples.jsonl")])
def test_a_limit_on_the_size_of_files(limit: int, what: str, go, whole, tmp_path: Path) -> None:
    out = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    settings = {"checkpoint_every": 0} if what != "checkpoint" else {}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(WriteError, match=what) as caught:
            go(out, **settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    check_stopped(caught.value, out, "File too large")
    check_same(out, go(out)[1], whole)


def test_a_device_that_is_always_full(go, whole, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        WriteError, match=r"metrics\.jsonl could not be written: No space left"
    ) as e:
        go(out)
    assert len(e.value.run.metrics) == 1
    (out / "metrics.jsonl").unlink()
    check_same(out, go(out)[1], whole)


class Failing:
    """The operations on files of a run; from one of them on, or at it alone, the disk is full."""

    def __init__(self, monkeypatch) -> None:
        self.count, self.at, self.stays, self.labels = 0, 0, False, []
        real = {"open": open, "replace": os.replace, "fsync": os.fsync}

        class File:
            def __init__(own, file) -> None:
                own.file = file

            def write(own, data) -> int:
                self.step("write", own.file.name)
                return own.file.write(data)

            def __getattr__(own, name):
                return getattr(own.file, name)

            def __enter__(own):
                return own

            def __exit__(own, *error) -> None:
                own.file.close()

        def opened(path, mode="r", **settings):
            if mode != "rb+":
                self.step("open", path)
            file = real["open"](path, mode, **settings)
            return file if mode == "rb+" else File(file)

        class System:
            def __getattr__(own, name):
                return getattr(os, name)

            def replace(own, old, new) -> None:
                self.step("replace", new)
                real["replace"](old, new)

            def fsync(own, number) -> None:
                self.step("fsync", "")

        true_save = PreTrainedModel.save_pretrained

        def save(model, folder) -> None:
            try:
                self.step("write", "model")
            except OSError as error:  # as safetensors tells it
                text = "Error while serializing: I/O error: No space left on device (os error 28)"
                raise SafetensorError(text) from error
            true_save(model, folder)

        monkeypatch.setattr(files, "open", opened, raising=False)
        monkeypatch.setattr(files, "os", System())
        monkeypatch.setattr(models, "os", System())
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)

    def arm(self, at: int, stays: bool) -> None:
        self.count, self.at, self.stays, self.labels = 0, at, stays, []

    def step(self, what: str, path) -> None:
        self.count += 1
        self.labels.append(f"{what} {Path(path).name}")
        if self.at and (self.count == self.at or (self.stays and self.count > self.at)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_an_error_at_each_operation(go, whole, tmp_path: Path, monkeypatch) -> None:
    """Each of them once: the disk is full for it, and at every second one ever after."""
    disk = Failing(monkeypatch)
    disk.arm(0, False)
    go(tmp_path / "counted")
    seen, failed = {}, set()
    for number, label in enumerate(disk.labels, 1):
        # The same operation of a later step is the same case; so is another part of a checkpoint.
        seen[label] = seen.get(label, 0) + 1
        if seen[label] == (2 if label == "write checkpoint.pt.tmp" else 1):
            out = tmp_path / f"{number}"
            disk.arm(number, stays=number % 2 == 0)
            with pytest.raises(WriteError) as caught:
                go(out)
            disk.arm(0, False)
            check_stopped(caught.value, out, "No space left on device")
            check_same(out, go(out)[1], whole)
            failed.add(label)
            shutil.rmtree(out)
    assert {"write model", "replace model", "write run.json.tmp", "write checkpoint.pt.tmp",
            "replace checkpoint.pt", "write metrics.jsonl", "fsync "} <= failed  # fmt: skip


def test_the_command_says_it_in_a_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    words = "train sft --task sort --size nano --sft-steps 2 --sft-batch-size 2 --quiet --threads 1"
    status = main([*words.split(), "--device", "cpu", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert status == 1
    assert said.startswith(f"rlcore: error: {tmp_path / 'run' / 'metrics.jsonl'} could not be wri")
    assert said.count("\n") == 1
    assert "usable" not in said  # a shell has no model and no error


def test_a_run_folder_that_cannot_be(make, coin, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(tmp_path / "nowhere" / "else")
    with pytest.raises(WriteError, match=r"run folder .*here could not be written"):
        train_sft(*make(), coin, steps=1, seed=0, progress=False, out=tmp_path / "here")
