"""Figures of a result: ROC, DET, score histogram, thresholds of the folds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from facetrain.verify.metrics.discard import LARGEST_SHARE
from facetrain.verify.metrics.fold_accuracy import FoldAccuracy
from facetrain.verify.metrics.result import Histogram, Result, thin_curve
from facetrain.verify.metrics.roc import Roc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GENUINE, _IMPOSTOR, _MARK = "#1b6ca8", "#c8553d", "#555555"
_LEGEND_CHARACTERS = 45
"""Characters of all labels up to which a legend is one line."""
_PAIR_RATES = ("false accept rate", "true accept rate", "false reject rate")
_SEARCH_RATES = tuple(
    f"{kind} identification rate" for kind in ("false positive", "true positive", "false negative")
)


def result_figures(result: Result, other: Result | None = None) -> dict[str, Figure]:
    """Return the figures that a result has data for: `roc`, `det`, `scores`, `discard`, `folds`.

    They also show the result of an `other` model on the same set; scores and folds only if both have the same scale.
    """
    from matplotlib.figure import Figure

    rates = _SEARCH_RATES if result.protocol == "identification" else _PAIR_RATES
    false_accept, true_accept, false_reject = rates
    other_curve = other.curve if other else None
    drawers: dict[str, tuple[Any, Callable[[Any, Any], None]]] = {
        "roc": (
            result.curve,
            lambda axes, curve: _draw_roc(axes, curve, other_curve, false_accept, true_accept),
        ),
        "det": (
            result.curve,
            lambda axes, curve: _draw_det(axes, curve, other_curve, false_accept, false_reject),
        ),
        "scores": (result.histogram, lambda axes, scores: _draw_scores(axes, scores, result, other)),
        "discard": (result.discards or None, lambda axes, _: _draw_discards(axes, result, other)),
        "folds": (result.folds, lambda axes, folds: _draw_folds(axes, folds, result, other)),
    }
    figures = {}
    for name, (data, draw) in drawers.items():
        if data is not None:
            # Figure, not pyplot.figure: pyplot keeps every figure in memory until it is closed, and may need a display.
            figures[name] = Figure(figsize=(5, 3.6), dpi=120, layout="constrained")
            axes = figures[name].subplots()
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            draw(axes, data)
            labels = axes.get_legend_handles_labels()[1]
            if labels:
                # Below the axes, where it cannot cover the data. Three long labels are wider than the figure.
                ncols = 3 if sum(map(len, labels)) <= _LEGEND_CHARACTERS else 1
                figures[name].legend(loc="outside lower center", ncols=ncols, frameon=False)
    return figures


def figure_images(result: Result) -> dict[str, np.ndarray]:
    """Return the figures of a result as pixels, uint8 (H, W, 3) by name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    images = {}
    for name, figure in result_figures(result).items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        images[name] = np.asarray(canvas.buffer_rgba())[:, :, :3]
    return images


def _draw_roc(axes: Any, curve: Roc, other: Roc | None, xlabel: str, ylabel: str) -> None:
    lowest_tar = 1.0
    for each, style in _curves(curve, other):
        points = thin_curve(each)
        axes.step(points["far"], points["tar"], where="post", **style)
        lowest_tar = min(lowest_tar, float(np.interp(_min_far(curve), points["far"], points["tar"])))
    axes.set(xscale="log", xlim=(_min_far(curve), 1), ylim=(lowest_tar - 0.02, 1.005))
    axes.set(title="ROC", xlabel=xlabel, ylabel=ylabel)


def _curves(curve: Roc, other: Roc | None) -> list[tuple[Roc, dict[str, str]]]:
    """Return the curves of one or two models, with their style; a single curve needs no label."""
    if other is None:
        return [(curve, {"color": _GENUINE})]
    return [
        (curve, {"color": _GENUINE, "label": "this model"}),
        (other, {"color": _IMPOSTOR, "label": "other model", "linestyle": "--"}),
    ]


