"""Choice of the fastest execution mode by measuring the first steps of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from facetrain.distributed import collectives
from facetrain.training.execution import Execution, Mode

_SETTLING_STEPS, _MEASURED_STEPS = 12, 20
"""Steps of each mode: unmeasured ones, in which torch.compile compiles and cuDNN searches its algorithms, then measured
ones. Three modes take 96 steps."""
_LEAST_GAIN = 0.02
"""Fraction of an eager step that another mode must save to be chosen: smaller differences are noise."""
LEAST_STEPS = 1000
"""Steps that a run must have left for a measurement: compilation alone takes about a minute."""


class StepTimer(Protocol):
    """Measurement of the time of steps."""

    def begin(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """End a step."""

    def take_median_s(self) -> float:
        """Return the median of the steps since the last call, in seconds."""


class HostTimer:
    """Timer for a device that has finished a step when the host has."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began_at = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began_at = time.perf_counter()

    def end(self) -> None:
        """End a step."""
        self._seconds.append(time.perf_counter() - self._began_at)

    def take_median_s(self) -> float:
        """Return the median of the steps since the last call, in seconds."""
        seconds, self._seconds = self._seconds, []
        return statistics.median(seconds)


class CudaTimer:
    """Timer with CUDA events: the host waits for the GPU only when the times are read.

    A step lasts from the moment when the GPU reaches its first kernel until its last kernel ends. Gaps between the
    kernels count, in which the GPU waits for the host; waiting for images does not.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._steps.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._steps[-1][0].record()

    def end(self) -> None:
        """End a step."""
        self._steps[-1][1].record()

    def take_median_s(self) -> float:
        """Wait for the GPU, and return the median of the steps since the last call, in seconds."""
        steps, self._steps = self._steps, []
        steps[-1][1].synchronize()
        return statistics.median(first.elapsed_time(last) for first, last in steps) / 1e3


class ExecutionTrial:
    """Steps in each execution mode in turn, after which the fastest mode stays in use.

    The steps train like all others. The leader's times decide for all ranks.
    """

    def __init__(self, execution: Execution, timer: StepTimer, report: Callable[[str], None]) -> None:
        """Begin with the first mode. `report` takes the line with the result."""
        self._execution, self._timer, self._report = execution, timer, report
        self._waiting = list(execution.modes)
        self._seconds: dict[Mode, float] = {}
        self._steps = 0
        """Finished steps in the present mode."""
        execution.use(self._waiting.pop(0))

    def begin_step(self) -> None:
        """Begin a step."""
        if self._steps >= _SETTLING_STEPS:
            self._timer.begin()

    def end_step(self) -> Mode | None:
        """End a step. Return the chosen mode after the last step of the trial, None before. Collective."""
        self._steps += 1
        if self._steps > _SETTLING_STEPS:
            self._timer.end()
        if self._steps < _SETTLING_STEPS + _MEASURED_STEPS:
            return None
        mode, seconds = self._execution.mode, self._timer.take_median_s()
        if not collectives.any_rank(self._execution.has_failed(mode)):
            self._seconds[mode] = seconds
        if self._waiting:
            self._execution.use(self._waiting.pop(0))
            self._steps = 0
            return None
        chosen: Mode = collectives.broadcast_json(self._fastest())
        self._execution.use(chosen)
        times = ", ".join(f"{seconds * 1e3:.1f} ms {mode}" for mode, seconds in self._seconds.items())
        failed = [mode for mode in self._execution.modes if mode not in self._seconds]
        self._report(
            f"the backbone runs {chosen} from now on: a step takes {times} (medians of {_MEASURED_STEPS} steps"
            + (f"; {' and '.join(failed)} failed, see the log)" if failed else ")")
        )
        return chosen

    def _fastest(self) -> Mode:
        fastest = min(self._seconds, key=lambda mode: self._seconds[mode])
        limit = self._seconds["eager"] * (1 - _LEAST_GAIN)
        return fastest if self._seconds[fastest] < limit else "eager"
