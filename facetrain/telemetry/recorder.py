"""One place to report to, whatever listens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Sink(Protocol):
    """Something that takes numbers: a file, TensorBoard, a terminal."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Take the values of a step."""

    def close(self) -> None:
        """Write out what is left."""


class Recorder:
    """Hand every report to all sinks; without sinks, as on every rank but the leader, to nobody."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Take the values of a step."""
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()
