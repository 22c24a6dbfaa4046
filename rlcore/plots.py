"""Learning curves, drawn alike across the book.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; each curve has its own line
style too, so that a print in grey can be read. `transformers` and `torch` are not needed here.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.comparison import standard_error, t95

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (7, 3)), (0, (1, 3)))
BANDS = ("minmax", "ci95", "none")
LABELS = {
    "reward": "mean reward of the step",
    "sampled": "held-out accuracy, sampled",
    "greedy": "held-out accuracy, greedy",
    "entropy": "entropy (nats per token)",
    "kl": "KL to the start (nats per token)",
    "frac_reward_zero_std": "share of all-equal groups",
    "length": "tokens per response",
    "mean_length": "tokens per response, held-out",
    "grad_norm": "gradient norm",
    "loss": "loss",
}
# Text stays text, so that it can be searched and read aloud; ids do not change from run to run.
SVG: Any = {"svg.hashsalt": "rlcore", "svg.fonttype": "none"}

Curve = tuple[Sequence[int], Sequence[float]]


def use_style() -> None:
    """The book's look for every figure that follows; in a notebook also as SVG, the same each time.

    White background (the pages frame it in dark mode), colours and line styles of this module in
    turn, and no date or random id in an SVG file, so that a rebuild changes nothing.
    """
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=COLOURS) + cycler(linestyle=LINES),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": "medium",
            "figure.facecolor": "white",
            "font.size": 10,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "savefig.facecolor": "white",
            **SVG,
        }
    )
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})


def learning_curves(
    runs: Any,
    y: str = "reward",
    *,
    band: str = "minmax",
    smooth: int = 1,
    ylabel: str | None = None,
    xlabel: str = "step",
    title: str | None = None,
    ylim: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Mean over seeds of a metric against the step, with a band; returns the axes.

    runs: one run, a list of runs (seeds of one method), or a mapping from a label to either. A run
    is a `Run`, or anything with `curve(name) -> (steps, values)`.
    band: "minmax" spans the lowest to the highest seed; "ci95" is the 95 % confidence interval of
    the mean over seeds (Student's t); "none". The legend says which, and how many seeds.
    smooth: each value is the mean of the last `smooth` recorded ones, per run, before averaging.
    Only steps that every seed of a method recorded are drawn.

    Raises ValueError for no runs, an unknown band, smooth < 1, a metric that a run lacks, and seeds
    without a step in common.
    """
    if band not in BANDS:
        raise ValueError(f"band: found {band!r}; wanted one of {', '.join(BANDS)}")
    if isinstance(smooth, bool) or not isinstance(smooth, int) or smooth < 1:
        raise ValueError(f"smooth: found {smooth!r}; wanted a whole number of at least 1")
    methods = runs if isinstance(runs, Mapping) else {"": runs}
    if not methods:
        raise ValueError("runs: found no run; wanted at least one")
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")[1]
    for number, (label, seeds) in enumerate(methods.items()):
        curves = [_smooth(run.curve(y), smooth) for run in _as_list(seeds)]
        steps, low, mean, high = _over_seeds(curves, band)
        colour = COLOURS[number % len(COLOURS)]
        line = LINES[number % len(LINES)]
        several = f" ({len(curves)} {_what(_as_list(seeds))})" if len(curves) > 1 else ""
        ax.plot(steps, mean, color=colour, linestyle=line, linewidth=1.8, label=label + several)
        if len(curves) > 1 and band != "none":
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(LABELS.get(y, y) if ylabel is None else ylabel)
    if title is not None:
        ax.set_title(title)
    if ylim is not None:
        ax.set_ylim(*ylim)
    if any(label for label in methods) or any(len(_as_list(s)) > 1 for s in methods.values()):
        meaning = {"minmax": "band: lowest to highest seed", "ci95": "band: 95 % CI of the mean"}
        shown = band in meaning and any(len(_as_list(s)) > 1 for s in methods.values())
        ax.legend(title=meaning[band] if shown else None, frameon=False)
    return ax


def svg(figure: Figure | Axes) -> str:
    """The figure as SVG text: the same figure gives the same text, byte for byte."""
    import matplotlib

    whole: Any = getattr(figure, "figure", None) or figure
    buffer = io.StringIO()
    with matplotlib.rc_context(SVG):
        whole.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()


def _what(runs: Sequence[Any]) -> str:
    """What they are: runs with the same seed twice are not as many seeds."""
    seeds = [getattr(run, "settings", {}).get("seed") for run in runs]
    known = [seed for seed in seeds if seed is not None]
    return "seeds" if len(set(known)) == len(known) else "runs"


def _as_list(runs: Any) -> list[Any]:
    found = list(runs) if isinstance(runs, Iterable) else [runs]
    if not found:
        raise ValueError("runs: found an empty list; wanted at least one run")
    return found


def _smooth(curve: Curve, window: int) -> Curve:
    steps, values = curve
    means = [
        math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1)
        for i in range(len(values))
    ]
    return steps, means


def _over_seeds(
    curves: list[Curve], band: str
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all share, and low, mean and high of the values there."""
    tables = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    if not steps:
        raise ValueError("runs: the seeds of a method have no step in common")
    low, mean, high = [], [], []
    for step in steps:
        values = [table[step] for table in tables]
        n, centre = len(values), math.fsum(values) / len(values)
        mean.append(centre)
        if band == "ci95" and n > 1:
            margin = t95(n) * standard_error(values)
            low.append(centre - margin)
            high.append(centre + margin)
        else:
            low.append(min(values))
            high.append(max(values))
    return steps, low, mean, high
