"""SIGTERM, SIGUSR1 and Ctrl-C as a request to stop after the step, with a checkpoint."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from facetrain.distributed import collectives

_HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def grace_s() -> int:
    """Return how many seconds after the signal the elastic agent ends what is still there."""
    return int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))  # torchrun's own default


class Stopped(Exception):
    """All ranks leave what they are at, because a signal has come to one of them."""


class StopRequest:
    """Remember a signal until all ranks ask for it. Ctrl-C twice stops at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _HANDLED:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, also: bool = False) -> tuple[int, bool]:
        """Return the signal that any rank has received (0: none), and whether any rank says `also`. Collective."""
        said = collectives.max_(torch.tensor([self.signal, also], dtype=torch.int32))
        return int(said[0]), bool(said[1])

    def raise_if_requested(self) -> None:
        """Leave what takes long if any rank has received a signal. Collective.

        Raises:
            Stopped: on all ranks alike.
        """
        if self.requested()[0]:
            raise Stopped

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
