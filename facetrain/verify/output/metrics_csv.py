"""Metrics of an evaluation as a CSV table: one row for each metric of each set and of each group."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from facetrain.text import printable, spreadsheet_text
from facetrain.verify.metrics.result import MetricTable
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.formatting import format_p

_HEADER = ("set", "column", "group", "metric", "value", "low", "high", "needs", "remark")
Row = tuple[str | float | None, ...]


def metrics_csv(evaluation: ModelResults) -> str:
    """Return the table: rates as fractions, the ends of the 95 % intervals, what a set lacks for a metric, remarks.

    Rows of a whole set have no column and no group; rows of the differences between groups have no group. Those of the
    differences to another model have the column `against`, this model as the group, and the p-value as the remark.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADER)
    writer.writerows(_rows(evaluation))
    return text.getvalue()


def _rows(evaluation: ModelResults) -> Iterator[Row]:
    for name, result in evaluation.results.items():
        # From names of files, which need not be UTF-8, as the table is.
        shown, other = (spreadsheet_text(printable(each)) for each in (name, evaluation.against))
        place = (shown, "", "")
        yield from _metric_rows(place, result.with_error_rates())
        for group in [*result.groups, *result.group_summaries]:
            place = (shown, spreadsheet_text(group.column), spreadsheet_text(group.value or ""))
            yield from _metric_rows(place, MetricTable(group.metrics, group.interval, {}, {}))
        place = (shown, "against", other)
        for metric, pair in evaluation.differences.get(name, {}).items():
            yield (*place, metric, pair.first - pair.second, *pair.interval, "", f"p {format_p(pair)}")


def _metric_rows(place: tuple[str, ...], table: MetricTable) -> Iterator[Row]:
    for metric, value in table.metrics.items():
        low, high = table.intervals.get(metric, (None, None))
        yield (*place, metric, value, low, high, table.needs.get(metric, ""), table.remarks.get(metric, ""))
