"""An evaluation as one HTML page that needs nothing else, with its figures as PNG and its numbers as JSON."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from facetrain.data.decode import decode_rgb, resize_square
from facetrain.errors import ImageError, PairsError, RunError, UsageError
from facetrain.verify.evaluate import Evaluation
from facetrain.verify.evaluation_sets import EvaluationSet
from facetrain.verify.figures import require_matplotlib, result_figures
from facetrain.verify.formatting import COUNTS, format_interval, format_number
from facetrain.verify.ijb import IjbSet
from facetrain.verify.pair_set import PairSet
from facetrain.verify.result import Group, HardPair, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
_SHOWN = 12
"""Hardest pairs of either kind on the page; the JSON has more."""
_SIZE = 112
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{border-top:2px solid #ddd;padding-top:1rem;margin-top:2.5rem}
table{border-collapse:collapse;margin:.8rem 0}td,th{padding:.2rem .9rem .2rem 0;text-align:right}
td:first-child,th:first-child{text-align:left}tr{border-bottom:1px solid #eee}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1rem}
.figures svg{width:100%;height:auto}.none{color:#777;text-align:left}
.pairs{display:flex;flex-wrap:wrap;gap:.8rem}figure{margin:0}figure img{width:84px;height:84px}
figcaption{font-size:.8rem;color:#555;text-align:center}
"""


def require_report(folder: Path) -> None:
    """Refuse, before the sets are scored, a report that could not be written.

    Raises:
        UsageError: matplotlib is not installed, or a file has the folder's name.
    """
    require_matplotlib()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is no folder; name one for the report, there or not")


def write_report(folder: Path, found: Evaluation, *, model: str) -> Path:
    """Write `report.html`, `report.json` and a PNG per figure into a folder; return the page.

    The page is self-contained: figures are inline SVG, images inline PNG, and nothing runs in it.

    Raises:
        RunError: the folder cannot be written.
        UsageError: matplotlib is not installed.
    """
    figures = {name: result_figures(result) for name, result in found.results.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawn in figures.items():
            for kind, figure in drawn.items():
                figure.savefig(folder / f"{name}_{kind}.png")
        text = json.dumps({"model": model} | found.as_json(), indent=1)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        page = folder / PAGE
        page.write_text("\n".join(_page(found, figures, model)), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: the report cannot be written: {error.strerror or error}") from error
    return page


def _page(found: Evaluation, figures: dict[str, dict[str, Figure]], model: str) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f"<title>{escape(model)}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(model)}</h1><p>{escape(found.description)}</p>"
    yield "<p>Intervals are the middle 95 % over draws of subjects, not of pairs.</p>"
    for name, result in found.results.items():
        yield f"<h2>{escape(name)}</h2>"
        yield from _numbers(result)
        yield '<div class="figures">'
        yield from (_svg(figure, f"{name}-{kind}") for kind, figure in figures[name].items())
        yield "</div>"
        yield from _differences(found, name)
        yield from _groups(result.groups)
        yield from _hardest(result, found.targets.get(name))
    yield "</body></html>"


def _numbers(result: Result) -> Iterator[str]:
    counts = [f"{value:,.0f} {name}" for name, value in result.metrics.items() if name in COUNTS and value]
    yield f"<p>{', '.join(counts)}; {result.subjects:,} subjects</p>"
    yield "<table><tr><th>number</th><th>value</th><th>95 % interval</th><th>threshold (cosine)</th></tr>"
    for name, value in result.metrics.items():
        if name in COUNTS:
            continue
        if value is None:
            needs = escape(result.needs.get(name, "not told"))
            yield f'<tr><td>{escape(name)}</td><td class="none" colspan="3">{needs}</td></tr>'
            continue
        threshold = result.threshold.get(name.removeprefix("tar@"))
        yield _row(
            name,
            format_number(name, value),
            format_interval(name, result.interval.get(name)),
            "" if threshold is None else f"{threshold:.4f}",
        )
    yield "</table>"


def _differences(found: Evaluation, name: str) -> Iterator[str]:
    if not found.differences.get(name):
        return
    yield f"<h3>Against {escape(found.against)}</h3><table><tr><th>number</th><th>this</th><th>that</th>"
    yield "<th>95 % interval of the difference</th><th>p</th></tr>"
    for metric, pair in found.differences[name].items():
        values = (format_number(metric, pair.first), format_number(metric, pair.second))
        yield _row(metric, *values, format_interval(metric, pair.interval), f"{pair.p:.3g}")
    yield "</table>"


def _groups(groups: list[Group]) -> Iterator[str]:
    if not groups:
        return
    rates = ("accuracy", "fmr", "fnmr")
    yield "<h3>Slices, at one threshold</h3><table><tr><th>group</th><th>pairs</th>"
    yield "".join(f"<th>{rate}</th><th>95 % interval</th>" for rate in rates) + "</tr>"
    for group in groups:
        cells = [f"{group.metrics['pairs']:,.0f}"]
        for rate in rates:
            cells += [
                format_number(rate, group.metrics[rate]),
                format_interval(rate, group.interval.get(rate)),
            ]
        yield _row(f"{group.column} = {group.value}", *cells)
    yield "</table>"


def _hardest(result: Result, target: EvaluationSet | None) -> Iterator[str]:
    for title, pairs in (
        ("Genuine pairs that are least alike", result.hardest_genuine),
        ("Impostor pairs that are most alike", result.hardest_impostors),
    ):
        shown = [_pair(pair, target) for pair in pairs[:_SHOWN]] if target is not None else []
        if any(shown):
            yield f'<h3>{title}</h3><div class="pairs">{"".join(shown)}</div>'


def _pair(pair: HardPair, target: EvaluationSet | None) -> str:
    pictures = [_image(target, number) for number in (pair.first, pair.second)]
    if not all(pictures):
        return ""
    images = "".join(f'<img alt="" src="data:image/png;base64,{picture}">' for picture in pictures)
    return f"<figure>{images}<figcaption>pair {pair.pair}: {pair.score:.3f}</figcaption></figure>"


def _image(target: EvaluationSet | None, number: int) -> str:
    """Return an image as a PNG in base64; of a template, its first image; of what cannot be shown, nothing."""
    try:
        if isinstance(target, PairSet):
            image = resize_square(decode_rgb(target.images[number], location=target.name), _SIZE)
        elif isinstance(target, IjbSet):
            first = int(np.flatnonzero(target.template == np.unique(target.template)[number])[0])
            image = target.crop(decode_rgb(target.encoded[first], location=target.name), first, _SIZE)
        else:
            return ""
    except (ImageError, PairsError):
        return ""
    # Encoded anew: what a browser gets are pixels, whatever the set's file held.
    return base64.b64encode(cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()).decode()


def _svg(figure: Figure, salt: str) -> str:
    import matplotlib

    text = io.StringIO()
    # The salt makes ids that differ from figure to figure on the page, and not from run to run.
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
