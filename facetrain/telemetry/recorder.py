"""One place to report to, whatever listens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np


class Sink(Protocol):
    """Something that takes numbers: a file, TensorBoard, a terminal."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Take the values of a step."""

    def close(self) -> None:
        """Write out what is left."""


class Board(Sink, Protocol):
    """A sink that shows images too."""

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Take images of a step by name, uint8 (H, W, 3)."""


class Recorder:
    """Hand every report to all sinks; without sinks, as on every rank but the leader, to nobody."""

    def __init__(self, sinks: Iterable[Sink] = (), board: Board | None = None) -> None:
        """Take the sinks, and the one that images go to as well."""
        self._sinks, self._board = [*sinks, *([board] if board else [])], board

    @property
    def has_board(self) -> bool:
        """Whether somebody will see images: drawing them for nobody would only take time."""
        return self._board is not None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Take the values of a step."""
        for sink in self._sinks:
            sink.write(step, values)

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Take images of a step by name, uint8 (H, W, 3)."""
        if self._board:
            self._board.show(step, images)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()
