"""Metrics of a run over its steps, read in a stream: a run of years has millions of records."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facetrain.config.loading import CONFIG_FILE, load_config
from facetrain.errors import ConfigError
from facetrain.run.folder.run_files import METRICS_FILE
from facetrain.telemetry.jsonl import GrowingJsonLines, stream_jsonl

_MOST_POINTS = 4000
"""Points of a curve: more than a page has pixels."""
_MOST_VERIFICATIONS = 100


@dataclass
class Metric:
    """One metric: its first and last value, its bounds, and points of its curve.

    The bounds are without the value of step 0, before training, as soon as there is a later one.
    """

    first: tuple[int, float | str]
    """Step and value. A number that is not finite is a text."""
    last: tuple[int, float | str]
    low: float = math.inf
    high: float = -math.inf
    _points: list[tuple[int, float]] = field(default_factory=list)
    _count: int = 0
    _stride: int = 1
    """Every such record is a point."""

    def add(self, step: int, value: float | str) -> None:
        """Take the next record."""
        if self.last[0] == 0 < step:
            self.low, self.high = math.inf, -math.inf
        self.last = step, value
        number = float(value) if isinstance(value, int | float) else math.nan
        if not math.isnan(number):
            self.low, self.high = min(self.low, number), max(self.high, number)
        if self._count % self._stride == 0:
            self._points.append((step, number))
        self._count += 1
        if len(self._points) > _MOST_POINTS:
            del self._points[1::2]
            self._stride *= 2

    @property
    def curve(self) -> tuple[list[int], list[float]]:
        """Steps and values of the curve; a value that is not finite is NaN, which is drawn as a gap."""
        step, value = self.last
        last = (step, float(value) if isinstance(value, int | float) else math.nan)
        points = self._points if self._points[-1][0] == step else [*self._points, last]
        return [step for step, _ in points], [value for _, value in points]


@dataclass
class History:
    """Metrics of a run, in memory that does not grow with the number of records."""

    step: int = 0
    """Last step that the run has reported."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    verifications: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_VERIFICATIONS))
    """The last records with an accuracy."""

    @classmethod
    def read(cls, folder: Path) -> History:
        """Return the history of a run folder; an empty one before its first report."""
        history = cls()
        for record in records_of(folder):
            history.add(record)
        return history

    def add(self, record: dict[str, Any]) -> None:
        """Take the next record of metrics.jsonl."""
        step = record["step"]
        self.step = max(self.step, step)
        for name, value in record.items():
            if name == "step" or not isinstance(value, int | float | str):
                continue
            if name not in self.metrics:
                self.metrics[name] = Metric((step, value), (step, value))
            self.metrics[name].add(step, value)
        if any(name.endswith("/accuracy") for name in record):
            self.verifications.append(record)

    @property
    def sets(self) -> list[str]:
        """Names of the verification sets, in the order of their first results."""
        return [name.removesuffix("/accuracy") for name in self.metrics if name.endswith("/accuracy")]

    @property
    def best(self) -> dict[str, float]:
        """Highest accuracy of each verification set after step 0; before the next verification, that of step 0."""
        accuracies = {name: self.metrics[f"{name}/accuracy"].high for name in self.sets}
        return {name: value for name, value in accuracies.items() if math.isfinite(value)}

    def last(self, name: str) -> float | str | None:
        """Return the last value of a metric; None if no record has it."""
        return self.metrics[name].last[1] if name in self.metrics else None


class LiveHistory:
    """History of a run that is being trained: a call reads only what was reported since the last one."""

    def __init__(self, folder: Path) -> None:
        """Take the run folder."""
        self._history, self._lines = History(), GrowingJsonLines(folder / METRICS_FILE)

    def read(self) -> History:
        """Return the history up to now."""
        for record in self._lines:
            self._history.add(record)
        return self._history


def records_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's metrics.jsonl; none before its first report."""
    path = folder / METRICS_FILE
    if path.is_file():
        yield from stream_jsonl(path)


def trained_loss_of(folder: Path) -> str:
    """Return the metric of the loss that a run trains; of one whose config cannot be read, the margin loss."""
    try:
        return load_config(folder / CONFIG_FILE).trained_loss
    except ConfigError:
        return "loss"


def formatted(value: Any, form: str) -> str:
    """Format a value of metrics.jsonl, where NaN and infinity are texts."""
    return format(value, form) if isinstance(value, int | float) else str(value)
