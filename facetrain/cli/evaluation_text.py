"""An evaluation as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from facetrain.verify.evaluate import Evaluation
    from facetrain.verify.result import Group, Result

_COUNTS = {"pairs", "genuine", "impostors", "probes", "mated", "searches", "distractors", "noises"}
_PLAIN = {"threshold", "xnorm", "auc"}
"""Numbers that are no shares, or are too near 1 to be read as per cent."""


def evaluation_lines(found: Evaluation) -> Iterator[str]:
    """Yield a line per number of every set, per group of its slices, and per difference to the other model."""
    for name, result in found.results.items():
        yield f"{name}: {_counted(result)}"
        for metric, value in result.metrics.items():
            if metric not in _COUNTS:
                yield _number(metric, value, result)
        yield from (f"  {_group(group)}" for group in result.groups)
    for name, differences in found.differences.items():
        yield f"{name}, against {found.against}:"
        for metric, difference in differences.items():
            low, high = difference.interval
            gap = difference.first - difference.second
            yield (
                f"  {metric:16} {_shown(metric, difference.first)} − {_shown(metric, difference.second)} = "
                f"{_shown(metric, gap)} [{_shown(metric, low)}, {_shown(metric, high)}]  p {difference.p:.3g}"
            )


def _counted(result: Result) -> str:
    counts = [
        f"{value:,.0f} {name}"
        for name, value in result.metrics.items()
        if name in _COUNTS and value is not None
    ]
    return ", ".join([*counts, f"{result.subjects:,} subjects"])


def _number(metric: str, value: float | None, result: Result) -> str:
    if value is None:
        return f"  {metric:16} {result.needs.get(metric, 'not told')}"
    low_high = result.interval.get(metric)
    within = f"  [{_shown(metric, low_high[0])}, {_shown(metric, low_high[1])}]" if low_high else ""
    return f"  {metric:16} {_shown(metric, value)}{within}"


def _group(group: Group) -> str:
    rates = []
    for name in ("accuracy", "fmr", "fnmr"):
        span = group.interval.get(name)
        within = f" [{', '.join(_shown(name, end) for end in span)}]" if span else ""
        rates.append(f"{name} {_shown(name, group.metrics[name])}{within}")
    return f"{group.column} = {group.value}: {group.metrics['pairs']:,.0f} pairs  {'  '.join(rates)}"


def _shown(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.5f}" if metric in _PLAIN else f"{value:.3%}"
