"""Curves of a run over its steps: loss, accuracy, learning rate and speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from facetrain.run.lr_range_test import RangeTest
from facetrain.run.report.published_curve import PublishedCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {"loss": "loss", "lr": "learning rate", "images_per_s": "images per second"}
"""Label of the axis of each metric with a separate panel."""
_ACCURACY = "accuracy"
"""Panel of the accuracies of all verification sets."""
PANELS = ("loss", _ACCURACY, "lr", "images_per_s")


def draw_curves(
    records: Iterable[dict[str, Any]],
    title: str,
    panels: Sequence[str] = PANELS,
    *,
    published: PublishedCurve | None = None,
    width: float = 7.0,
) -> Figure:
    """Return a figure with one panel above the other, over a common axis of steps; `width` is in inches.

    A value that is not finite is a gap. Metrics that no record has are left out, but their panel is drawn. The
    accuracies of a published training are dashed lines in the colors of the verification sets.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    records = list(records)
    # Constrained, so that the legend beside the accuracies takes room from the panels and covers no points.
    figure = Figure(figsize=(width, 0.5 + 1.9 * len(panels)), dpi=120, layout="constrained")
    figure.suptitle(title).set_parse_math(False)  # a folder may have a $ in its name
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if panel == _ACCURACY:
            _draw_accuracies(axes, records, published)
        else:
            axes.plot(*_points(records, panel), color="tab:gray")
            axes.set_ylabel(_LABELS[panel])
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
    axes.semilogx(test.rates[: len(test.losses)], test.losses, color="tab:gray")
    axes.axvline(test.lr, color="tab:blue")
    axes.set(xlabel="learning rate", ylabel="loss")
    return figure


def _draw_accuracies(axes: Any, records: list[dict[str, Any]], published: PublishedCurve | None) -> None:
    axes.set_ylabel("accuracy (%)")
    names = sorted({name for record in records for name in record if name.endswith("/accuracy")})
    for name in names:
        steps, values = _points(records, name)
        label = name.removesuffix("/accuracy")
        (line,) = axes.plot(steps, [100 * value for value in values], marker="o", markersize=4, label=label)
        if published and label in published.accuracies:
            percent = 100 * published.accuracies[label]
            axes.plot(published.steps, percent, "--", color=line.get_color(), linewidth=1)
    if names:
        legend = axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for text in legend.get_texts():
            text.set_parse_math(False)


def _points(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric; a value that is not a number becomes NaN, which is drawn as a gap."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [
        float(value) if isinstance(value, int | float) else float("nan") for _, value in points
    ]
