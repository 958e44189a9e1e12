"""What a set says of a model, in a form that every protocol shares: numbers, intervals, curves, the hardest cases."""

# P pairs   R replicates   H cells of a histogram

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from facetrain.verify.fold_accuracy import FoldAccuracy, GridRoc
from facetrain.verify.roc import Roc

Interval = tuple[float, float]
_POINTS = 512
"""Points of a curve that JSON keeps."""


@dataclass(frozen=True)
class Histogram:
    """Pairs per range of scores, for pairs of one person and of two."""

    edge: np.ndarray
    """Ascending, one more than cells."""
    genuine: np.ndarray
    impostor: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """Return the lists."""
        return {name: getattr(self, name).tolist() for name in ("edge", "genuine", "impostor")}


@dataclass(frozen=True)
class HardPair:
    """A pair that lies far on the wrong side."""

    pair: int
    """Its number in the set."""
    first: int
    second: int
    """The numbers of its images or templates."""
    score: float
    """Cosine similarity."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return {"pair": self.pair, "first": self.first, "second": self.second, "score": self.score}


@dataclass(frozen=True)
class Group:
    """One value of a column, at the threshold that all groups share."""

    column: str
    value: str
    metrics: dict[str, float | None]
    """`accuracy`, `fmr`, `fnmr`, `pairs`, `genuine`, `impostors`."""
    interval: dict[str, Interval]

    def as_json(self) -> dict[str, Any]:
        """Return the numbers beside their intervals."""
        return {"column": self.column, "value": self.value, **self.metrics, "intervals": self.interval}


@dataclass
class Result:
    """All that one set says of one model."""

    protocol: str
    """`verification`, `templates` or `identification`."""
    metrics: dict[str, float | None]
    """Numbers by name; None where the set is too small for one, and `needs` says what it lacks."""
    needs: dict[str, str] = field(default_factory=dict)
    interval: dict[str, Interval] = field(default_factory=dict)
    """The middle 95 % of each number over the replicates of the bootstrap."""
    replicates: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Each number in every replicate (R,): what a paired test of two models needs. Not in the JSON."""
    threshold: dict[str, float] = field(default_factory=dict)
    """Cosine similarity from which on pairs are accepted, at `eer` and at each rate that the set can tell."""
    curve: Roc | None = None
    """Exact, from sorted scores; its thresholds are cosine similarities."""
    grid: GridRoc | None = None
    """The curve as published code draws it."""
    folds: FoldAccuracy | None = None
    histogram: Histogram | None = None
    hardest_genuine: list[HardPair] = field(default_factory=list)
    """Least alike first."""
    hardest_impostors: list[HardPair] = field(default_factory=list)
    """Most alike first."""
    groups: list[Group] = field(default_factory=list)
    subjects: int = 0
    """Of how many subjects the bootstrap has drawn."""

    @property
    def available_metrics(self) -> dict[str, float]:
        """The numbers that the set is large enough for."""
        return {name: value for name, value in self.metrics.items() if value is not None}

    def as_json(self) -> dict[str, Any]:
        """Return the numbers at the top, and what is longer under names of its own."""
        return {
            "protocol": self.protocol,
            **self.metrics,
            "needs": self.needs,
            "intervals": self.interval,
            "thresholds": self.threshold,
            "subjects": self.subjects,
            "curve": thin_curve(self.curve) if self.curve else None,
            "grid": _lists(self.grid, threshold="threshold_T", tpr="tpr_T", fpr="fpr_T"),
            "folds": _lists(self.folds, accuracy="accuracy_F", threshold="threshold_F"),
            "histogram": self.histogram.as_json() if self.histogram else None,
            "hardest": {
                "genuine": [pair.as_json() for pair in self.hardest_genuine],
                "impostors": [pair.as_json() for pair in self.hardest_impostors],
            },
            "groups": [group.as_json() for group in self.groups],
        }


def thin_curve(curve: Roc, points: int = _POINTS) -> dict[str, list[float]]:
    """Return at most `points` points of a curve, evenly spread on both axes, the low rates on a logarithmic one."""
    # The first point accepts nothing, at an infinite score that JSON cannot write.
    far, tar, threshold = curve.far[1:], curve.tar[1:], curve.threshold[1:]
    third = points // 3
    low = np.log10(1 / curve.impostors)
    wanted = np.concatenate(
        [
            np.searchsorted(far, np.logspace(low, 0, third)),
            np.searchsorted(far, np.linspace(0, 1, third)),
            np.searchsorted(tar, np.linspace(0, 1, third)),
            [0, len(far) - 1],
        ]
    )
    kept = np.unique(np.minimum(wanted, len(far) - 1))
    return {"far": far[kept].tolist(), "tar": tar[kept].tolist(), "threshold": threshold[kept].tolist()}


def _lists(found: object, **names: str) -> dict[str, list[float]] | None:
    return {name: getattr(found, field).tolist() for name, field in names.items()} if found else None
