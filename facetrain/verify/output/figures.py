"""Figures of a result: ROC, DET, score histogram."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from facetrain.pages.figures import curve_label, new_figure, show_as_text
from facetrain.verify.metrics.discard import LARGEST_SHARE
from facetrain.verify.metrics.result import Result, thin_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GENUINE, _IMPOSTOR, _MARK = "#3b82c4", "#d2603f", "#808080"  # legible on a light and on a dark page
_LEGEND_CHARACTERS = 45
"""Characters of all labels up to which a legend is one line."""


def result_figures(
    result: Result, other: Result | None = None, names: tuple[str, str] = ("model", "other model")
) -> dict[str, Figure]:
    """Return the figures that a result has data for: `roc`, `det`, `scores`, `discard`.

    The curves also show the result of an `other` model on the same set; `names` are those of the two models.
    """
    drawers: dict[str, tuple[object, Callable[[Any, Result, Result | None, tuple[str, str]], None]]] = {
        "roc": (result.curves, _draw_roc),
        "det": (result.curves, _draw_det),
        "scores": (result.histogram, _draw_scores),
        "discard": (result.discards, _draw_discards),
    }
    figures = {}
    for name, (data, draw) in drawers.items():
        if not data:
            continue
        figures[name], axes = new_figure(5, 3.6)
        draw(axes, result, other, names)
        labels = axes.get_legend_handles_labels()[1]
        if labels:
            # Below the axes, where it cannot cover the data. Three long labels are wider than the figure.
            ncols = 3 if sum(map(len, labels)) <= _LEGEND_CHARACTERS else 1
            legend = figures[name].legend(loc="outside lower center", ncols=ncols, frameon=False)
            show_as_text(legend)
    return figures


def _curves(
    result: Result, other: Result | None, names: tuple[str, str]
) -> list[tuple[dict[str, list[float]], dict[str, str]]]:
    """Return the points of the curves of one or two models, and their style; a single curve needs no label."""
    models = [(names[0], _GENUINE, result)]
    if other is not None and other.curves:
        models.append((names[1], _IMPOSTOR, other))
    curves = [
        (curve, color, [name] * (len(models) > 1) + [gallery] * (gallery != ""))
        for name, color, model in models
        for gallery, curve in model.curves.items()
    ]
    return [
        (thin_curve(curve), {"color": color, "linestyle": line, "label": curve_label(", ".join(parts))})
        for (curve, color, parts), line in zip(curves, cycle(("-", "--", "-.", ":")), strict=False)
    ]


def _rate_names(result: Result) -> tuple[str, str, str]:
    """Return the names of false and true accept rate and of the false reject rate in a protocol."""
    if result.protocol != "identification":
        return "false accept rate", "true accept rate", "false reject rate"
    kinds = "false positive", "true positive", "false negative"
    first, second, third = (f"{kind} identification rate" for kind in kinds)
    return first, second, third


def _min_far(result: Result) -> float:
    """Return the left end of the FAR axis: the smallest rate that the set can measure, at most 0.1."""
    return 1 / max(result.fewest_impostors, 10)


def _draw_roc(axes: Any, result: Result, other: Result | None, names: tuple[str, str]) -> None:
    lowest_tar, left = 1.0, _min_far(result)
    for points, style in _curves(result, other, names):
        axes.step(points["far"], points["tar"], where="post", **style)
        lowest_tar = min(lowest_tar, float(np.interp(left, points["far"], points["tar"])))
    false_accept, true_accept, _ = _rate_names(result)
    axes.set(xscale="log", xlim=(left, 1), ylim=(lowest_tar - 0.02, 1.005))
    axes.set(title="ROC", xlabel=false_accept, ylabel=true_accept)


def _draw_det(axes: Any, result: Result, other: Result | None, names: tuple[str, str]) -> None:
    """Draw the detection error tradeoff curve: false rejects over false accepts (ISO/IEC 19795-1)."""
    left = _min_far(result)
    for points, style in _curves(result, other, names):
        rejected = 1 - np.array(points["tar"])
        # A logarithmic axis cannot show 0.
        visible = rejected > 0
        axes.step(np.array(points["far"])[visible], rejected[visible], where="post", **style)
    axes.plot([left, 1], [left, 1], color=_MARK, linestyle=":", label="equal error")
    false_accept, _, false_reject = _rate_names(result)
    axes.set(xscale="log", yscale="log", xlim=(left, 1))
    axes.set(title="DET", xlabel=false_accept, ylabel=false_reject)


def _draw_scores(axes: Any, result: Result, *_: object) -> None:
    scores = result.histogram
    assert scores is not None
    filled = scores.edge[:-1][scores.genuine + scores.impostor > 0]
    # Shares, not counts: a set may have a thousand times as many impostor pairs as genuine pairs.
    kinds = ("genuine", scores.genuine, _GENUINE), ("impostor", scores.impostor, _IMPOSTOR)
    for kind, count, color in kinds:
        label = f"{kind} ({count.sum():,})"
        axes.stairs(count / max(count.sum(), 1), scores.edge, fill=True, alpha=0.6, color=color, label=label)
    if "eer" in result.threshold:
        axes.axvline(result.threshold["eer"], color=_MARK, linestyle="--", label="equal error")
    width, margin = scores.edge[1] - scores.edge[0], (scores.edge[-1] - scores.edge[0]) / 100
    axes.set_xlim(filled.min() - margin, filled.max() + width + margin)
    axes.set(title="Scores", xlabel=result.scale.name, ylabel="share of pairs")


def _draw_discards(axes: Any, result: Result, other: Result | None, names: tuple[str, str]) -> None:
    """Draw the false non-match rate over the share of discarded genuine pairs, and what random discarding gives."""
    curves = [
        (curve, curve_label(curve.quality), color)
        for curve, color in zip(result.discards, (_GENUINE, _MARK), strict=False)
    ]
    if other:
        curves += [
            (curve, curve_label(f"{curve.quality}, {names[1]}"), _IMPOSTOR) for curve in other.discards[:1]
        ]
    for curve, label, color in curves:
        # Without the points beyond: the rate of the last few pairs may be 100 %. The last rate holds up to the end.
        share, fnmr = curve.share[curve.share < LARGEST_SHARE], curve.fnmr[curve.share < LARGEST_SHARE]
        shown = np.append(share, LARGEST_SHARE), np.append(fnmr, fnmr[-1])
        axes.step(*shown, where="post", color=color, label=label)
    axes.axhline(result.discards[0].fnmr[0], color=_MARK, linestyle=":", label="random")
    if other and other.discards:
        label = curve_label(f"random, {names[1]}")
        axes.axhline(other.discards[0].fnmr[0], color=_IMPOSTOR, linestyle=":", label=label)
    axes.set(xlim=(0, LARGEST_SHARE), ylim=(0, None))
    axes.set(
        title="Error versus discard", xlabel="share of discarded genuine pairs", ylabel="false non-match rate"
    )
