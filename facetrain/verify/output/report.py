"""Evaluation report: a self-contained HTML page, its figures as PNG files and its metrics as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facetrain.errors import RunError, UsageError
from facetrain.files import error_reason, os_errors_as, write_atomically
from facetrain.pages.figures import svg
from facetrain.pages.render import render
from facetrain.verify.metrics.group_summary import RATES, Group
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.scored_pairs import NO_SHARES
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.figures import result_figures
from facetrain.verify.output.formatting import (
    format_counts,
    format_differences,
    format_interval,
    format_number,
    format_score,
    format_slice_threshold,
    format_value,
    format_warnings,
    metric_words,
    shown_metrics,
)
from facetrain.verify.output.hardest_pairs import hardest_pairs_of, pair_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
_JSON = "report.json"
_LONGEST_STEM = 200
"""Bytes of a file name without its suffix: file systems allow 255 with it."""


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
    folder: Path,
    evaluation: ModelResults,
    *,
    model: str,
    other: str = "",
    details: Mapping[str, str] | None = None,
) -> Path:
    """Write `report.html`, `report.json` and a PNG file per figure into a folder; return the path of the page.

    The page is self-contained: figures are inline SVG, images inline JPEG, and there is no script.

    Args:
        folder: folder of the report.
        evaluation: results of the model, and its differences to another one.
        model: name or path of the model.
        other: name or path of the other model; by default its description.
        details: lines about the evaluation by name: date, versions, command.

    Raises:
        RunError: the folder cannot be written.
    """
    names = _short_names(model, other or evaluation.against)
    figures = {
        name: result_figures(result, evaluation.other_results.get(name), names)
        for name, result in evaluation.results.items()
    }
    page = folder / PAGE
    with os_errors_as(RunError, folder, "choose another folder for the report"):
        folder.mkdir(parents=True, exist_ok=True)
        content = {"model": model, "details": dict(details or {})} | evaluation.as_json()
        text = json.dumps(content, indent=1)
        write_atomically(folder / _JSON, text + "\n")
        values = _page_values(evaluation, figures, names, details or {})
        write_atomically(page, render("verify/output/report.html.j2", title=model, **values))
        # PNG files beside the page, for slides and papers; the page itself has the figures as SVG.
        for name, by_kind in figures.items():
            for kind, figure in by_kind.items():
                figure.savefig(folder / f"{_short_stem(name)}_{kind}.png")
    return page


def _short_stem(name: str) -> str:
    """Return the name of a set; if it is too long for a file name with a suffix, its beginning and a checksum."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST_STEM else f"{name[:40]}_{hashlib.sha256(encoded).hexdigest()[:8]}"


def _short_names(model: str, other: str) -> tuple[str, str]:
    """Return the ends of two paths, longer where one part is not enough to tell them apart.

    Of one model twice, with a gallery by another model once, the second is called the other model.
    """
    if model == other:
        return Path(model).name, f"{Path(other).name} (other model)"
    first, second = Path(model).parts, Path(other).parts
    for length in range(1, max(len(first), len(second))):
        if first[-length:] != second[-length:]:
            return "/".join(first[-length:]), "/".join(second[-length:])
    return model, other


def _page_values(
    evaluation: ModelResults,
    figures: dict[str, dict[str, Figure]],
    names: tuple[str, str],
    details: Mapping[str, str],
) -> dict[str, Any]:
    about = {**details, **({"precision": evaluation.precision} if evaluation.precision else {})}
    if evaluation.against:
        about["other model"] = evaluation.against
    return {
        "model": names[0],
        "other": names[1],
        "description": evaluation.description,
        "verdicts": [verdict_of(evaluation, name, names[1]) for name in evaluation.results],
        "sets": [_set_values(evaluation, name, figures[name]) for name in evaluation.results],
        "about": about.items(),
    }


def verdict_of(evaluation: ModelResults, name: str, other: str) -> tuple[str, str, str]:
    """Return kind, number and words of the headline of a set.

    Without another model it is a metric; with one it is its difference, which is good or bad if its interval excludes
    0.
    """
    result, differences = evaluation.results[name], evaluation.differences.get(name, {})
    metric = _headline_metric(result)
    if metric is None:
        return "warn", "–", f"{name}: too small for any metric"
    interval = format_interval(metric, result.interval.get(metric))
    value = f"{format_number(metric, result.metrics[metric])} {interval}".rstrip()
    if metric not in differences:
        return (
            "none",
            format_number(metric, result.metrics[metric]),
            f"{metric_words(metric)} on {name} {interval}",
        )
    difference = differences[metric]
    low, high = difference.interval
    kind = "good" if low > 0 else "bad" if high < 0 else "none"
    words = "better than" if low > 0 else "worse than" if high < 0 else "no significant difference to"
    gap = format_number(metric, difference.first - difference.second)
    return (
        kind,
        gap if gap.startswith("-") else f"+{gap}",
        f"{words} {other} on {name}: {metric_words(metric)} {value}",
    )


def _headline_metric(result: Result) -> str | None:
    """Return the first metric that judges a model; the AUC, if the accuracy is doubtful."""
    if result.remark("accuracy"):
        return "auc"
    measured = (metric for metric, value in shown_metrics(result) if value is not None)
    return next((metric for metric in measured if metric not in NO_SHARES), None)


def _set_values(evaluation: ModelResults, name: str, figures: Mapping[str, Figure]) -> dict[str, Any]:
    result = evaluation.results[name]
    return {
        "name": name,
        "counts": format_counts(result),
        "warnings": list(format_warnings(result)),
        "scale": result.scale.name,
        "metrics": list(_metric_rows(result)),
        "needs": [f"{metric_words(name)}: {need}" for name, need in result.needs.items()],
        "differences": [
            (metric_words(metric), *row)
            for metric, *row in format_differences(evaluation.differences.get(name, {}))
            if metric != "threshold"
        ],
        "figures": [svg(figure, f"{name}-{kind}") for kind, figure in figures.items()],
        "slice_threshold": list(format_slice_threshold(result)),
        "group_header": ["slice", "pairs", *map(metric_words, RATES)],
        "groups": list(map(_group_row, result.groups)),
        "spreads": [
            (
                f"{summary.column}: {metric_words(metric)}",
                format_value(metric, value, summary.interval.get(metric)),
            )
            for summary in result.group_summaries
            for metric, value in summary.metrics.items()
        ],
        "pairs": pair_groups(hardest_pairs_of(result, evaluation.sets.get(name))),
    }


def _metric_rows(result: Result) -> Iterator[list[str]]:
    for name, value in shown_metrics(result):
        if value is None or name == "threshold":
            continue  # a squared distance; the last column has it as a score
        threshold = result.threshold.get(name.removeprefix("tar@"))
        words = ", ".join(filter(None, (metric_words(name), result.remark(name))))
        shown = "" if threshold is None else format_score(result, threshold)
        yield [words, format_number(name, value), format_interval(name, result.interval.get(name)), shown]


def _group_row(group: Group) -> list[str]:
    rates = [format_value(rate, group.metrics[rate], group.interval.get(rate)) for rate in RATES]
    return [f"{group.column} = {group.value}", f"{group.metrics['pairs']:,.0f}", *rates]
