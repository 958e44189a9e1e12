"""Report of a run: one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from facetrain.config.loading import load_config, plain_config
from facetrain.config.presets import presets
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.errors import ConfigError, ImageError, RunError, UsageError
from facetrain.files import os_errors_as, read_regular_text, write_atomically
from facetrain.html_page import data_table, details_table, escape, html_page, image, svg
from facetrain.run.folder.create import recorded_environment
from facetrain.run.folder.run_state import RUNNING, RunState, read_state
from facetrain.run.lr_range_test import RangeTest
from facetrain.run.outputs import AUGMENTED_FILE, PAIRS_FILE, SKIPPED_FILE
from facetrain.run.report.curves import PANELS, draw_curves, draw_range_test
from facetrain.run.report.list_runs import best_accuracies, formatted, is_run, read_metrics
from facetrain.run.report.published_curve import PublishedCurve, published_curve_of
from facetrain.verify.output.hardest_pairs import VerifiedPairs, pairs_html

_REFRESH_S = 30
"""Seconds after which a browser reads the page of a run that trains again."""
_JPEG_QUALITY = 88
_MAX_LINES = 100
"""Skipped images and warnings that the page lists of each kind."""


def write_run_report(folder: Path, output: Path) -> None:
    """Write the report of a run. The page needs no network and has no script.

    Raises:
        UsageError: the folder is not a run folder.
        RunError: a file of the run cannot be read, or the page cannot be written.
    """
    if not is_run(folder):
        raise UsageError(f"{folder}: not the folder of a run (it has no config.yaml and environment.json)")
    refresh_s = _REFRESH_S if read_state(folder).state == RUNNING else None
    with os_errors_as(RunError, folder):
        page = html_page(folder.resolve().name, run_sections(folder), refresh_s=refresh_s)
    with os_errors_as(RunError, output, "choose another --output"):
        write_atomically(output, page)


def run_sections(folder: Path) -> Iterator[str]:
    """Yield the sections of the report of a run as HTML, for this page or another one."""
    records, state = read_metrics(folder), read_state(folder)
    published = published_curve_of(folder, state.total_steps)
    yield details_table(_summary(folder, records, state, published))
    yield '<h2>Curves</h2><div class="figures">'
    # One small figure per panel: in one large figure, the text would be too small on a narrow screen.
    for panel in PANELS:
        figure = draw_curves(records, "", (panel,), published=published, width=4.5)
        yield svg(figure, f"curve-{panel}")
    yield "</div>"
    if published:
        yield f"<p>Dashed: the published training of {published.preset}.</p>"
    yield from _range_test(folder)
    yield from _verifications(records)
    yield from _hardest_pairs(folder)
    yield from _first_batch(folder)
    yield from _speed(records)
    yield "<h2>Config</h2>"
    yield from _config_differences(folder)
    yield from _listed("Skipped images", _lines(folder / SKIPPED_FILE))
    yield from _listed("Warnings", [line for line in _lines(folder / "log.txt") if " WARNING " in line])
    yield f"<h2>Starts</h2><p>{max(len(state.starts) - 1, 0)} resumes and restarts</p>"
    starts = [[each.time, f"{each.step:,}", str(each.ranks), each.device] for each in state.starts]
    yield data_table(("time", "from step", "ranks", "device"), starts)
    yield "<h2>Environment</h2>"
    environment = recorded_environment(folder)
    yield details_table((key, _text(value)) for key, value in _flatten(environment))


def _summary(
    folder: Path, records: list[dict[str, Any]], state: RunState, published: PublishedCurve | None
) -> Iterator[tuple[str, str]]:
    losses = [formatted(record["loss"], ".4g") for record in records if "loss" in record]
    total = "" if state.total_steps is None else f" of {state.total_steps:,}"
    yield "folder", str(folder.resolve())
    yield "state", state.state + (f": {state.reason}" if state.reason else "")
    yield "step", f"{max((record['step'] for record in records), default=0):,}{total}"
    if losses:
        yield "loss", f"{losses[0]} at first, {losses[-1]} at last"
    for name, accuracy in best_accuracies(records).items():
        yield f"best accuracy on {name}", f"{accuracy:.2%}"
    for line in published.describe(records) if published else ():
        yield "warning", line
    yield "report written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _config_differences(folder: Path) -> Iterator[str]:
    try:
        values = dict(_flatten(plain_config(load_config(folder / "config.yaml"))))
    except ConfigError as error:
        yield f"<p>The config cannot be read: {escape(str(error))}</p>"
        return
    known = _presets()

    def count_differences(name: str) -> int:
        return sum(known[name].get(key) != value for key, value in values.items())

    name = min(known, key=count_differences)
    differences = [
        (key, _text(known[name].get(key)), _text(value))
        for key, value in values.items()
        if known[name].get(key) != value and not key.startswith("run.")
    ]
    yield f"<p>Differences from {escape(name)}, the most similar preset:</p>"
    yield data_table(("key", "preset", "this run"), differences)


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Return the values of all presets, which a run that writes many pages reads once."""
    return {preset.name: dict(_flatten(plain_config(load_config(preset.path)))) for preset in presets()}


