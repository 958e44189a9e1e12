"""Report of a run: one self-contained HTML page."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from facetrain.config.changes import differences
from facetrain.config.loading import CONFIG_FILE, is_within, load_config, plain_config, preset_configs
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.errors import ConfigError, ImageError, RunError, UsageError
from facetrain.files import open_regular, os_errors_as, write_atomically
from facetrain.pages.figures import svg
from facetrain.pages.render import jpeg_image, render
from facetrain.run.folder.environment import recorded_environment
from facetrain.run.folder.run_files import (
    AUGMENTED_FILE,
    ENVIRONMENT_FILE,
    PAIRS_FILE,
    SKIPPED_FILE,
    find_advice,
    is_run,
    logs_of_run,
    name_of_run,
)
from facetrain.run.folder.run_state import RUNNING, RunState, read_state
from facetrain.run.lr_range_test import RangeTest
from facetrain.run.report.curves import PANELS, draw_curve, draw_range_test
from facetrain.run.report.history import History, formatted, records_of, trained_loss_of
from facetrain.run.report.list_runs import KINDS
from facetrain.run.report.published_curve import published_curve_of
from facetrain.text import count_text, percent
from facetrain.verify.output.hardest_pairs import pair_groups, read_verified_pairs

_JPEG_QUALITY = 88
_MAX_LINES = 100
"""Skipped images and warnings that the page lists of each kind."""


@dataclass(frozen=True)
class ListedLines:
    """The last lines of a file, and their number."""

    count: int
    last: list[str]


def write_run_report(folder: Path, output: Path, history: History | None = None) -> None:
    """Write the report of a run. The page needs no network and has no script; its memory does not grow with the run.

    Args:
        folder: run folder.
        output: HTML file.
        history: metrics of the run, if they were read already.

    Raises:
        UsageError: the folder is not a run folder.
        RunError: a file of the run cannot be read, or the page cannot be written.
    """
    if not is_run(folder):
        raise UsageError(
            f"{folder}: not the folder of a run, which has {CONFIG_FILE} and {ENVIRONMENT_FILE}; {find_advice(folder)}"
        )
    with os_errors_as(RunError, folder):
        page = render("run/report/report.html.j2", title=name_of_run(folder), run=run_values(folder, history))
    with os_errors_as(RunError, output):
        write_atomically(output, page)


def run_values(folder: Path, history: History | None = None) -> dict[str, Any]:
    """Return what the templates of this folder tell of a run; `history` as in `write_run_report`."""
    history, state = history or History.read(folder), read_state(folder)
    published = published_curve_of(folder, state.total_steps)
    loss = trained_loss_of(folder)
    panels = [
        loss,
        *PANELS[1:],
        *(["distill_loss"] if loss == PANELS[0] and "distill_loss" in history.metrics else []),
    ]
    figures = {panel: draw_curve({"": history}, panel, published=published) for panel in panels}
    test = RangeTest.read(folder)
    return {
        **_headline(history, state, loss),
        **_config_differences(folder),
        "is_running": state.state == RUNNING,
        "below_published": published.describe(records_of(folder)) if published else [],
        "curves": [svg(figure, f"curve-{panel}") for panel, figure in figures.items()],
        "published": published.preset if published else "",
        "range_test": test and (test.describe(), svg(draw_range_test(test), "lr-range-test")),
        "first_batch": _first_batch(folder),
        "hardest_pairs": list(_hardest_pairs(folder)),
        "verifications": _verifications(history),
        "warnings": _warnings(folder),
        "skipped": _last_lines(folder / SKIPPED_FILE),
        "restarts": count_text(max(len(state.starts) - 1, 0), "resume or restart", "resumes and restarts"),
        "starts": [(_minute(each.time), f"{each.step:,}", each.ranks, each.device) for each in state.starts],
        "environment": [(key, _text(value)) for key, value in _flatten(recorded_environment(folder))],
        "folder": str(folder.resolve()),
        "written": _minute(datetime.now(UTC).isoformat()),
    }


def _minute(time: str) -> str:
    """Return a time of ISO 8601 in UTC as people read it; any other text as it is."""
    try:
        return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return time


def _headline(history: History, state: RunState, trained: str) -> dict[str, Any]:
    """Return the verdict of a run, its number, and the numbers below it."""
    total = "" if state.total_steps is None else f" of {state.total_steps:,}"
    words = f"{state.state} at step {history.step:,}{total}"
    number = "–"
    if history.best:
        name, accuracy = next(iter(history.best.items()))
        number, words = percent(accuracy), f"best accuracy on {name}; {words}"
    elif (loss := history.last(trained)) is not None:
        number, words = formatted(loss, ".4f"), f"loss; {words}"
    return {
        "kind": KINDS.get(state.state, "none"),
        "headline": number,
        "words": words,
        "reason": state.reason,
        "tiles": list(_tiles(history, state, trained)),
    }


def _tiles(history: History, state: RunState, trained: str) -> Iterator[tuple[str, str]]:
    for name, accuracy in list(history.best.items())[1:]:
        yield f"best accuracy on {name}", percent(accuracy)
    if loss := history.metrics.get(trained):
        yield f"loss, {formatted(loss.first[1], '.4f')} at first", formatted(loss.last[1], ".4f")
    if speed := history.metrics.get("images_per_s"):
        yield f"images per second, {speed.low:,.0f} to {speed.high:,.0f}", f"{speed.median:,.0f}"
    if state.state == RUNNING and isinstance(left := history.last("left_s"), float) and math.isfinite(left):
        yield "left", str(timedelta(seconds=round(left)))
    if isinstance(waited := history.last("wait_s"), float):
        yield "waited for images since the last start", f"{waited:,.1f} s"
    if memory := history.metrics.get("peak_memory_gib"):
        yield "peak memory of rank 0", f"{memory.high:.2f} GiB"
    if isinstance(skipped := history.last("skipped_images"), float) and skipped:
        yield "images that could not be read", f"{skipped:,.0f}"


def _config_differences(folder: Path) -> dict[str, Any]:
    try:
        values = plain_config(load_config(folder / CONFIG_FILE))
    except ConfigError as error:
        return {"config_error": str(error)}
    changes = {name: list(differences(preset, values)) for name, preset in _presets().items()}
    name = min(changes, key=lambda name: len(changes[name]))
    return {
        "config_error": "",
        "preset": name,
        "differences": [
            (change.key, _text(change.before), _text(change.now))
            for change in changes[name]
            if not is_within(change.key, "run")
        ],
    }


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Return the values of all presets, which a run that writes many pages reads once."""
    return {name: plain_config(config) for name, config in preset_configs().items()}


