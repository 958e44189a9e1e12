"""Sinks: programs that get the metrics of a run beside metrics.jsonl and the console."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from facetrain.errors import ConfigError, FacetrainError
from facetrain.files import error_reason
from facetrain.own_parts import line_of, load_part
from facetrain.settings import OwnPart, imported
from facetrain.telemetry.log import warn

T = TypeVar("T")

CLOSE_S = 60.0
"""Seconds for the sinks of a run that has ended to send their last metrics."""
_HURRIED_S = 5.0
"""The same for a run that fails, or that a signal ends. Others wait meanwhile: the ranks for the leader, and its
watchdog, which ends it 8 s after the loss of a rank."""
_QUIET_S = 1.0
"""Seconds of a wait for sinks after which a line says that the run waits."""
TENSORBOARD = "facetrain.telemetry.tensorboard:TensorBoard"
SINKS = {
    "wandb": "facetrain.telemetry.weights_and_biases:WeightsAndBiases",
}
"""Name in `log.sinks` -> place of the class, which is built from a `LoggedRun`."""


@dataclass(frozen=True)
class LoggedRun:
    """Run whose metrics a sink gets."""

    folder: Path
    name: str
    """Name of the folder, also where a link leads to it."""
    run_id: str
    config: dict[str, Any]
    """The resolved config, as JSON values."""
    resume_at: int | None = None
    """Step of the checkpoint from which the run continues, None for a new run. Metrics of later steps come again."""


class Sink(Protocol):
    """Destination of metrics. Only the leader of a run has sinks; they may raise any exception.

    Each is built and called in a thread of its own. The run waits for it, at the end up to `CLOSE_S`.
    """

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Take numbers of a step by their names in metrics.jsonl; several calls may have one step."""

    def close(self) -> None:
        """Wait until all metrics are written."""


class _Client:
    """A sink in its thread: several libraries are to be closed by the thread that has opened them.

    The thread is a daemon: a sink that waits for a server which is gone does not hold up the end of the process.
    """

    def __init__(self, name: str, build: Callable[[], Sink]) -> None:
        self.name, self.is_given_up = name, False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"sink {name}", daemon=True)
        self._thread.start()
        try:
            self._sink = self._begin(build).result()
        except BaseException:
            self._calls.put(None)
            raise

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write numbers of a step; raise what the sink raises."""
        self._begin(lambda: self._sink.write(step, values)).result()

    def begin_close(self) -> Future[None]:
        """Begin to close the sink, after which its thread ends."""
        closing = self._begin(lambda: self._sink.close())
        self._calls.put(None)
        return closing

    def ends_within(self, limit_s: float) -> bool:
        """Wait for the end of the thread up to a time; return whether it has ended."""
        self._thread.join(max(limit_s, 0.0))
        return not self._thread.is_alive()

    def _begin(self, call: Callable[[], T]) -> Future[T]:
        outcome: Future[T] = Future()
        self._calls.put((outcome, call))
        return outcome

    def _serve(self) -> None:
        while entry := self._calls.get():
            outcome, call = entry
            try:
                outcome.set_result(call())
            except Exception as error:  # the thread that waits raises it
                outcome.set_exception(error)
            except BaseException as error:  # such as sys.exit; signals come to the main thread
                outcome.set_exception(RuntimeError(repr(error)).with_traceback(error.__traceback__))


class Sinks:
    """The sinks of a run. One that fails gets no more metrics, and the run goes on: metrics.jsonl has them all."""

    def __init__(self, sinks: Iterable[str | OwnPart], run: LoggedRun) -> None:
        """Open sinks by their names, or places of the user's own.

        Raises:
            UsageError: an optional package is missing, or a part of the user may not run, cannot be imported, or does
                not take its options.
        """
        self._clients: list[_Client] = []
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
            self._clients.append(_Client(name, lambda: part(run, **options)))
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
        for client in self._clients:
            try:
                if not client.is_given_up:
                    client.write(step, dict(values))  # which it may change
            except Exception as error:
                _warn_of_failed(client.name, error)
                client.is_given_up = True  # closed at the end: that may take long, and the run goes on

    def close(self, limit_s: float = _HURRIED_S) -> None:
        """Close every open sink, also those that were given up: they may have files, threads and processes.

        Wait for so many seconds at most, for all together: a server may be gone.
        """
        began_at = time.monotonic()
        closing = [(client, client.begin_close()) for client in self._clients]
        self._clients, deadline, quiet = [], began_at + limit_s, began_at + min(_QUIET_S, limit_s)
        slow = [client.name for client, _ in closing if not client.ends_within(quiet - time.monotonic())]
        if slow and deadline > quiet:
            wait = f"waiting up to {limit_s:g} s for the last metrics of {', '.join(slow)}"
            print(wait, file=sys.stderr, flush=True)
        for client, outcome in closing:
            if not client.ends_within(deadline - time.monotonic()):
                warn(
                    f"log.sinks: {client.name} has not ended within {limit_s:g} s, and may lack the last metrics, "
                    "which metrics.jsonl has"
                )
            elif (error := outcome.exception()) and not client.is_given_up:
                _warn_of_failed(client.name, error)


def _warn_of_failed(sink: str, error: BaseException) -> None:
    warn(f"log.sinks: {sink} failed ({_reason(error)}); it gets no more metrics until a resume")


def _reason(error: BaseException) -> str:
    """Return why a sink failed: of code of one's own with its line, because no traceback is printed."""
    reason, line = error_reason(error), line_of(error)
    return f"{line}: {type(error).__name__}: {reason}" if line else reason
