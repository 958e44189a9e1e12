"""Records some steps of a run as they are, and says where their time went."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from facetrain.telemetry.memory import peak_gib
from facetrain.train.trace_timeline import seconds_by_part

WARM_UP = 5
"""Steps before the first that is recorded: the allocator, the compiler and the readers have settled by then."""
RECORDED = 5
_SHOWN = 12
"""Operations in the summary."""

T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """Where the time of some steps went on one rank."""

    steps: int
    device: str
    seconds: dict[str, float]
    """Of all these steps, by part; `idle` is what belongs to none."""
    operations: list[tuple[str, float, int]]
    """Name, seconds of its own, calls; the longest first."""
    peak_gib: float

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return sum(self.seconds.values()) / self.steps

    def shares(self) -> dict[str, float]:
        """Return the share of the time by part; they add up to 1."""
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()}

    def told(self) -> str:
        """Tell it in lines."""
        shares = self.shares()
        parts = [
            f"  {name:12}{seconds / self.steps * 1e3:10.2f} ms{shares[name]:7.1%}"
            for name, seconds in self.seconds.items()
        ]
        operations = [
            f"  {seconds / self.steps * 1e3:10.2f} ms{calls / self.steps:7.0f} x  {name}"
            for name, seconds, calls in self.operations
        ]
        return "\n".join(
            [
                f"{self.steps} steps on {self.device}, {self.step_s * 1e3:.1f} ms each; "
                f"{self.peak_gib:.2f} GiB at most",
                *parts,
                "the longest operations of a step, what they call left aside:",
                *operations,
            ]
        )


def profiled(
    batches: Iterable[T],
    trace: Path,
    device: torch.device,
    done: Callable[[Profile], None],
    *,
    warm_up: int = WARM_UP,
    steps: int = RECORDED,
) -> Iterator[T]:
    """Pass the batches on; record what is done with some of them, and with the wait for each.

    The trace is Chrome's (`*.pt.trace.json.gz`), for Perfetto and TensorBoard. `done` is called once, when it
    is written; never where the batches end before.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    recorder = profile(
        activities=activities,
        schedule=schedule(wait=warm_up - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda recorder: done(_written(recorder, trace, device, steps)),
        acc_events=True,
    )
    with recorder:
        for number, batch in enumerate(batches):
            if number:
                if device.type == "cuda" and number in (warm_up, warm_up + steps):
                    torch.cuda.synchronize(device)  # or kernels of the steps around would count
                recorder.step()
            yield batch


def _written(recorder: profile, trace: Path, device: torch.device, steps: int) -> Profile:
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return Profile(
        steps=steps,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        seconds=seconds_by_part(events),
        operations=_longest(recorder, device),
        peak_gib=peak_gib(device),
    )


def _longest(recorder: profile, device: torch.device) -> list[tuple[str, float, int]]:
    own = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    found = [
        (average.key, getattr(average, own) / 1e6, average.count)
        for average in recorder.key_averages()
        if average.device_type.name.lower() == device.type and not average.is_user_annotation
    ]
    return sorted(found, key=lambda operation: -operation[1])[:_SHOWN]