def _range_test(folder: Path) -> Iterator[str]:
    if test := RangeTest.read(folder):
        yield f"<h2>Learning rate test</h2><p>{escape(test.describe())}</p>"
        yield f'<div class="figures">{svg(draw_range_test(test, width=4.5), "lr-range-test")}</div>'


def _verifications(records: list[dict[str, Any]]) -> Iterator[str]:
    metrics = (("accuracy", ".2%"), ("auc", ".4f"))
    columns = [(f"{name}/{metric}", form) for name in best_accuracies(records) for metric, form in metrics]
    rows = [
        [f"{record['step']:,}", *(formatted(record.get(key, ""), form) for key, form in columns)]
        for record in records
        if any(key in record for key, _ in columns)
    ]
    if rows:
        yield "<h2>Verification</h2>"
        yield data_table(["step", *(key.replace("/", " ") for key, _ in columns)], rows)


def _hardest_pairs(folder: Path) -> Iterator[str]:
    try:
        verified = VerifiedPairs.model_validate_json((folder / PAIRS_FILE).read_bytes())
    except (OSError, ValueError):  # without verification; or a file of another version, or a damaged one
        return
    for name, hardest in verified.sets.items():
        yield f"<h2>Hardest pairs of {escape(name)} at step {verified.step:,}</h2>"
        yield from pairs_html(hardest)


def _first_batch(folder: Path) -> Iterator[str]:
    path = folder / AUGMENTED_FILE
    try:
        sheet = decode_rgb(path.read_bytes(), location=str(path))
    except (OSError, ImageError):
        return
    yield "<h2>First batch, as the network gets it</h2>"
    yield f'<div class="sheet">{image(encode_jpeg(sheet, _JPEG_QUALITY), "augmented images")}</div>'


def _speed(records: list[dict[str, Any]]) -> Iterator[str]:
    def numbers(name: str) -> list[float]:
        return [record[name] for record in records if isinstance(record.get(name), float)]

    if speeds := numbers("images_per_s"):
        yield "<h2>Speed</h2>"
        yield details_table(
            [
                ("images per second, median", f"{median(speeds):,.0f}"),
                ("slowest and fastest report", f"{min(speeds):,.0f} and {max(speeds):,.0f}"),
                ("waited for images since the last start", f"{(numbers('wait_s') or [0.0])[-1]:,.1f} s"),
                ("peak memory of rank 0", f"{max(numbers('peak_memory_gib'), default=0.0):.2f} GiB"),
            ]
        )


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    yield from _counted(title, len(lines))
    if lines:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines[-_MAX_LINES:])
        yield f'<ul class="lines">{items}</ul>'


def _counted(title: str, count: int) -> Iterator[str]:
    last = f", of which the last {_MAX_LINES} are listed" if count > _MAX_LINES else ""
    yield f"<h2>{title}</h2><p>{count:,}{last}</p>"


def _lines(path: Path) -> list[str]:
    try:
        return read_regular_text(path).splitlines()
    except OSError:
        return []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested values."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
