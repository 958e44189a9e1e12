"""Result of one evaluation set, in a form that all protocols share: metrics, intervals, curves, hardest pairs."""

# P pairs   R replicates of the bootstrap

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from facetrain.text import percent
from facetrain.verify.metrics.cross_groups import CrossGroups
from facetrain.verify.metrics.discard import DiscardCurve
from facetrain.verify.metrics.fold_accuracy import FoldAccuracy, GridRoc
from facetrain.verify.metrics.group_summary import Group
from facetrain.verify.metrics.roc import FARS, ROUNDING, RULE_OF_30, Roc, far_at, few_errors
from facetrain.verify.metrics.score_scale import COSINE, ScoreScale

Interval = tuple[float, float]
_ERROR_RATES = {"tar": "fnmr", "tpir": "fnir"}
"""Name of the error rate that is 1 − an accept rate."""
_ACCURACIES = ("accuracy", "accuracy_no_flip")
_BALANCED = 0.55
"""Largest share of one kind of pairs in a set whose accuracy says something by itself."""
_JSON_POINTS = 512
"""Largest number of points of a curve in the JSON."""


@dataclass(frozen=True)
class Histogram:
    """Numbers of genuine and of impostor pairs per bin of the similarity score."""

    edge: np.ndarray
    """Edges of the bins, ascending; one more than there are bins."""
    genuine: np.ndarray
    impostor: np.ndarray


@dataclass(frozen=True)
class HardPair:
    """Pair with a score far on the wrong side: a low genuine score or a high impostor score."""

    pair: int
    """Index of the pair in the set or score file."""
    first: int
    second: int
    """Indices of its two images or templates."""
    score: float
    """Similarity score."""


@dataclass(frozen=True)
class MetricTable:
    """Metrics of a result, and what belongs to each of them, all by the name of the metric."""

    metrics: dict[str, float | None]
    intervals: dict[str, Interval]
    needs: dict[str, str]
    """What the set lacks for a metric that is None."""
    remarks: dict[str, str]
    """What makes a metric doubtful, see `Result.remark`."""


