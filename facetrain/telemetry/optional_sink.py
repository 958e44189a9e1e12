"""Sink of an optional service, such as Weights & Biases, whose failures do not end the run."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

from facetrain.files import error_reason
from facetrain.telemetry.log import warn
from facetrain.telemetry.recorder import Sink

CLOSE_S = 60.0
"""Seconds that the end of a run waits for the service to take the last values."""


class OptionalSink:
    """Sink that is opened and written to by a thread, so that training never waits for a network.

    After the first error there is one warning, and the values that follow are dropped: metrics.jsonl has all of them.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        """Start the thread. `name` is the config key that warnings name, `open_sink` connects to the service."""
        self._name = name
        self._values: SimpleQueue[tuple[int, dict[str, Any]] | None] = SimpleQueue()
        # A daemon: a service that hangs must not keep the process alive.
        self._thread = Thread(target=self._send, args=(open_sink,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Queue the values of a step."""
        if self._thread.is_alive():
            self._values.put((step, dict(values)))

    def close(self) -> None:
        """Wait until the service has taken all values."""
        self._values.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            warn(f"{self._name}: the last values were not sent in {CLOSE_S:.0f} s; metrics.jsonl has them")

    def _send(self, open_sink: Callable[[], Sink]) -> None:
        try:
            sink = open_sink()
            while (queued := self._values.get()) is not None:
                sink.write(*queued)
            sink.close()
        except Exception as error:  # any error of a package that the run does not need
            warn(
                f"{self._name}: {error_reason(error)}; nothing more is sent, and training continues; metrics.jsonl "
                "has all values"
            )
