"""Distribution of reports to files, TensorBoard and the console."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import numpy as np

from facetrain.files import error_reason
from facetrain.telemetry.log import warn

RunEnd = Literal["finished", "stopped", "failed"]
"""How a run has ended; stopped: by a signal, after a checkpoint."""
CLOSE_S = 60.0
"""Seconds that the end of a run waits for the service to take the last values."""


class Sink:
    """Destination of reports: a file, TensorBoard, the console or a service. A subclass implements what it takes."""

    shows_images = False
    """Whether `show` does something, so that it is worth drawing images."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step."""

    def note(self, step: int, values: dict[str, Any]) -> None:
        """Write values that are not all numbers."""

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Show images of a step by name, uint8 (H, W, 3) in RGB."""

    def sync(self) -> None:
        """Wait until all records are on the disk. For any thread.

        Raises:
            OSError: they cannot be written.
        """

    def close(self, end: RunEnd = "finished") -> None:
        """Write what is left, and close. `end` is how the run has ended."""


class Recorder(Sink):
    """Sink that passes everything on to several sinks. On ranks other than the leader there are none."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks
        self.shows_images = any(sink.shows_images for sink in sinks)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step."""
        for sink in self._sinks:
            sink.write(step, values)

    def note(self, step: int, values: dict[str, Any]) -> None:
        """Write values that are not all numbers."""
        for sink in self._sinks:
            sink.note(step, values)

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Show images of a step by name, uint8 (H, W, 3) in RGB."""
        for sink in self._sinks:
            sink.show(step, images)

    def sync(self) -> None:
        """Wait until all records are on the disk. For any thread.

        Raises:
            OSError: they cannot be written.
        """
        for sink in self._sinks:
            sink.sync()

    def close(self, end: RunEnd = "finished") -> None:
        """Close all sinks. `end` is how the run has ended."""
        for sink in self._sinks:
            sink.close(end)


class OptionalSink(Sink):
    """Sink of an optional service, such as Weights & Biases, whose failures do not end the run.

    It is opened and written to by a thread, so that training never waits for a network.

    After the first error there is one warning, and the values that follow are dropped: metrics.jsonl has all of them.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        """Start the thread. `name` is the config key that warnings name, `open_sink` connects to the service."""
        self._name = name
        self._values: SimpleQueue[tuple[int, dict[str, Any]] | RunEnd] = SimpleQueue()
        # A daemon: a service that hangs must not keep the process alive.
        self._thread = Thread(target=self._send, args=(open_sink,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Queue the values of a step."""
        # A thread that has ended takes nothing from the queue, which would grow until the end of the run.
        if self._thread.is_alive():
            # A copy: the caller may change the values while they wait.
            self._values.put((step, dict(values)))

    def close(self, end: RunEnd = "finished") -> None:
        """Wait until the service has taken all values and the end of the run."""
        self._values.put(end)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            warn(f"{self._name}: the last values were not sent in {CLOSE_S:.0f} s; metrics.jsonl has them")

    def _send(self, open_sink: Callable[[], Sink]) -> None:
        try:
            sink = open_sink()
            # Until the text that says how the run has ended.
            while isinstance(queued := self._values.get(), tuple):
                sink.write(*queued)
            sink.close(queued)
        except Exception as error:  # any error of a package that the run does not need
            warn(
                f"{self._name}: {error_reason(error)}; nothing more is sent, and training continues; metrics.jsonl "
                "has all values"
            )
