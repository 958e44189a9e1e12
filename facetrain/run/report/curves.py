"""Curves of a run over its steps: loss, accuracy, learning rate and speed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from facetrain.pages.figures import curve_label, new_figure, show_as_text
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
_HEIGHT = 2.4
_LABEL_HEIGHT, _FRAME_HEIGHT = 0.22, 0.6
"""Inches of a label of a legend, and of what is above and below the legend."""
PANELS = ("loss", _ACCURACY, "lr", "images_per_s")
_COLOR = "#3b82c4"
"""Of a single curve: a blue that is legible on a light and on a dark page."""
_MARKS: dict[str, Any] = {"marker": "o", "markersize": 3}
_STYLES: list[dict[str, Any]] = [
    {"linestyle": line, "marker": marker, "markersize": 3}
    for marker in "os^D"
    for line in ("-", "--", ":", "-.")
]
"""Of the verification sets where a color is a run."""


def draw_curve(
    runs: Mapping[str, History],
    panel: str,
    *,
    published: PublishedCurve | None = None,
    width: float = WIDTH,
) -> Figure:
    """Return a figure of one of `_LABELS` over the steps; `width` is in inches.

    A value that is not finite is a gap. A metric that no record has is left out. With several runs, by name, each has
    the same color in all figures, and each verification set a line style; with one, each verification set has a color.
    The accuracies of a published training are dashed lines in the colors of the sets.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(width, _HEIGHT)
    axes.set(xlabel="step", ylabel=_LABELS[panel])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    if panel == _ACCURACY and len(runs) == 1:
        _draw_accuracies(axes, next(iter(runs.values())), published)
    elif panel == _ACCURACY:
        _compare_accuracies(axes, runs)
    else:
        for (name, history), color in zip(runs.items(), _colors(len(runs)), strict=True):
            if panel in history.metrics:
                axes.plot(*history.metrics[panel].curve, color=color, label=curve_label(name))
    if panel == _ACCURACY or len(runs) > 1:
        _add_legend(axes)
    return figure


def draw_range_test(test: RangeTest) -> Figure:
    """Return a figure of the loss over the learning rate, with a line at the chosen rate."""
    figure, axes = new_figure(WIDTH, _HEIGHT)
    axes.semilogx(test.rates[: len(test.losses)], test.losses, color=_COLOR)
    axes.axvline(test.lr, color="#c8553d")
    axes.set(xlabel="learning rate", ylabel="loss")
    return figure


def _colors(count: int) -> list[Any]:
    """Return the colors of so many runs or sets; after twenty, they repeat."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    # The colormap has a dark and a light blue, a dark and a light orange, and so on.
    order = [*range(0, 20, 2), *range(1, 20, 2)]
    return [_COLOR] if count == 1 else list(map(to_hex, colormaps["tab20"](np.resize(order, count))))


def _draw_accuracies(axes: Any, history: History, published: PublishedCurve | None) -> None:
    for name, color in zip(sorted(history.sets), _colors(len(history.sets)), strict=True):
        axes.plot(*_accuracies(history, name), color=color, label=curve_label(name), **_MARKS)
        if published and name in published.accuracies:
            axes.plot(published.steps, 100 * published.accuracies[name], "--", color=color, linewidth=1)


def _compare_accuracies(axes: Any, runs: Mapping[str, History]) -> None:
    """Draw the accuracies of several runs; the legend has the runs and then the sets, not all pairs of them."""
    sets = sorted({name for history in runs.values() for name in history.sets})
    for (run, history), color in zip(runs.items(), _colors(len(runs)), strict=True):
        if history.sets:
            axes.plot([], [], color=color, label=curve_label(run))
        for name, style in zip(sets, cycle(_STYLES), strict=False):
            if name in history.sets:
                axes.plot(*_accuracies(history, name), color=color, **style)
    for name, style in zip(sets, cycle(_STYLES), strict=False):
        axes.plot([], [], color="black", label=curve_label(name), **style)


def _accuracies(history: History, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the accuracies in percent of a verification set."""
    steps, values = history.metrics[f"{name}/accuracy"].curve
    return steps, [100 * value for value in values]


def _add_legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        show_as_text(
            axes.legend(handles, labels, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        )
        # The axes are only as high as what is left above and below a higher legend.
        axes.figure.set_figheight(max(_HEIGHT, _FRAME_HEIGHT + _LABEL_HEIGHT * len(labels)))
