"""Report of a run: one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from facetrain.config.loading import load_config, plain_config
from facetrain.config.presets import presets
from facetrain.errors import ConfigError, RunError, UsageError
from facetrain.files import os_errors_as, parse_json, read_regular_text, write_atomically
from facetrain.html_page import data_table, details_table, escape, html_page, svg
from facetrain.run.folder.run_state import RunState, read_state
from facetrain.run.report.curves import PANELS, draw_curves
from facetrain.run.report.list_runs import best_accuracies, is_run, read_metrics
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.telemetry.mlflow import flatten

_MAX_LINES = 100
"""Skipped images, warnings and loss spikes that the page lists of each kind."""
_COMPARED = ("model", "head", "optim", "train")
"""Sections of the config that decide which preset is the nearest: the others describe the data and the machine."""


def write_run_report(folder: Path, output: Path) -> None:
    """Write the report of a run. The page needs no network and has no script.

    Raises:
        UsageError: the folder is not a run folder.
        RunError: a file of the run cannot be read, or the page cannot be written.
    """
    if not is_run(folder):
        raise UsageError(f"{folder}: not the folder of a run (it has no config.yaml and environment.json)")
    with os_errors_as(RunError, folder):
        page = html_page(folder.resolve().name, _body(folder))
    with os_errors_as(RunError, output, "choose another --output"):
        write_atomically(output, page)


def _body(folder: Path) -> Iterator[str]:
    records, state = read_metrics(folder), read_state(folder)
    yield details_table(_summary(folder, records, state))
    yield "<h2>Config</h2>"
    yield from _config_differences(folder)
    yield '<h2>Curves</h2><div class="figures">'
    # One small figure per panel: in one large figure, the text would be too small on a narrow screen.
    yield from (svg(draw_curves(records, "", (panel,), width=4.5), f"curve-{panel}") for panel in PANELS)
    yield "</div>"
    yield from _verifications(records)
    yield from _speed(records)
    yield from _spikes(folder)
    yield from _listed("Skipped images", _lines(folder / "skipped_images.txt"))
    yield from _listed("Warnings", [line for line in _lines(folder / "log.txt") if " WARNING " in line])
    yield from _starts(state)
    yield "<h2>Environment</h2>"
    yield details_table(_flat(_load_json(folder / "environment.json")))


def _summary(folder: Path, records: list[dict[str, Any]], state: RunState) -> Iterator[tuple[str, str]]:
    losses = [record for record in records if "loss" in record]
    total = "" if state.total_steps is None else f" of {state.total_steps:,}"
    yield "folder", str(folder.resolve())
    yield "state", state.state + (f": {state.reason}" if state.reason else "")
    yield "step", f"{max((record.get('step', 0) for record in records), default=0):,}{total}"
    if losses:
        yield "loss", f"{_number(losses[0]['loss'])} at first, {_number(losses[-1]['loss'])} at last"
    for name, accuracy in best_accuracies(records).items():
        yield f"best accuracy on {name}", f"{accuracy:.2%}"
    yield "report written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _config_differences(folder: Path) -> Iterator[str]:
    try:
        values = plain_config(load_config(folder / "config.yaml"))
    except ConfigError as error:
        yield f"<p>The config cannot be read: {escape(str(error))}</p>"
        return
    name, base = _nearest_preset(values)
    differences = [
        (key, _text(base.get(key)), _text(value))
        for key, value in flatten(values)
        if base.get(key) != value and not key.startswith("run.")
    ]
    yield f"<p>Differences from {escape(name)}, the most similar preset:</p>"
    yield data_table(("key", "preset", "this run"), differences) if differences else "<p>None.</p>"


def _nearest_preset(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and flat values of the preset with the fewest different keys of network, head and optimizer."""
    flat = dict(flatten(values))
    compared = [key for key in flat if key.partition(".")[0] in _COMPARED]
    known = {preset.name: dict(flatten(plain_config(load_config(preset.path)))) for preset in presets()}
    dataset = Path(str(flat.get("data.train"))).name

    def distance(name: str) -> tuple[int, bool]:
        preset = known[name]
        # Several presets differ in the dataset only.
        other_dataset = Path(str(preset.get("data.train"))).name != dataset
        return sum(preset.get(key) != flat[key] for key in compared), other_dataset

    name = min(known, key=distance)
    return name, known[name]


def _verifications(records: list[dict[str, Any]]) -> Iterator[str]:
    names = list(best_accuracies(records))
    if not names:
        return
    yield "<h2>Verification</h2>"
    header = ["step", *(f"{name} {metric}" for name in names for metric in ("accuracy", "AUC"))]
    rows = [
        [f"{record.get('step', 0):,}", *_cells(record, names)]
        for record in records
        if any(f"{name}/accuracy" in record for name in names)
    ]
    yield data_table(header, rows)


def _cells(record: dict[str, Any], names: list[str]) -> Iterator[str]:
    for name in names:
        accuracy, auc = record.get(f"{name}/accuracy"), record.get(f"{name}/auc")
        yield f"{accuracy:.2%}" if isinstance(accuracy, float) else ""
        yield f"{auc:.4f}" if isinstance(auc, float) else ""


def _speed(records: list[dict[str, Any]]) -> Iterator[str]:
    speeds = [record["images_per_s"] for record in records if isinstance(record.get("images_per_s"), float)]
    if not speeds:
        return
    peaks = [
        record["peak_memory_gib"] for record in records if isinstance(record.get("peak_memory_gib"), float)
    ]
    waits = [record["wait_s"] for record in records if isinstance(record.get("wait_s"), float)]
    yield "<h2>Speed</h2>"
    yield details_table(
        [
            ("images per second, median", f"{median(speeds):,.0f}"),
            ("slowest and fastest report", f"{min(speeds):,.0f} and {max(speeds):,.0f}"),
            ("waited for images since the last start", f"{waits[-1]:,.1f} s" if waits else "–"),
            ("peak memory of rank 0", f"{max(peaks):.2f} GiB" if peaks else "–"),
        ]
    )


def _spikes(folder: Path) -> Iterator[str]:
    path = folder / "loss_spikes.jsonl"
    spikes = [record for record in read_jsonl(path) if isinstance(record, dict)] if path.is_file() else []
    yield f"<h2>Loss spikes</h2><p>{len(spikes):,}{_only_last(len(spikes))}</p>"
    if spikes:
        names = ("step", "epoch", "loss", "median", "grad_norm")
        yield data_table(
            names, [[_number(spike.get(name)) for name in names] for spike in spikes[-_MAX_LINES:]]
        )


def _starts(state: RunState) -> Iterator[str]:
    yield f"<h2>Starts</h2><p>{max(len(state.starts) - 1, 0)} resumes and restarts</p>"
    rows = [[each.time, f"{each.step:,}", str(each.ranks), each.device] for each in state.starts]
    if rows:
        yield data_table(("time", "from step", "ranks", "device"), rows)


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    yield f"<h2>{title}</h2><p>{len(lines):,}{_only_last(len(lines))}</p>"
    if lines:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines[-_MAX_LINES:])
        yield f'<ul class="lines">{items}</ul>'


def _only_last(count: int) -> str:
    return f", of which the last {_MAX_LINES} are listed" if count > _MAX_LINES else ""


def _lines(path: Path) -> list[str]:
    try:
        return read_regular_text(path).splitlines()
    except OSError:
        return []


def _load_json(path: Path) -> dict[str, Any]:
    try:
        loaded = parse_json(read_regular_text(path))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    return ((key, _text(value)) for key, value in flatten(values))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
