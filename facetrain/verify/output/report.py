"""Evaluation report: a self-contained HTML page, its figures as PNG files and its metrics as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from facetrain.errors import RunError, UsageError
from facetrain.files import error_reason, os_errors_as
from facetrain.html_page import data_table, details_table, escape, html_page, svg
from facetrain.verify.metrics.group_summary import RATES, Group
from facetrain.verify.metrics.result import Result
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.figures import result_figures
from facetrain.verify.output.formatting import (
    format_counts,
    format_differences,
    format_interval,
    format_number,
    format_value,
    format_warnings,
    shown_metrics,
)
from facetrain.verify.output.hardest_pairs import hardest_pairs_of, pairs_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
_JSON = "report.json"


def require_report(folder: Path) -> None:
    """Create the folder of a report before the evaluation.

    Raises:
        UsageError: the path is a file, or the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The flags of a folder do not show this: /proc and some network disks refuse writes that they allow.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{folder}: the folder of the report cannot be written: {error_reason(error)}; choose another one"
        ) from error


def report_files(folder: Path) -> list[Path]:
    """Return the page and the JSON file of a report."""
    return [folder / PAGE, folder / _JSON]


def write_report(
    folder: Path, evaluation: ModelResults, *, model: str, details: Mapping[str, str] | None = None
) -> Path:
    """Write `report.html`, `report.json` and a PNG file per figure into a folder; return the path of the page.

    `details` are lines for the head of the page by name: date, versions, command.

    The page is self-contained: figures are inline SVG, images inline PNG, and there is no script.

    Raises:
        RunError: the folder cannot be written.
    """
    figures = {
        name: result_figures(result, evaluation.other_results.get(name))
        for name, result in evaluation.results.items()
    }
    page = folder / PAGE
    with os_errors_as(RunError, folder, "choose another folder for the report"):
        folder.mkdir(parents=True, exist_ok=True)
        # PNG files beside the page, for slides and papers; the page itself has the figures as SVG.
        for name, by_kind in figures.items():
            for kind, figure in by_kind.items():
                figure.savefig(folder / f"{name}_{kind}.png")
        content = {"model": model, "details": dict(details or {})} | evaluation.as_json()
        text = json.dumps(content, indent=1)
        (folder / _JSON).write_text(text + "\n", encoding="utf-8")
        page.write_text(html_page(model, _body(evaluation, figures, details or {})), encoding="utf-8")
    return page


def _body(
    evaluation: ModelResults, figures: dict[str, dict[str, Figure]], details: Mapping[str, str]
) -> Iterator[str]:
    yield f"<p>{escape(evaluation.description)}</p>"
    about = {**details, **({"precision": evaluation.precision} if evaluation.precision else {})}
    if evaluation.against:
        about["other model"] = evaluation.against
    yield details_table(about.items())
    yield "<p>95 % intervals by a bootstrap over subjects.</p>"
    for name, result in evaluation.results.items():
        yield f"<h2>{escape(name)}</h2>"
        yield f"<p>{format_counts(result)}</p>"
        yield from (f"<p>{warning}</p>" for warning in format_warnings(result))
        threshold = f"threshold ({result.scale.name})"
        yield data_table(["metric", "value", "95 % interval", threshold], _metric_rows(result))
        yield '<div class="figures">'
        yield from (svg(figure, f"{name}-{kind}") for kind, figure in figures[name].items())
        yield "</div>"
        if differences := evaluation.differences.get(name):
            yield f"<h3>Compared with {escape(evaluation.against)}</h3>"
            models = ["this model", "other model", "difference"]
            header = ["metric", *models, "95 % interval of the difference", "p"]
            yield data_table(header, format_differences(differences))
        if result.groups:
            yield "<h3>Slices at one threshold</h3>"
            yield data_table(["slice", "pairs", *RATES], map(_group_row, result.groups))
        if result.group_summaries:
            yield "<h3>Differences between the groups</h3>"
            rows = (
                [f"{summary.column}: {metric}", format_value(metric, value, summary.interval.get(metric))]
                for summary in result.group_summaries
                for metric, value in summary.metrics.items()
            )
            yield data_table(["measure", "value and 95 % interval"], rows)
        yield from pairs_html(hardest_pairs_of(result, evaluation.sets.get(name)))


def _metric_rows(result: Result) -> Iterator[list[str]]:
    for name, value in shown_metrics(result):
        if name == "threshold":
            continue  # a squared distance; the last column has it as a score
        if value is None:
            yield [name, result.needs.get(name, "not available"), "", ""]
            continue
        threshold = result.threshold.get(name.removeprefix("tar@"))
        interval = f"{format_interval(name, result.interval.get(name))}  {result.remark(name)}".strip()
        yield [name, format_number(name, value), interval, "" if threshold is None else f"{threshold:.4f}"]


def _group_row(group: Group) -> list[str]:
    rates = [format_value(rate, group.metrics[rate], group.interval.get(rate)) for rate in RATES]
    return [f"{group.column} = {group.value}", f"{group.metrics['pairs']:,.0f}", *rates]