def _verifications(history: History) -> tuple[list[str], list[list[str]]] | None:
    columns = [
        (f"{name} {words}", f"{name}/{metric}", form)
        for name in history.sets
        for metric, words, form in (("accuracy", "accuracy", "%"), ("auc", "AUC", ".4f"))
        if f"{name}/{metric}" in history.metrics
    ]
    rows = [
        [f"{record['step']:,}", *(formatted(record.get(key, ""), form) for _, key, form in columns)]
        for record in history.verifications
    ]
    return (["step", *(title for title, _, _ in columns)], rows) if rows else None


def _hardest_pairs(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    verified = read_verified_pairs(folder / PAIRS_FILE)
    if verified is None:
        return
    for name, hardest in verified.sets.items():
        yield f"Hardest pairs of {name} at step {verified.step:,}", pair_groups(hardest)


def _first_batch(folder: Path) -> Markup | None:
    path = folder / AUGMENTED_FILE
    try:
        with open(path, "rb", opener=open_regular) as file:
            sheet = decode_rgb(file.read(), location=str(path))
    except (OSError, ImageError):
        return None
    return jpeg_image(encode_jpeg(sheet, _JPEG_QUALITY), "augmented images")


def _warnings(folder: Path) -> ListedLines:
    """Return the warnings of all hosts. Their lines begin with the time."""
    logs = [_last_lines(path, lambda line: " WARNING " in line) for path in logs_of_run(folder)]
    last = sorted(line for log in logs for line in log.last)[-_MAX_LINES:]
    return ListedLines(sum(log.count for log in logs), last)


def _last_lines(path: Path, is_wanted: Callable[[str], bool] = lambda line: True) -> ListedLines:
    last, count = deque[str](maxlen=_MAX_LINES), 0
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_regular) as file:
            for line in filter(is_wanted, file):
                last.append(line.rstrip("\n"))
                count += 1
    except OSError:
        pass
    return ListedLines(count, list(last))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
