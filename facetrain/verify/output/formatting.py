"""Text of metrics, intervals and whole evaluations, for the terminal and the HTML report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from facetrain.text import count_text, percent
from facetrain.verify.metrics.bootstrap import FEW_SUBJECTS, LEAST_SUBJECTS
from facetrain.verify.metrics.curve_metrics import CURVE_METRICS
from facetrain.verify.metrics.group_summary import RATES
from facetrain.verify.metrics.result import Result, error_rate_of
from facetrain.verify.metrics.roc import far_of, few_errors
from facetrain.verify.metrics.score_scale import COSINE
from facetrain.verify.metrics.scored_pairs import NO_SHARES

COUNTS = {
    "pairs",
    "genuine",
    "impostors",
    "probes",
    "mated",
    "entries",
}
"""Metrics that are the size of a set, not a property of the model."""
_NOT_PERCENT = {*NO_SHARES, *(metric.name for metric in CURVE_METRICS if not metric.is_rate)}
"""Metrics that are no rates, and the AUC, which needs more digits because it is close to 1."""
_RATIOS = ("_ratio", "_to_mean", "_to_best", "_gini")
"""Ends of the names of metrics that are quotients of two rates."""

_SMALL_RATES = ("fmr", "fpir")
"""Beginnings of the names of rates far below one percent."""
_SMALLEST_PERCENT = 1e-4
"""A smaller rate has too few digits in percent."""
_WORDS = {
    "accuracy": "accuracy",
    "accuracy_std": "standard deviation of the folds' accuracies",
    "accuracy_no_flip": "accuracy without mirror images",
    "accuracy_mean": "mean accuracy of the groups",
    "accuracy_spread": "standard deviation of the groups' accuracies",
    "auc": "area under the ROC (AUC)",
    "eer": "equal error rate (EER)",
    "xnorm": "mean length of the embeddings",
    "skewed_error_ratio": "highest by lowest error (SER)",
    "fmr": "false match rate (FMR)",
    "fnmr": "false non-match rate (FNMR)",
    "fmr_worst_to_mean": "highest FMR by the mean of the groups",
    "fnmr_worst_to_mean": "highest FNMR by the mean of the groups",
    "fmr_worst_to_best": "highest by lowest FMR",
    "fnmr_worst_to_best": "highest by lowest FNMR",
    "fmr_gini": "Gini coefficient of the FMRs",
    "fnmr_gini": "Gini coefficient of the FNMRs",
}
"""Metrics in the words of the field, for pages that people read."""
_RATES_AT = {"tar": "FAR", "fnmr": "FMR", "tpir": "FPIR", "fnir": "FPIR"}
"""Rate -> rate that defines its threshold."""
_NUMBER = re.compile(r"\d[\d,]*")

if TYPE_CHECKING:
    from facetrain.verify.metrics.cross_groups import CrossGroups
    from facetrain.verify.metrics.group_summary import Group
    from facetrain.verify.model_comparison import Difference
    from facetrain.verify.model_results import ModelResults


def metric_words(name: str) -> str:
    """Return a metric in words: `tar@1e-04` is "TAR at FAR 0.0001", `rank5` the "rank-5 identification rate"."""
    if name in _WORDS:
        return _WORDS[name]
    rate, _, limit = name.partition("@")
    if limit and rate in _RATES_AT:
        return f"{rate.upper()} at {_RATES_AT[rate]} {float(limit):.9f}".rstrip("0")
    if name.startswith("rank") and name[4:].isdigit():
        return f"rank-{name[4:]} identification rate"
    return name.replace("_", " ")


def format_number(name: str, value: float | None) -> str:
    """Return the text of a metric: rates in percent, ratios and other metrics as decimals, None as a dash."""
    if value is None:
        return "–"
    if name.endswith(_RATIOS):
        return f"{value:z.3f}"
    if name in _NOT_PERCENT:
        return f"{value:z.5f}"
    if not name.startswith(_SMALL_RATES):
        return percent(value)
    return f"{value:.1e}" if 0 < abs(value) < _SMALLEST_PERCENT else f"{value:z.3%}"


def format_interval(name: str, interval: tuple[float, float] | None) -> str:
    """Return `[low, high]`, in the unit that `format_number` gives the metric; empty without an interval."""
    return f"[{format_number(name, interval[0])}, {format_number(name, interval[1])}]" if interval else ""


def format_score(result: Result, score: float) -> str:
    """Return the text of a score of a result: scores of other systems may be as small as likelihood ratios."""
    return f"{score:z.4f}" if result.scale == COSINE else f"{score:.6g}"


def format_value(name: str, value: float | None, interval: tuple[float, float] | None) -> str:
    """Return a metric with its interval."""
    return f"{format_number(name, value)}  {format_interval(name, interval)}".rstrip()


def shown_metrics(result: Result) -> list[tuple[str, float | None]]:
    """Return the metrics without sizes: first the accuracies, last those that the set is too small for."""
    metrics = [(name, value) for name, value in result.metrics.items() if name not in COUNTS]
    return sorted(metrics, key=lambda metric: (metric[1] is None, not metric[0].startswith("accuracy")))


def format_differences(differences: dict[str, Difference]) -> Iterator[tuple[str, ...]]:
    """Yield each metric with both values, the difference, its interval and its p-value."""
    for name, pair in differences.items():
        numbers = (
            format_number(name, value) for value in (pair.first, pair.second, pair.first - pair.second)
        )
        yield (name, *numbers, format_interval(name, pair.interval), format_p(pair))


def format_p(difference: Difference) -> str:
    """Return the p-value; `< 0.01`, rounded up to one digit, for the smallest one that the draws can show."""
    if not difference.is_bound:
        return f"{difference.p:.3g}"
    unit = 10.0 ** math.floor(math.log10(difference.p))
    return f"< {math.ceil(difference.p / unit) * unit:.1g}"


def format_counts(result: Result) -> str:
    """Return the sizes of a set: pairs, probes, subjects and so on."""
    sizes = {name: result.metrics[name] for name in result.metrics if name in COUNTS}
    counts = [f"{value:,.0f} {name}" for name, value in sizes.items() if value is not None]
    return ", ".join([*counts, count_text(result.subjects, "subject")])


def format_warnings(result: Result) -> Iterator[str]:
    """Yield a warning of scores that are reversed, and one of few subjects."""
    yield from _format_reversed(result)
    if warning := format_few_subjects(min(map(result.subjects_of, result.replicates), default=FEW_SUBJECTS)):
        yield warning


def _format_reversed(result: Result) -> Iterator[str]:
    auc = result.metrics.get("auc")
    if auc is not None and auc < 0.5:
        yield (
            f"warning: AUC {auc:.3f}, below one half: impostor pairs score higher than genuine pairs; are labels or "
            "scores reversed?"
        )


def format_few_subjects(subjects: int) -> str:
    """Return a warning of intervals that rest on few subjects, or are missing for this reason; "" for enough."""
    if subjects < LEAST_SUBJECTS:
        return (
            f"warning: no interval and no p-value for metrics that rest on {count_text(subjects, 'subject')}; at least "
            f"{LEAST_SUBJECTS} are needed"
        )
    if subjects < FEW_SUBJECTS:
        return f"warning: intervals rest on {subjects} subjects; below {FEW_SUBJECTS} they can be too narrow"
    return ""


def format_evaluation(evaluation: ModelResults) -> Iterator[str]:
    """Yield the lines of an evaluation: metrics of every set, its slices, the differences to the other model."""
    for name, result in evaluation.results.items():
        yield f"{name}: {format_counts(result)}"
        yield from (f"  {warning}" for warning in format_warnings(result))
        for metric, value in shown_metrics(result):
            if value is not None:
                shown = format_value(metric, value, result.interval.get(metric))
                error = error_rate_of(metric)
                rate = f"{error} {format_number(error, 1 - value)}" if error else ""
                yield f"  {metric:16} {shown}  {rate}  {result.remark(metric)}".rstrip()
        yield from _format_needs(result.needs)
        yield from _format_limits(result)
        yield from (f"  {line}" for line in format_slice_threshold(result))
        yield from (f"  {_format_group(group)}" for group in result.groups)
        for matrix in result.cross_groups:
            yield from (f"  {line}" for line in _format_matrix(matrix))
        for curve in result.discards:
            if curve.area_ratio is not None:
                remark = few_errors(curve.rejected, "rejected pair")
                ratio = f"FNMR {curve.area_ratio:.3f} times that of random discarding"
                yield f"  discarding by {curve.quality}: {ratio}  {remark}".rstrip()
        for summary in result.group_summaries:
            yield f"  {summary.column}, differences between the groups:"
            for metric, value in summary.metrics.items():
                yield f"    {metric:18} {format_value(metric, value, summary.interval.get(metric))}"
    for name, differences in evaluation.differences.items():
        untested = f" no metric to compare, of at least {LEAST_SUBJECTS} subjects"
        yield f"{name}, against {evaluation.against}:{'' if differences else untested}"
        yield from (f"  {warning}" for warning in _format_reversed(evaluation.other_results[name]))
        for metric, first, second, gap, interval, p in format_differences(differences):
            yield f"  {metric:16} {first} − {second} = {gap} {interval}  p {p}"


def _format_limits(result: Result) -> Iterator[str]:
    """Yield which false match rates a set can support."""
    if limits := result.lowest_rates:
        rate, pairs = (
            ("FPIR", "nonmated probes") if result.protocol == "identification" else ("FMR", "impostor pairs")
        )
        known = limits["rule_of_30"]
        yield (
            f"  lowest {rate:9} {limits['lowest']:.1e}, one of {result.fewest_impostors:,} {pairs}; "
            + (
                f"known to ± 30 % from {known:.1e} on"
                if known and known < 1
                else "too few to know a rate to ± 30 %"
            )
        )


def format_slice_threshold(result: Result) -> Iterator[str]:
    """Yield the threshold of all slices, and the FMR that it gives, if there are slices."""
    if result.groups and result.curve:
        threshold, impostors = result.threshold["slices"], result.curve.impostors
        fmr = far_of(result.curve, threshold)
        place = f"slices at {result.scale.name} >= {format_score(result, threshold)}"
        rate = f"FMR {format_number('fmr', fmr)} of all impostor pairs"
        yield f"{place}: {rate}  {few_errors(round(fmr * impostors), 'false accept')}".rstrip()


def _format_matrix(matrix: CrossGroups) -> Iterator[str]:
    """Yield the false match rates between the groups of a column, a line for each group."""
    yield f"{matrix.column}, FMR between {', '.join(matrix.groups)}:"
    for group, rates in zip(matrix.groups, matrix.fmr_VV.tolist(), strict=True):
        cells = (f"{format_number('fmr', None if math.isnan(rate) else rate):>8}" for rate in rates)
        yield f"  {group:16} {'  '.join(cells)}"


def _format_group(group: Group) -> str:
    rates = [
        f"{name} {format_number(name, group.metrics[name])} {format_interval(name, group.interval.get(name))}".rstrip()
        for name in RATES
    ]
    return f"{group.column} = {group.value}: {group.metrics['pairs']:,.0f} pairs  {'  '.join(rates)}"


def _format_needs(needs: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each kind of what a set lacks: a smaller rate needs more of the same pairs."""
    metrics: dict[str, list[str]] = {}
    for metric, reason in needs.items():
        metrics.setdefault(_NUMBER.sub("", reason), []).append(metric)
    for first, *others in metrics.values():
        also = f"; also left out: {', '.join(others)}" if others else ""
        yield f"  {first:16} {needs[first]}{also}"
