"""Learning curves: right numbers, lines that can be told apart, the same bytes each time."""

from __future__ import annotations

import subprocess
import sys
import warnings

import matplotlib as mpl
import pytest

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from rlcore import plots
from rlcore.training import Run


@pytest.fixture(autouse=True)
def close_figures():
    with mpl.rc_context():
        yield
    plt.close("all")


def run(values: list[float], steps: list[int] | None = None) -> Run:
    steps = steps or list(range(1, len(values) + 1))
    rows = [{"step": s, "reward": v} for s, v in zip(steps, values, strict=True)]
    return Run(settings={}, metrics=rows)


SEEDS = [run([0.0, 0.5, 1.0]), run([0.2, 0.5, 0.6]), run([0.1, 0.8, 0.8])]


def band_of(ax) -> dict[float, tuple[float, float]]:
    """x -> (low, high) of the filled area."""
    points = ax.collections[0].get_paths()[0].vertices
    xs = sorted({x for x, _ in points})
    return {
        x: (min(y for a, y in points if a == x), max(y for a, y in points if a == x)) for x in xs
    }


def test_mean_and_band_over_seeds() -> None:
    ax = plots.learning_curves({"GRPO": SEEDS}, "reward")
    (line,) = ax.lines
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata().tolist() == pytest.approx([0.1, 0.6, 0.8])
    assert band_of(ax)[1] == pytest.approx((0.0, 0.2))
    assert band_of(ax)[3] == pytest.approx((0.6, 1.0))
    assert line.get_label() == "GRPO (3 seeds)"
    assert ax.get_legend().get_title().get_text() == "band: lowest to highest seed"
    assert ax.get_xlabel() == "step"
    assert ax.get_ylabel() == "mean reward of the step"


def test_confidence_band() -> None:
    ax = plots.learning_curves({"GRPO": SEEDS}, "reward", band="ci95")
    # At step 1: mean 0.1, sample std 0.1, t(2) = 4.303: half width 4.303 * 0.1 / sqrt(3).
    half = 4.303 * 0.1 / 3**0.5
    assert band_of(ax)[1] == pytest.approx((0.1 - half, 0.1 + half))
    assert ax.get_legend().get_title().get_text() == "band: 95 % CI of the mean"


def test_one_run_has_no_band_and_no_legend() -> None:
    ax = plots.learning_curves(SEEDS[0])
    assert not ax.collections
    assert ax.get_legend() is None


def test_smoothing_is_a_trailing_mean_per_run() -> None:
    ax = plots.learning_curves([run([0, 1, 2, 6])], smooth=2)
    assert ax.lines[0].get_ydata().tolist() == [0, 0.5, 1.5, 4]


def test_only_common_steps_are_drawn() -> None:
    ax = plots.learning_curves([run([1, 2, 3]), run([5, 6], [2, 3])])
    assert ax.lines[0].get_xdata().tolist() == [2, 3]
    with pytest.raises(ValueError, match="no step in common"):
        plots.learning_curves([run([1]), run([1], [9])])


def luminance(colour: str) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), to_rgb(colour), strict=True))


def test_runs_with_one_seed_are_not_called_seeds() -> None:
    def seeded(*seeds: int) -> list[Run]:
        return [Run(settings={"seed": s}, metrics=[{"step": 1, "reward": 0.5}]) for s in seeds]

    for seeds, label in (((0, 1), "GRPO (2 seeds)"), ((0, 0), "GRPO (2 runs)")):
        line = plots.learning_curves({"GRPO": seeded(*seeds)}).lines[0]
        assert line.get_label() == label


def test_curves_are_told_apart_without_colour() -> None:
    methods = {f"m{i}": run([i, i]) for i in range(7)}
    ax = plots.learning_curves(methods)
    styles = [(line._unscaled_dash_pattern, line.get_linestyle()) for line in ax.lines]
    assert len({str(style) for style in styles}) == 7
    assert len({line.get_color() for line in ax.lines}) == 7
    for colour in plots.COLOURS:
        assert luminance(colour) < 0.72  # visible on white


def test_svg_is_the_same_bytes_each_time() -> None:
    texts = []
    for _ in range(2):
        ax = plots.learning_curves({"GRPO": SEEDS, "RLOO": SEEDS[:2]}, title="Reward")
        texts.append(plots.svg(ax))
    assert texts[0] == texts[1]
    assert "<dc:date>" not in texts[0]
    assert "GRPO (3 seeds)" in texts[0]  # text stays text
    other = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]);"
         "from test_plots import *; print(plots.svg(plots.learning_curves("
         "{'GRPO': SEEDS, 'RLOO': SEEDS[:2]}, title='Reward')), end='')",
         __file__.rpartition("/")[0]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert other.stdout == texts[0]


def test_style_and_plots_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.use_style()
        ax = plots.learning_curves({"GRPO": [run([-1, 1]), run([0, 1])]}, ylim=(-1, 1))
        plots.svg(ax)
    assert mpl.rcParams["figure.facecolor"] == "white"
    assert len(mpl.rcParams["axes.prop_cycle"]) == 7
    assert ax.get_ylim() == (-1, 1)


def test_draws_into_given_axes() -> None:
    _, axes = plt.subplots(1, 2)
    assert plots.learning_curves(SEEDS, ax=axes[1]) is axes[1]
    assert not axes[0].lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"band": "std"}, "band: found 'std'; wanted one of minmax, ci95, none"),
        ({"smooth": 0}, "smooth: found 0"),
        ({"smooth": 1.5}, "smooth: found 1.5"),
        ({"y": "rewards"}, "name: found 'rewards'; this run recorded reward, step"),
        ({"runs": {}}, "runs: found no run"),
        ({"runs": []}, "runs: found an empty list"),
        ({"runs": {"GRPO": []}}, "runs: found an empty list"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.learning_curves(**{"runs": SEEDS, **change})


def test_importing_plots_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, rlcore.plots;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
