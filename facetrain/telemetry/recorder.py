"""Distribution of reports to files, TensorBoard and the console."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np


class Sink(Protocol):
    """Destination of numbers: a file, TensorBoard or the console."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step."""

    def close(self) -> None:
        """Write what is left, and close."""


class Board(Sink, Protocol):
    """Sink that shows images, too."""

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Show images of a step by name, uint8 (H, W, 3) in RGB."""


class Recorder:
    """Sends each report to all sinks. On ranks other than the leader there are none."""

    def __init__(self, sinks: Iterable[Sink] = (), board: Board | None = None) -> None:
        """Take the sinks of numbers, and the board, which gets numbers and images."""
        self._sinks, self._board = [*sinks, *([board] if board else [])], board

    @property
    def has_board(self) -> bool:
        """Whether images are shown. Without a board, callers need not draw them."""
        return self._board is not None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step to all sinks."""
        for sink in self._sinks:
            sink.write(step, values)

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Show images of a step by name, uint8 (H, W, 3) in RGB, on the board if there is one."""
        if self._board:
            self._board.show(step, images)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()
