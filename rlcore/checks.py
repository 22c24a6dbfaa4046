"""What training, sampling and evaluation ask of their arguments."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from rlcore.locks import is_held

SEEDS = 2**63  # torch takes no larger seed
COUNTS = 2**31 - 1  # more of anything would never end, and is a slip


def shown(value: Any) -> str:
    """A value as an error message shows it: in short, however large it is."""
    from rlcore.objectives._checks import short  # which loads torch: only where there is an error

    return short(value, longest=100)


def check_whole(at_least: int, at_most: float = COUNTS, **values: int | None) -> None:
    """ValueError unless each value is a whole number from `at_least` to `at_most`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(
                f"{name}: found {shown(value)}; wanted a whole number of at least {at_least}"
            )
        if value > at_most:
            raise ValueError(f"{name}: found {shown(value)}; wanted at most {at_most:,}")


def check_threads(threads: int | None) -> None:
    """ValueError unless it is None or a number of threads that a machine may start."""
    if threads is not None:
        check_whole(1, 1024, threads=threads)


def check_seed(seed: int) -> None:
    """ValueError unless it is a whole number from 0 to 2**63 - 1."""
    check_whole(0, math.inf, seed=seed)
    if seed >= SEEDS:
        raise ValueError(f"seed: found {shown(seed)}; wanted a whole number below 2**63")


def check_positive(**values: float) -> None:
    """ValueError unless each value is a finite number above 0 that is one in float32 too."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ValueError(f"{name}: found {shown(value)}; wanted a finite number above 0")
        if value > 1e30:
            raise ValueError(f"{name}: found {shown(value)}; wanted at most 1e30, for float32")


def check_temperature(
    temperature: float,
    name: str = "temperature",
    greedy: str = "for the most likely token use greedy=True",
) -> None:
    """ValueError unless it is a finite number above 0 by which float32 logits can be divided.

    name: what the error calls it. greedy: what the error says to who wants the limit of 0.
    """
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < math.inf:
        raise ValueError(
            f"{name}: found {shown(temperature)}; wanted a finite number above 0 ({greedy})"
        )
    if not 1e-30 <= temperature <= 1e30:
        raise ValueError(f"{name}: found {shown(temperature)}; wanted 1e-30 to 1e30, for float32")


def check_final(final_learning_rate: float) -> None:
    """ValueError unless it is a share of the first learning rate."""
    if not isinstance(final_learning_rate, int | float) or not 0 <= final_learning_rate <= 1:
        raise ValueError(f"final_learning_rate: found {shown(final_learning_rate)}; wanted 0 to 1")


def brief(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return ": ".join([type(error).__name__, *words(error).splitlines()[:1]])


def words(something: Any) -> str:
    """Its text without space around it; "" where it has none, and where asking for it fails."""
    try:
        return str(something).strip()
    except Exception:  # an error of somebody else's may fail here too
        return ""


def check_folder(out: Any, resume: bool) -> None:
    """ValueError for a resume without a folder, for no folder, and for one with another run, or
    that a run is writing now."""
    if resume and out is None:
        raise ValueError("resume: needs out, the folder of the run to go on with")
    if out is not None and not os.fspath(out):
        raise ValueError("out: found ''; wanted the name of a folder")
    if out is not None:
        for path in (Path(out), *Path(out).parents):
            if path.exists() and not path.is_dir():
                raise ValueError(f"out: {str(out)!r} cannot be a folder: {str(path)!r} is a file")
    if out is not None and is_held(out):
        raise in_use(out)
    if out is not None and not resume and (Path(out) / "run.json").exists():
        raise ValueError(
            f"out: {str(out)!r} already holds a run; resume=True (--resume) goes on with it"
        )


def in_use(out: Any) -> ValueError:
    """The error for a folder that is being written."""
    return ValueError(
        f"out: {str(out)!r} is being written by another run; wanted a folder of its own, or its end"
    )
