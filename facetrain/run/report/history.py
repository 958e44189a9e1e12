"""Metrics of a run over its steps, read in a stream: a run of years has millions of records."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.config.loading import CONFIG_FILE, load_config
from facetrain.errors import ConfigError
from facetrain.run.folder.run_files import METRICS_FILE
from facetrain.telemetry.jsonl import stream_jsonl
from facetrain.text import number_text, percent

_MOST_STRETCHES = 2000
"""Stretches of a curve with two points each: more than a page has pixels."""
_MOST_VERIFICATIONS = 100


@dataclass
class Metric:
    """One metric: its first and last value, its bounds, and points of its curve.

    The bounds are without the value of step 0, before training, as soon as there is a later one. The curve has the
    first record of each stretch of as many records, and the one whose value is the farthest from it: a single spike or
    gap stays visible in a curve of any length.
    """

    first: tuple[int, float | str]
    """Step and value. A number that is not finite is a text."""
    last: tuple[int, float | str]
    low: float = math.inf
    high: float = -math.inf
    _stretches: list[tuple[tuple[int, float], tuple[int, float]]] = field(default_factory=list)
    _count: int = 0
    _length: int = 1
    """Records of a stretch."""

    def add(self, step: int, value: float | str) -> None:
        """Take the next record."""
        if self.last[0] == 0 < step:
            self.low, self.high = math.inf, -math.inf
        self.last = step, value
        number = float(value) if isinstance(value, int | float) else math.nan
        if not math.isnan(number):
            self.low, self.high = min(self.low, number), max(self.high, number)
        if self._count % self._length == 0:
            self._stretches.append(((step, number), (step, number)))
        else:
            first, farthest = self._stretches[-1]
            self._stretches[-1] = first, _farthest(first, farthest, (step, number))
        self._count += 1
        if len(self._stretches) > _MOST_STRETCHES:
            self._length *= 2
            # One more than the limit, which is even: the last one has no partner.
            pairs = zip(self._stretches[:-1:2], self._stretches[1::2], strict=True)
            joined = [(one[0], _farthest(*one, *other)) for one, other in pairs]
            self._stretches = [*joined, self._stretches[-1]]

    @property
    def curve(self) -> tuple[list[int], list[float]]:
        """Steps and values of the curve; a value that is not finite is NaN, which is drawn as a gap."""
        step, value = self.last
        last = (step, float(value) if isinstance(value, int | float) else math.nan)
        points = [*(point for stretch in self._stretches for point in stretch), last]
        points = [point for point, following in pairwise(points) if point[0] != following[0]] + [last]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def median(self) -> float:
        """Median of the first values of all stretches."""
        return float(np.nanmedian([first[1] for first, _ in self._stretches]))


def _farthest(first: tuple[int, float], *points: tuple[int, float]) -> tuple[int, float]:
    """Return the first of the points whose value is the farthest from that of `first`; NaN is farther than a number."""
    return max(
        points, key=lambda point: math.inf if math.isnan(point[1] - first[1]) else abs(point[1] - first[1])
    )


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
        history.extend(records_of(folder))
        return history

    def extend(self, records: Iterable[dict[str, Any]]) -> None:
        """Take the next records of metrics.jsonl."""
        for record in records:
            self.add(record)

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
        """Highest accuracy of each verification set after step 0, which is before training."""
        accuracies = {name: self.metrics[f"{name}/accuracy"] for name in self.sets}
        return {name: one.high for name, one in accuracies.items() if one.last[0] and math.isfinite(one.high)}

    def last(self, name: str) -> float | str | None:
        """Return the last value of a metric; None if no record has it."""
        return self.metrics[name].last[1] if name in self.metrics else None


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
    """Format a value of metrics.jsonl, where NaN and infinity are texts, as the console does; `%` as `percent`."""
    if not isinstance(value, int | float):
        return str(value)
    return percent(value) if form == "%" else number_text(value, form)
