"""Curves of a run over its steps: loss, accuracy, learning rate and speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from facetrain.pages.figures import curve_label, show_as_text
from facetrain.run.lr_range_test import RangeTest
from facetrain.run.report.history import History
from facetrain.run.report.published_curve import PublishedCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACCURACY = "accuracy"
"""Figure of the accuracies of all verification sets."""
_LABELS = {
    "loss": "loss",
    _ACCURACY: "accuracy (%)",
    "lr": "learning rate",
    "images_per_s": "images per second",
    "distill_loss": "loss to the teacher",
}
"""What a figure shows -> label of its axis."""
WIDTH = 5.0
"""Inches of a figure: in a wider one, the text would be too small on a narrow screen."""
PANELS = ("loss", _ACCURACY, "lr", "images_per_s")
_COLOR = "#3b82c4"
"""Of a curve without a legend: a blue that is legible on a light and on a dark page."""


def draw_curve(
    runs: Mapping[str, History],
    panel: str,
    *,
    published: PublishedCurve | None = None,
    width: float = WIDTH,
) -> Figure:
    """Return a figure of one of `_LABELS` over the steps; `width` is in inches.

    A value that is not finite is a gap. A metric that no record has is left out. With several runs, by name, each has a
    color; with one, each verification set has. The accuracies of a published training are dashed lines in the colors of
    the sets.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _empty_figure(width)
    axes.set(xlabel="step", ylabel=_LABELS[panel])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    if panel == _ACCURACY:
        _draw_accuracies(axes, runs, published)
    else:
        for name, history in runs.items():
            if panel in history.metrics:
                axes.plot(
                    *history.metrics[panel].curve,
                    color=_COLOR if len(runs) == 1 else None,
                    label=curve_label(name),
                )
    if panel == _ACCURACY or len(runs) > 1:
        _add_legend(axes)
    return figure


def draw_range_test(test: RangeTest) -> Figure:
    """Return a figure of the loss over the learning rate, with a line at the chosen rate."""
    figure, axes = _empty_figure(WIDTH)
    axes.semilogx(test.rates[: len(test.losses)], test.losses, color=_COLOR)
    axes.axvline(test.lr, color="#c8553d")
    axes.set(xlabel="learning rate", ylabel="loss")
    return figure


def _empty_figure(width: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    # Constrained, so that a legend beside the curves takes room from the axes and covers no points.
    figure = Figure(figsize=(width, 2.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _draw_accuracies(axes: Any, runs: Mapping[str, History], published: PublishedCurve | None) -> None:
    for run, history in runs.items():
        for name in sorted(history.sets):
            steps, values = history.metrics[f"{name}/accuracy"].curve
            label = curve_label(name if len(runs) == 1 else f"{run}: {name}")
            percent = [100 * value for value in values]
            (line,) = axes.plot(steps, percent, marker="o", markersize=3, label=label)
            if published and name in published.accuracies:
                expected = 100 * published.accuracies[name]
                axes.plot(published.steps, expected, "--", color=line.get_color(), linewidth=1)


def _add_legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        show_as_text(
            axes.legend(handles, labels, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        )