@dataclass
class Result:
    """Metrics of one model on one evaluation set."""

    protocol: str
    """`verification`, `templates` or `identification`."""
    metrics: dict[str, float | None]
    """Metrics by name. None if the set is too small for a metric; `needs` then has the reason."""
    needs: dict[str, str] = field(default_factory=dict)
    """What the set lacks for each metric that is None."""
    interval: dict[str, Interval] = field(default_factory=dict)
    """95 % bootstrap interval of each metric."""
    replicates: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Each metric in every bootstrap draw, (R,): input of the paired test of two models. Not in the JSON."""
    threshold: dict[str, float] = field(default_factory=dict)
    """Score from which pairs are accepted, by operating point: `accuracy` (mean of the folds), `eer`, `1e-01` …, and
    `slices` for the groups and the error-versus-discard curves."""
    curves: dict[str, Roc] = field(default_factory=dict, repr=False)
    """Exact ROC by the name of the gallery, which is empty if there is only one; of several, the metrics are means over
    them. Thresholds are scores. Empty if one has none."""
    grid: GridRoc | None = None
    """ROC on the threshold grid of the published code."""
    folds: FoldAccuracy | None = None
    histogram: Histogram | None = None
    hardest_genuine: list[HardPair] = field(default_factory=list)
    """Lowest score first."""
    hardest_impostors: list[HardPair] = field(default_factory=list)
    """Highest score first."""
    groups: list[Group] = field(default_factory=list)
    """Error rates by slice."""
    cross_groups: list[CrossGroups] = field(default_factory=list)
    """False match rates within and between the groups of each column that has the group of every image."""
    group_summaries: list[Group] = field(default_factory=list)
    """Spread of the error rates over the slices of each column with at least two groups of people."""
    discards: list[DiscardCurve] = field(default_factory=list)
    """Error-versus-discard curve of each quality measure."""
    subjects: int = 0
    """Number of subjects that the bootstrap draws from."""
    metric_subjects: dict[str, int] = field(default_factory=dict)
    """Number of subjects of each metric that rests on some of them only, such as those with a mate."""
    scale: ScoreScale = COSINE
    """Range and name of the scores."""

    @property
    def available_metrics(self) -> dict[str, float]:
        """Metrics that the set is large enough for."""
        return {name: value for name, value in self.metrics.items() if value is not None}

    def subjects_of(self, metric: str) -> int:
        """Return the number of subjects that the interval of a metric rests on."""
        return self.metric_subjects.get(metric, self.subjects)

    def with_error_rates(self) -> MetricTable:
        """Return all metrics, with FNMR@FMR after each TAR@FAR, and FNIR@FPIR after each TPIR@FPIR.

        These are the names of ISO/IEC 19795-1 and NIST's FRTE: FNMR is 1 − TAR, FNIR is 1 − TPIR.
        """
        table = MetricTable({}, dict(self.interval), dict(self.needs), {})
        for name, value in self.metrics.items():
            table.metrics[name] = value
            if value is not None and (remark := self.remark(name)):
                table.remarks[name] = remark
            if error := error_rate_of(name):
                table.metrics[error] = None if value is None else 1 - value
                if name in self.interval:
                    low, high = self.interval[name]
                    table.intervals[error] = 1 - high, 1 - low
                for notes in (table.needs, table.remarks):
                    if name in notes:
                        notes[error] = notes[name]
        return table

    @property
    def fewest_impostors(self) -> int:
        """Number of impostor pairs, 0 without a curve; of a search, the fewest nonmated probes that a gallery has."""
        return min((curve.impostors for curve in self.curves.values()), default=0)

    @property
    def curve(self) -> Roc | None:
        """The only ROC; None of several galleries."""
        return self.curves.get("")

    @property
    def lowest_rates(self) -> dict[str, float | None]:
        """Lowest FMR (of a search: FPIR) that the set supports; empty without a curve.

        `lowest`: one false match among all impostor pairs. `rule_of_30`: the rate with 30 false matches, which is known
        to ± 30 % with 90 % confidence; None if the set has fewer impostor pairs.
        """
        if not (impostors := self.fewest_impostors):
            return {}
        return {
            "lowest": 1 / impostors,
            "rule_of_30": RULE_OF_30 / impostors if impostors >= RULE_OF_30 else None,
        }

    def remark(self, metric: str) -> str:
        """Return what makes a metric doubtful; usually empty.

        A rate at a limit, such as `tar@1e-04`, may rest on few false accepts. Of pairs that are mostly of one kind, a
        system that gives all the same answer has a high accuracy.
        """
        if metric in _ACCURACIES:
            return self._same_answer
        name, _, limit = metric.partition("@")
        if name not in ("tar", "tpir") or not self.curves:
            return ""
        # Those of the threshold: with equal scores they can be far fewer than the limit allows.
        accepts = min(round(far_at(curve, float(limit)) * curve.impostors) for curve in self.curves.values())
        return few_errors(accepts, "false accept")

    @property
    def _same_answer(self) -> str:
        """What one answer to all pairs reaches; empty without accuracy, or for about as many pairs of both kinds."""
        if self.metrics.get("accuracy") is None:
            return ""
        genuine, pairs = self.metrics["genuine"] or 0, self.metrics["pairs"] or 0
        share = max(genuine, pairs - genuine) / pairs
        answer = "accepting" if 2 * genuine > pairs else "refusing"
        return f"{answer} all pairs gives {percent(share)}" if share > _BALANCED else ""

    def as_json(self) -> dict[str, Any]:
        """Return the metrics at the top level, and everything else under other names."""
        table = self.with_error_rates()
        return {
            "protocol": self.protocol,
            **table.metrics,
            "needs": table.needs,
            "remarks": table.remarks,
            "intervals": table.intervals,
            "fpir_limits" if self.protocol == "identification" else "fmr_limits": self.lowest_rates,
            "thresholds": self.threshold,
            "subjects": self.subjects,
            "curve": thin_curve(self.curve) if self.curve else None,
            "gallery_curves": {name: thin_curve(curve) for name, curve in self.curves.items() if name},
            "grid": _lists(self.grid),
            "folds": _lists(self.folds),
            "histogram": _lists(self.histogram),
            "hardest": {
                kind: [asdict(pair) for pair in pairs]
                for kind, pairs in (("genuine", self.hardest_genuine), ("impostors", self.hardest_impostors))
            },
            "groups": [group.as_json() for group in self.groups],
            "cross_groups": [matrix.as_json() for matrix in self.cross_groups],
            "discards": [curve.as_json() for curve in self.discards],
            "group_summaries": [summary.as_json() for summary in self.group_summaries],
        }


def error_rate_of(metric: str) -> str | None:
    """Return the name of the error rate that belongs to an accept rate: `fnmr@1e-03` for `tar@1e-03`."""
    kind, _, limit = metric.partition("@")
    return f"{_ERROR_RATES[kind]}@{limit}" if kind in _ERROR_RATES else None


def thin_curve(curve: Roc) -> dict[str, list[float]]:
    """Return at most `_JSON_POINTS` points of a curve as lists `far`, `tar` and `threshold`.

    Of the points with at most a false accept rate, the last one is kept, as for a metric at this rate: for the rates of
    the metrics, a third evenly spaced in log FAR and a third in FAR. The last third is evenly spaced in TAR.
    """
    # Skip the first point: its threshold is infinite, which JSON cannot represent.
    far, tar, threshold = curve.far[1:], curve.tar[1:], curve.threshold[1:]
    third = (_JSON_POINTS - len(FARS) - 2) // 3
    rates = np.concatenate(
        [FARS, np.logspace(-np.log10(curve.impostors), 0, third), np.linspace(0, 1, third)]
    )
    wanted = np.concatenate(
        [
            np.searchsorted(far, rates * ROUNDING, side="right") - 1,
            np.searchsorted(tar, np.linspace(0, 1, third)),
            [0, len(far) - 1],
        ]
    )
    kept = np.unique(np.clip(wanted, 0, len(far) - 1))
    return {"far": far[kept].tolist(), "tar": tar[kept].tolist(), "threshold": threshold[kept].tolist()}


def _lists(source: GridRoc | FoldAccuracy | Histogram | None) -> dict[str, list[float]] | None:
    """Return the arrays of a dataclass as lists, by their names without the suffix of the shape."""
    if source is None:
        return None
    return {field.name.partition("_")[0]: getattr(source, field.name).tolist() for field in fields(source)}
