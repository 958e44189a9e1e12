"""The numbers of an evaluation as people read them, on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

COUNTS = {"pairs", "genuine", "impostors", "probes", "mated", "searches", "distractors", "noises"}
"""Numbers that say how large a set is."""
_PLAIN = {"threshold", "xnorm", "auc"}
"""Numbers that are no shares, or are too near 1 to be read as per cent."""


def number_text(name: str, value: float | None) -> str:
    """Return a number as a reader wants it: shares in per cent, the rest as it is."""
    if value is None:
        return "–"
    return f"{value:.5f}" if name in _PLAIN else f"{value:.3%}"


def interval_text(name: str, interval: tuple[float, float] | None) -> str:
    """Return an interval as a reader wants it."""
    return f"[{number_text(name, interval[0])}, {number_text(name, interval[1])}]" if interval else ""


if TYPE_CHECKING:
    from facetrain.verify.evaluate import Evaluation
    from facetrain.verify.result import Group, Result


def evaluation_lines(found: Evaluation) -> Iterator[str]:
    """Yield a line per number of every set, per group of its slices, and per difference to the other model."""
    for name, result in found.results.items():
        yield f"{name}: {_counted(result)}"
        for metric, value in result.metrics.items():
            if metric not in COUNTS:
                yield _number(metric, value, result)
        yield from (f"  {_group(group)}" for group in result.groups)
    for name, differences in found.differences.items():
        yield f"{name}, against {found.against}:"
        for metric, difference in differences.items():
            gap = difference.first - difference.second
            yield (
                f"  {metric:16} {number_text(metric, difference.first)} − {number_text(metric, difference.second)} = "
                f"{number_text(metric, gap)} {interval_text(metric, difference.interval)}  p {difference.p:.3g}"
            )


def _counted(result: Result) -> str:
    counts = [
        f"{value:,.0f} {name}"
        for name, value in result.metrics.items()
        if name in COUNTS and value is not None
    ]
    return ", ".join([*counts, f"{result.subjects:,} subjects"])


def _number(metric: str, value: float | None, result: Result) -> str:
    if value is None:
        return f"  {metric:16} {result.needs.get(metric, 'not told')}"
    within = interval_text(metric, result.interval.get(metric))
    return f"  {metric:16} {number_text(metric, value)}  {within}".rstrip()


def _group(group: Group) -> str:
    rates = []
    for name in ("accuracy", "fmr", "fnmr"):
        within = interval_text(name, group.interval.get(name))
        rates.append(f"{name} {number_text(name, group.metrics[name])} {within}".rstrip())
    return f"{group.column} = {group.value}: {group.metrics['pairs']:,.0f} pairs  {'  '.join(rates)}"
