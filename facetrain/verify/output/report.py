"""Evaluation report: a self-contained HTML page, its figures as PNG files and its metrics as JSON."""

from __future__ import annotations

import base64
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.errors import ImageError, PairsError, RunError, UsageError
from facetrain.files import error_reason, os_errors_as
from facetrain.html_page import details_table, escape, html_page, row, svg
from facetrain.verify.evaluated_sets import EvaluatedSets
from facetrain.verify.metrics.group_summary import Group, GroupSummary
from facetrain.verify.metrics.result import HardPair, Result
from facetrain.verify.output.figures import result_figures
from facetrain.verify.output.formatting import (
    format_counts,
    format_interval,
    format_number,
    format_warnings,
    headline,
)
from facetrain.verify.sets.evaluation_sets import EvaluationSet
from facetrain.verify.sets.ijb import IjbSet
from facetrain.verify.sets.pair_set import PairSet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
_JSON = "report.json"
_SHOWN_PAIRS = 12
"""Hardest pairs of each kind on the page; the JSON has more."""
_IMAGE_SIZE = 112
"""Side of the images of the hardest pairs, pixels."""


def require_report(folder: Path) -> None:
    """Check before the evaluation that its report can be written.

    Raises:
        UsageError: the path is a file, or the folder cannot be created or written to.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder}: the report needs a folder, this is a file; name another path")
        present = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
        # The flags of a folder do not tell: /proc and some network disks refuse writes that they allow. Not the
        # folder itself is created, because several ranks check at once.
        with tempfile.TemporaryDirectory(prefix=".facetrain-", dir=present):
            pass
        for file in report_files(folder):
            if file.exists() and not os.access(file, os.W_OK):
                raise UsageError(f"{file}: permission denied; choose another folder for the report")
    except OSError as error:
        raise UsageError(
            f"{folder}: the folder of the report cannot be written: {error_reason(error)}; choose another one"
        ) from error


def report_files(folder: Path) -> list[Path]:
    """Return the page and the JSON file of a report."""
    return [folder / PAGE, folder / _JSON]


def write_report(
    folder: Path, evaluation: EvaluatedSets, *, model: str, details: Mapping[str, str] | None = None
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
        for name, by_kind in figures.items():
            for kind, figure in by_kind.items():
                figure.savefig(folder / f"{name}_{kind}.png")
        content = {"model": model, "details": dict(details or {})} | evaluation.as_json()
        text = json.dumps(content, indent=1)
        (folder / _JSON).write_text(text + "\n", encoding="utf-8")
        page.write_text(html_page(model, _body(evaluation, figures, details or {})), encoding="utf-8")
    return page


def _body(
    evaluation: EvaluatedSets, figures: dict[str, dict[str, Figure]], details: Mapping[str, str]
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
        yield from _headline_table(result, evaluation.other_results.get(name))
        yield from _metrics_table(result)
        yield '<div class="figures">'
        yield from (svg(figure, f"{name}-{kind}") for kind, figure in figures[name].items())
        yield "</div>"
        yield from _differences_table(evaluation, name)
        yield from _groups_table(result.groups)
        yield from _summaries_table(result.group_summaries)
        yield from _hardest_pairs(result, evaluation.sets.get(name))


def _headline_table(result: Result, other: Result | None) -> Iterator[str]:
    """Yield the table of accuracy and FNMR at FMR, with a column for each model."""
    shown = [result] if other is None else [result, other]
    points = list(zip(*(one.operating_points for one in shown), strict=True))
    if not points:
        return
    yield '<div class="table"><table class="headline"><tr><th></th>'
    yield "".join(f"<th>{title}</th>" for title in ("this model", "other model")[: len(shown)]) + "</tr>"
    if "accuracy" in result.metrics:
        yield row("accuracy", *(_with_interval("accuracy", one) for one in shown))
    for by_model in points:
        first = by_model[0]
        missed, kind = first.name.split("@")[0].upper(), "FPIR" if first.name.startswith("fnir") else "FMR"
        cells = [
            f"{format_number(point.name, point.rate)} {format_interval(point.name, point.interval)}"
            for point in by_model
            if point.rate is not None
        ]
        label = f"{missed} at {kind} {first.limit:.0e}"
        if cells:
            yield row(label, *cells)
        if first.remark:
            yield f"<tr><td>{'' if cells else label}</td>"
            yield f'<td class="none" colspan="{len(shown)}">{escape(first.remark)}</td></tr>'
    yield "</table></div>"


def _with_interval(name: str, result: Result) -> str:
    return f"{format_number(name, result.metrics[name])} {format_interval(name, result.interval.get(name))}"


def _metrics_table(result: Result) -> Iterator[str]:
    yield '<div class="table">'
    yield "<table><tr><th>metric</th><th>value</th><th>95 % interval</th>"
    yield f"<th>threshold ({escape(result.scale.name)})</th></tr>"
    for name, value in itertools.chain(*headline(result)):
        if name == "threshold":
            continue  # a squared distance; the last column has it as a score
        if value is None:
            needs = escape(result.needs.get(name, "not available"))
            yield f'<tr><td>{escape(name)}</td><td class="none" colspan="3">{needs}</td></tr>'
            continue
        threshold = result.threshold.get(name.removeprefix("tar@"))
        yield row(
            name,
            format_number(name, value),
            format_interval(name, result.interval.get(name)),
            "" if threshold is None else f"{threshold:.4f}",
        )
    yield "</table></div>"


def _differences_table(evaluation: EvaluatedSets, name: str) -> Iterator[str]:
    if not evaluation.differences.get(name):
        return
    yield f"<h3>Compared with {escape(evaluation.against)}</h3>"
    yield '<div class="table">'
    yield "<table><tr><th>metric</th><th>this model</th><th>other model</th>"
    yield "<th>95 % interval of the difference</th><th>p</th></tr>"
    for metric, pair in evaluation.differences[name].items():
        values = (format_number(metric, pair.first), format_number(metric, pair.second))
        yield row(metric, *values, format_interval(metric, pair.interval), f"{pair.p:.3g}")
    yield "</table></div>"


def _groups_table(groups: list[Group]) -> Iterator[str]:
    if not groups:
        return
    rates = ("accuracy", "fmr", "fnmr", "fold_accuracy")
    yield '<h3>Slices at one threshold</h3><div class="table">'
    yield "<table><tr><th>slice</th><th>pairs</th>"
    yield "".join(f"<th>{rate}</th><th>95 % interval</th>" for rate in rates) + "</tr>"
    for group in groups:
        cells = [f"{group.metrics['pairs']:,.0f}"]
        for rate in rates:
            cells += [
                format_number(rate, group.metrics[rate]),
                format_interval(rate, group.interval.get(rate)),
            ]
        yield row(f"{group.column} = {group.value}", *cells)
    yield "</table></div>"


def _summaries_table(summaries: list[GroupSummary]) -> Iterator[str]:
    if not summaries:
        return
    yield '<h3>Differences between the groups</h3><div class="table">'
    yield "<table><tr><th>measure</th><th>value</th><th>95 % interval</th></tr>"
    for summary in summaries:
        for name, value in summary.metrics.items():
            interval = format_interval(name, summary.interval.get(name))
            yield row(f"{summary.column}: {name}", format_number(name, value), interval)
    yield "</table></div>"


def _hardest_pairs(result: Result, target: EvaluationSet | None) -> Iterator[str]:
    for title, pairs in (
        ("Genuine pairs with the lowest scores", result.hardest_genuine),
        ("Impostor pairs with the highest scores", result.hardest_impostors),
    ):
        if pairs and pairs[0].name:
            # Scores of another system have names of pairs, but no images.
            yield f'<h3>{title}</h3><div class="table"><table><tr><th>pair</th><th>score</th></tr>'
            yield from (row(pair.name, f"{pair.score:.4f}") for pair in pairs[:_SHOWN_PAIRS])
            yield "</table></div>"
            continue
        shown = [_pair(pair, target) for pair in pairs[:_SHOWN_PAIRS]]
        if any(shown):
            yield f'<h3>{title}</h3><div class="pairs">{"".join(shown)}</div>'


def _pair(pair: HardPair, target: EvaluationSet | None) -> str:
    """Return the images of a pair as HTML; empty if one of them cannot be shown."""
    encoded = [_png_base64(target, index) for index in (pair.first, pair.second)]
    if not all(encoded):
        return ""
    images = "".join(f'<img alt="" src="data:image/png;base64,{png}">' for png in encoded)
    return f"<figure>{images}<figcaption>pair {pair.pair}: {pair.score:.3f}</figcaption></figure>"


def _png_base64(target: EvaluationSet | None, index: int) -> str:
    """Return an image, or the first image of a template, as PNG in base64; empty if it cannot be read."""
    try:
        if isinstance(target, PairSet):
            image = resize_square(decode_rgb(target.images[index], location=target.name), _IMAGE_SIZE)
        elif isinstance(target, IjbSet):
            first = int(np.flatnonzero(target.template == np.unique(target.template)[index])[0])
            image = target.crop(decode_rgb(target.encoded[first], location=target.name), first, _IMAGE_SIZE)
        else:
            return ""
    except (ImageError, PairsError):
        return ""
    # Encoded again, never copied from the set: the browser gets pixels, not bytes from a file of unknown origin.
    return base64.b64encode(cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()).decode()
