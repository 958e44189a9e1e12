"""What a result looks like: curves, scores, folds. Needs matplotlib (facetrain[plot])."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from facetrain.errors import UsageError
from facetrain.verify.fold_accuracy import FoldAccuracy
from facetrain.verify.result import Histogram, Result, thin_curve
from facetrain.verify.roc import Roc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GENUINE, _IMPOSTOR, _MARK = "#1b6ca8", "#c8553d", "#555555"
_OF_PAIRS = ("false accept rate", "true accept rate", "false reject rate")
_OF_SEARCHES = tuple(
    f"{kind} identification rate" for kind in ("false positive", "true positive", "false negative")
)


def require_matplotlib() -> None:
    """Refuse to draw where nothing can be drawn with.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("figures need matplotlib: install facetrain[plot]")


def result_figures(result: Result) -> dict[str, Figure]:
    """Draw what a result has: `roc`, `det`, `scores`, `folds`.

    Raises:
        UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    wrong, right, missed = _OF_SEARCHES if result.protocol == "identification" else _OF_PAIRS
    drawers: dict[str, tuple[Any, Callable[[Any, Any], None]]] = {
        "roc": (result.curve, lambda axes, found: _draw_roc(axes, found, wrong, right)),
        "det": (result.curve, lambda axes, found: _draw_det(axes, found, wrong, missed)),
        "scores": (result.histogram, lambda axes, found: _draw_scores(axes, found, result.threshold)),
        "folds": (result.folds, _draw_folds),
    }
    figures = {}
    for name, (found, draw) in drawers.items():
        if found is not None:
            # Not pyplot's: those live until they are closed, and ask for a screen.
            figures[name] = Figure(figsize=(5, 3.6), dpi=120, layout="constrained")
            axes = figures[name].subplots()
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            draw(axes, found)
    return figures


def figure_images(result: Result) -> dict[str, np.ndarray]:
    """Return the figures of a result as pixels, uint8 (H, W, 3); without matplotlib, none."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return {}
    images = {}
    for name, figure in result_figures(result).items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        images[name] = np.asarray(canvas.buffer_rgba())[:, :, :3]
    return images


def _draw_roc(axes: Any, curve: Roc, across: str, up: str) -> None:
    points = thin_curve(curve)
    axes.step(points["far"], points["tar"], where="post", color=_GENUINE)
    axes.set(xscale="log", xlim=(_lowest(curve), 1), ylim=(_least(points, curve) - 0.02, 1.005))
    axes.set(title="ROC", xlabel=across, ylabel=up)


def _draw_det(axes: Any, curve: Roc, across: str, up: str) -> None:
    points = thin_curve(curve)
    rejected = 1 - np.array(points["tar"])
    told = rejected > 0
    axes.step(np.array(points["far"])[told], rejected[told], where="post", color=_GENUINE)
    axes.plot([_lowest(curve), 1], [_lowest(curve), 1], color=_MARK, linestyle=":", label="equal error")
    axes.set(xscale="log", yscale="log", xlim=(_lowest(curve), 1))
    axes.set(title="DET", xlabel=across, ylabel=up)
    axes.legend(frameon=False, loc="upper left")


def _draw_scores(axes: Any, found: Histogram, threshold: dict[str, float]) -> None:
    for label, count, color in (
        ("genuine", found.genuine, _GENUINE),
        ("impostor", found.impostor, _IMPOSTOR),
    ):
        # Shares, not counts: of impostors there may be a thousand times as many.
        share = count / max(count.sum(), 1)
        axes.stairs(share, found.edge, fill=True, alpha=0.6, color=color, label=f"{label} ({count.sum():,})")
    if "eer" in threshold:
        axes.axvline(threshold["eer"], color=_MARK, linestyle="--", label="equal error")
    filled = np.flatnonzero(found.genuine + found.impostor)
    if len(filled):
        axes.set_xlim(found.edge[filled[0]] - 0.02, found.edge[filled[-1] + 1] + 0.02)
    axes.set(title="Scores", xlabel="cosine similarity", ylabel="share of pairs")
    axes.legend(frameon=False, loc="upper center")


def _draw_folds(axes: Any, found: FoldAccuracy) -> None:
    fold = np.arange(1, len(found.accuracy_F) + 1)
    cosine_F = 1 - found.threshold_F / 2
    axes.plot(fold, cosine_F, "o", color=_GENUINE)
    axes.axhline(cosine_F.mean(), color=_MARK, linestyle="--", label=f"mean {cosine_F.mean():.3f}")
    for x, threshold, accuracy in zip(fold, cosine_F, found.accuracy_F, strict=True):
        label = axes.annotate(
            f"{accuracy:.1%}", (x, threshold), (0, 6), textcoords="offset points", ha="center", size=7
        )
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.set_ylim(cosine_F.min() - 0.05, cosine_F.max() + 0.05)
    axes.set_xticks(fold)
    axes.set(title="Threshold and accuracy by fold", xlabel="fold", ylabel="threshold (cosine)")
    axes.legend(frameon=False, loc="lower right")


def _lowest(curve: Roc) -> float:
    return 1 / max(curve.impostors, 10)


def _least(points: dict[str, list[float]], curve: Roc) -> float:
    """Return the lowest true accept rate that the axis shows."""
    return float(np.interp(_lowest(curve), points["far"], points["tar"]))