def _draw_det(axes: Any, curve: Roc, other: Roc | None, xlabel: str, ylabel: str) -> None:
    """Draw the detection error tradeoff curve: false rejects over false accepts (ISO/IEC 19795-1)."""
    for each, style in _curves(curve, other):
        points = thin_curve(each)
        rejected = 1 - np.array(points["tar"])
        # A logarithmic axis cannot show 0.
        visible = rejected > 0
        axes.step(np.array(points["far"])[visible], rejected[visible], where="post", **style)
    axes.plot([_min_far(curve), 1], [_min_far(curve), 1], color=_MARK, linestyle=":", label="equal error")
    axes.set(xscale="log", yscale="log", xlim=(_min_far(curve), 1))
    axes.set(title="DET", xlabel=xlabel, ylabel=ylabel)


def _draw_scores(axes: Any, scores: Histogram, result: Result, other: Result | None) -> None:
    for label, count, color in (
        ("genuine", scores.genuine, _GENUINE),
        ("impostor", scores.impostor, _IMPOSTOR),
    ):
        # Shares, not counts: a set may have a thousand times as many impostor pairs as genuine pairs.
        share = count / max(count.sum(), 1)
        axes.stairs(share, scores.edge, fill=True, alpha=0.6, color=color, label=f"{label} ({count.sum():,})")
    filled = scores.edge[:-1][scores.genuine + scores.impostor > 0]
    if other and other.histogram and other.scale == result.scale:
        theirs = other.histogram
        for count, color, named in (
            (theirs.genuine, _GENUINE, "other model"),
            (theirs.impostor, _IMPOSTOR, None),
        ):
            axes.stairs(count / max(count.sum(), 1), theirs.edge, color=color, linestyle="--", label=named)
        filled = np.append(filled, theirs.edge[:-1][theirs.genuine + theirs.impostor > 0])
    if "eer" in result.threshold:
        axes.axvline(result.threshold["eer"], color=_MARK, linestyle="--", label="equal error")
    if len(filled):
        width, margin = scores.edge[1] - scores.edge[0], (scores.edge[-1] - scores.edge[0]) / 100
        axes.set_xlim(filled.min() - margin, filled.max() + width + margin)
    axes.set(title="Scores", xlabel=result.scale.name, ylabel="share of pairs")


def _draw_discards(axes: Any, result: Result, other: Result | None) -> None:
    """Draw the false non-match rate over the share of discarded genuine pairs, and what random discarding gives."""
    curves = [
        (curve, curve.quality, color)
        for curve, color in zip(result.discards, (_GENUINE, _MARK), strict=False)
    ]
    if other:
        curves += [(curve, f"{curve.quality}, other model", _IMPOSTOR) for curve in other.discards[:1]]
    for curve, label, color in curves:
        axes.step(curve.share, curve.fnmr, where="post", color=color, label=label)
    axes.axhline(result.discards[0].fnmr[0], color=_MARK, linestyle=":", label="random")
    axes.set(xlim=(0, LARGEST_SHARE), ylim=(0, None))
    axes.set(
        title="Error versus discard", xlabel="share of discarded genuine pairs", ylabel="false non-match rate"
    )


def _draw_folds(axes: Any, folds: FoldAccuracy, result: Result, other: Result | None) -> None:
    scale = result.scale
    fold = np.arange(1, len(folds.accuracy_F) + 1)
    score_F = scale.score(folds.threshold_F)
    axes.plot(fold, score_F, "o", color=_GENUINE)
    axes.axhline(score_F.mean(), color=_MARK, linestyle="--", label=f"mean {score_F.mean():.3f}")
    for x, threshold, accuracy in zip(fold, score_F, folds.accuracy_F, strict=True):
        label = axes.annotate(
            f"{accuracy:.1%}", (x, threshold), (0, 6), textcoords="offset points", ha="center", size=7
        )
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    if other and other.folds and other.scale == scale:
        theirs_F = scale.score(other.folds.threshold_F)
        axes.plot(
            fold[: len(theirs_F)],
            theirs_F,
            "x",
            color=_IMPOSTOR,
            label=f"other model, mean {theirs_F.mean():.3f}",
        )
        score_F = np.append(score_F, theirs_F)
    margin = (scale.high - scale.low) / 40
    axes.set_ylim(score_F.min() - margin, score_F.max() + margin)
    axes.set_xticks(fold)
    axes.set(title="Threshold and accuracy by fold", xlabel="fold", ylabel=f"threshold ({scale.name})")


def _min_far(curve: Roc) -> float:
    """Return the left end of the FAR axis: the smallest rate that the set can measure, at most 0.1."""
    return 1 / max(curve.impostors, 10)
