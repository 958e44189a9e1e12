"""Profile of a few training steps: a trace, and the time by part of the step."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from facetrain.telemetry.memory import peak_gib
from facetrain.training.trace_timeline import seconds_by_range

WARM_UP_STEPS = 5
"""Steps before the first recorded one, in which allocator, compiler and reading processes reach a steady state."""
RECORDED_STEPS = 5
_LISTED_OPERATIONS = 12


@dataclass(frozen=True)
class Profile:
    """Time of the recorded steps on one rank."""

    steps: int
    device: str
    seconds: dict[str, float]
    """Seconds over all recorded steps, by profiler range; `idle` is the time outside of all ranges."""
    operations: str
    """Table of the longest operations by PyTorch."""
    peak_gib: float

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return sum(self.seconds.values()) / self.steps

    def shares(self) -> dict[str, float]:
        """Return the fraction of the time by range. The fractions sum to 1."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()}

    def format_summary(self) -> str:
        """Return the summary as lines of text."""
        shares = self.shares()
        parts = [
            f"  {name:12}{seconds / self.steps * 1e3:10.2f} ms{shares[name]:7.1%}"
            for name, seconds in self.seconds.items()
        ]
        return "\n".join(
            [
                f"{self.steps} steps on {self.device}, {self.step_s * 1e3:.1f} ms each; "
                f"peak memory {self.peak_gib:.2f} GiB",
                *parts,
                f"longest operations of the {self.steps} steps:",
                self.operations,
            ]
        )


class StepProfiler:
    """Recorder of a few training steps, as a context; `begin_step` is called at the beginning of each step.

    Writes `trace` in Chrome's format (`*.pt.trace.json.gz`), for Perfetto and TensorBoard, then calls `on_profile`
    once. Does neither if no step begins after the last recorded one. If one of them cannot write to the disk,
    `on_failure` gets the error, so that training can continue.
    """

    def __init__(
        self,
        trace: Path,
        device: torch.device,
        on_profile: Callable[[Profile], None],
        *,
        on_failure: Callable[[OSError], None] | None = None,
        warm_up: int = WARM_UP_STEPS,
    ) -> None:
        """Prepare to record `RECORDED_STEPS` steps after `warm_up` others."""
        self.is_over = False
        """Whether the steps were recorded, and written if the disk allowed it."""
        self._trace, self._device, self._on_profile, self._on_failure = trace, device, on_profile, on_failure
        self._warm_up, self._begun = warm_up, 0
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._recorder = profile(
            activities=activities,
            # torch records the last of the first steps, too, and drops it: its start would slow the first one that
            # counts.
            schedule=schedule(wait=warm_up - 1, warmup=1, active=RECORDED_STEPS, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )

    def __enter__(self) -> StepProfiler:
        self._recorder.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.__exit__(None, None, None)

    def begin_step(self) -> None:
        """End the step before, if there is one, and begin the next."""
        if self._begun:
            # At the two ends of the recording only: in between, the host runs ahead as it does in training.
            if self._device.type == "cuda" and self._begun in (self._warm_up, self._warm_up + RECORDED_STEPS):
                # Otherwise kernels of the steps before and after would count.
                torch.cuda.synchronize(self._device)
            self._recorder.step()
        self._begun += 1

    def _write(self, recorder: profile) -> None:
        # torch also calls this if the recording ends before its last step.
        if recorder.step_num != self._warm_up + RECORDED_STEPS:
            return
        self.is_over = True
        try:
            self._on_profile(_write_trace(recorder, self._trace, self._device))
        except OSError as error:
            if self._on_failure is None:
                raise
            self._on_failure(error)


def _write_trace(recorder: profile, trace: Path, device: torch.device) -> Profile:
    trace.parent.mkdir(parents=True, exist_ok=True)
    # Not compressed by torch, which does it line by line and takes three times as long.
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorder.export_chrome_trace(file.name)
        content = Path(file.name).read_bytes()
    # Read back: the trace has the spans of all threads, and `key_averages` only their sums.
    try:
        events = json.loads(content)["traceEvents"]
    except ValueError as error:  # torch only logs that it could not write a file
        raise OSError(f"the trace is not complete; is {tempfile.gettempdir()} full?") from error
    trace.write_bytes(gzip.compress(content))
    return Profile(
        steps=RECORDED_STEPS,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        seconds=seconds_by_range(events),
        operations=recorder.key_averages().table(
            sort_by="self_device_time_total" if device.type == "cuda" else "self_cpu_time_total",
            row_limit=_LISTED_OPERATIONS,
        ),
        peak_gib=peak_gib(device),
    )
