"""Curves of a run over its steps: loss, accuracy, learning rate and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from facetrain.pages.figures import curve_label, show_as_text
from facetrain.run.lr_range_test import RangeTest
from facetrain.run.report.history import History
from facetrain.run.report.published_curve import PublishedCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACCURACY = "accuracy"
"""Panel of the accuracies of all verification sets."""
_LABELS = {
    "loss": "loss",
    _ACCURACY: "accuracy (%)",
    "lr": "learning rate",
    "images_per_s": "images per second",
    "distill_loss": "loss to the teacher",
}
"""Panel -> label of its axis."""
PANELS = ("loss", _ACCURACY, "lr", "images_per_s")
_COLOR = "#3b82c4"
"""Of a curve without a legend: a blue that is legible on a light and on a dark page."""


def draw_curves(
    runs: Mapping[str, History],
    panels: Sequence[str] = PANELS,
    *,
    published: PublishedCurve | None = None,
    width: float = 7.0,
) -> Figure:
    """Return a figure with one panel above the other, over a common axis of steps; `width` is in inches.

    A value that is not finite is a gap. Metrics that no record has are left out, but their panel is drawn. With several
    runs, by name, each has a color; with one, each verification set has. The accuracies of a published training are
    dashed lines in the colors of the sets.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Constrained, so that a legend beside the curves takes room from the panels and covers no points.
    figure = Figure(figsize=(width, 0.2 + 2.2 * len(panels)), dpi=120, layout="constrained")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_ylabel(_LABELS[panel])
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
    rows[-1].set_xlabel("step")
    rows[-1].xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    return figure


def draw_range_test(test: RangeTest, *, width: float = 7.0) -> Figure:
    """Return a figure of the loss over the learning rate, with a line at the chosen rate; `width` is in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 2.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.semilogx(test.rates[: len(test.losses)], test.losses, color=_COLOR)
    axes.axvline(test.lr, color="#c8553d")
    axes.set(xlabel="learning rate", ylabel="loss")
    return figure


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
