"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C as a request to stop after the current step and to save a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from facetrain.distributed import collectives
from facetrain.distributed.grace_period import grace_s
from facetrain.distributed.process_lifetime import exit_interrupted, has_agent
from facetrain.distributed.watchdog import end_within
from facetrain.signals import with_hangup


class Stopped(Exception):
    """Raised on all ranks together to leave a long operation, because a rank has received a signal."""


class StopRequest:
    """Signal handlers that record a signal; the ranks then agree to stop at the same step.

    Used as a context manager. An elastic agent enforces the grace period and ends its ranks at a second Ctrl-C. In a
    process without an agent, its watchdog enforces the grace period, and a second Ctrl-C ends a command at once. In a
    program of the user's, it raises KeyboardInterrupt.

    With an agent, a rank only records a second SIGINT: a scheduler that sends one to every process of a job lets the
    rank receive it twice, directly and from the agent.
    """

    def __init__(self) -> None:
        """Take no signal yet."""
        self.signal = 0
        """The last signal that this rank has received; 0: none."""
        self._before: dict[int, Any] = {}
        # The agent passes signals on to its ranks, waits for the grace period, and then kills them.
        self._has_agent = has_agent()

    def __enter__(self) -> Self:
        for number in with_hangup(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def ask(self) -> Callable[[], int]:
        """Start to ask all ranks for the signals that they have received until now. Collective.

        Return a function that waits for the answer: the signal that any rank has received; 0: none.
        """
        # On the host: the answer must not wait for the kernels of the step. Of different signals all ranks take the
        # largest.
        wait = collectives.start_max_(torch.tensor(self.signal, dtype=torch.int32))
        return lambda: int(wait())

    def raise_if_requested(self) -> None:
        """Leave a long operation if any rank has received a signal. Collective.

        Raises:
            Stopped: on all ranks.
        """
        if self.ask()():
            raise Stopped

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT and not self._has_agent:
            # A command has a handler of its own. Any other program may be a notebook with other work in its memory.
            if self._before[number] is signal.default_int_handler:
                raise KeyboardInterrupt
            # Not by an exception: the code that it unwinds may wait for what hangs.
            exit_interrupted()
        if not self.signal and not self._has_agent:
            why = f"still ran {grace_s()} s after {signal.Signals(number).name}"
            end_within(grace_s(), 128 + number, why)
        # Only recorded: between two instructions of a step, nothing else is safe.
        self.signal = number
