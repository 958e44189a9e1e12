"""Sinks: programs that get the metrics of a run beside metrics.jsonl and the console."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from facetrain.files import error_reason
from facetrain.settings import imported
from facetrain.telemetry.log import warn

SINKS = {
    "tensorboard": "facetrain.telemetry.tensorboard:TensorBoard",
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

    def __init__(self, names: Iterable[str], run: LoggedRun) -> None:
        """Open sinks.

        Raises:
            UsageError: an optional package is missing.
        """
        self._sinks: dict[str, Sink] = {name: imported(SINKS[name])(run) for name in names}

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write numbers of a step to every sink."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(step, values)
            except Exception as error:
                self._give_up(name, error)

    def close(self) -> None:
        """Close every sink."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        warn(f"log.sinks: {name} failed ({error_reason(error)}); it gets no more metrics until a resume")
        del self._sinks[name]
