"""Sinks: programs that get the metrics of a run beside metrics.jsonl and the console."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from facetrain.errors import ConfigError, FacetrainError
from facetrain.files import error_reason
from facetrain.own_parts import line_of, load_part
from facetrain.settings import OwnPart, imported
from facetrain.telemetry.log import warn

TENSORBOARD = "facetrain.telemetry.tensorboard:TensorBoard"
SINKS = {
    "wandb": "facetrain.telemetry.weights_and_biases:WeightsAndBiases",
}
"""Name in `log.sinks` -> place of the class, which is built from a `LoggedRun`."""


@dataclass(frozen=True)
class LoggedRun:
    """Run whose metrics a sink gets."""

    folder: Path
    run_id: str
    config: dict[str, Any]
    """The resolved config, as JSON values."""
    resume_at: int | None = None
    """Step of the checkpoint from which the run continues, None for a new run. Metrics of later steps come again."""


class Sink(Protocol):
    """Destination of metrics. Only the leader of a run has sinks; they may raise any exception."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Take numbers of a step by their names in metrics.jsonl; several calls may have one step."""

    def close(self) -> None:
        """Wait until all metrics are written."""


class Sinks:
    """The sinks of a run. One that fails gets no more metrics, and the run goes on: metrics.jsonl has them all."""

    def __init__(self, sinks: Iterable[str | OwnPart], run: LoggedRun) -> None:
        """Open sinks by their names, or places of the user's own.

        Raises:
            UsageError: an optional package is missing, or a part of the user may not run, cannot be imported, or does
                not take its options.
        """
        self._sinks: list[tuple[str, Sink]] = []
        self._given_up: list[Sink] = []
        self.faults: list[str] = []
        """Why sinks could not be opened, a line each."""
        try:
            for sink in sinks:
                self._open(sink, run)
        except BaseException:
            self.close()
            raise

    def _open(self, sink: str | OwnPart, run: LoggedRun) -> None:
        name, options = (sink, {}) if isinstance(sink, str) else (sink.type, sink.options)
        place = TENSORBOARD if name == "tensorboard" else SINKS.get(name)
        part = imported(place) if place else load_part(name, "log.sinks")
        try:
            self._sinks.append((name, part(run, **options)))
        except FacetrainError:
            raise
        except Exception as error:  # a server that does not answer must not end a run that restarts
            if isinstance(error, TypeError) and not line_of(error):
                raise ConfigError(f"log.sinks: {name}: {error}; see its options") from error
            self.faults.append(
                f"log.sinks: {name} cannot be opened ({_reason(error)}); it gets no metrics until a resume"
            )

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write numbers of a step to every sink."""
        for entry in list(self._sinks):
            try:
                entry[1].write(step, values)
            except Exception as error:
                _warn_of_failed(entry[0], error)
                self._sinks.remove(entry)
                self._given_up.append(entry[1])  # closed at the end: that may take long, and the run goes on

    def close(self) -> None:
        """Close every open sink, also those that were given up: they may have files, threads and processes."""
        while self._sinks:
            name, sink = self._sinks.pop(0)
            try:
                sink.close()
            except Exception as error:
                _warn_of_failed(name, error)
        # Last: one that waits for a server that is gone must not hold up the metrics of the others.
        while self._given_up:
            with suppress(Exception):
                self._given_up.pop(0).close()


def _warn_of_failed(sink: str, error: Exception) -> None:
    warn(f"log.sinks: {sink} failed ({_reason(error)}); it gets no more metrics until a resume")


def _reason(error: Exception) -> str:
    """Return why a sink failed: of code of one's own with its line, because no traceback is printed."""
    reason, line = error_reason(error), line_of(error)
    return f"{line}: {type(error).__name__}: {reason}" if line else reason
