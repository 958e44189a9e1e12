"""Time of a profiler trace by range of the training step.

A trace is a list of events in Chrome's format: `ph` "X", `cat`, `name`, `tid`, start `ts` and length `dur`
in microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from facetrain.device.profiler_ranges import RANGE_PREFIX, RANGES

Event = dict[str, Any]
_STEP = "ProfilerStep#"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")


class Span(NamedTuple):
    """Interval of time in microseconds that belongs to a profiler range."""

    start: float
    stop: float
    range_name: str


def seconds_by_range(events: Iterable[Event]) -> dict[str, float]:
    """Divide the recorded time among RANGES and `idle`, so that each moment belongs to exactly one; in seconds.

    On CUDA, a moment belongs to the range whose kernel runs; if only a collective's kernel runs, to `collectives`; if
    no kernel runs and the host waits for images, to `data`; else to `idle`. On the CPU, it belongs to the innermost
    range of the training thread; if that thread waits during a collective (the end of DDP's gradient exchange, after
    the backward pass), to `collectives`.
    """
    events = [event for event in events if event.get("ph") == "X"]
    steps = [
        event for event in events if event["name"].startswith(_STEP) and event["cat"] == "user_annotation"
    ]
    main = steps[0]["tid"]  # the thread that trains
    window = Span(min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps), "idle")
    ranges = {tid: Ranges(found) for tid, found in _by_thread(events).items()}
    host = ranges[main].spans if main in ranges else []
    kernels = [event for event in events if event["cat"] in _ON_DEVICE]
    if kernels:
        host = [span for span in host if span.range_name == "data"]
        work = _device_work(events, kernels, ranges, main)
    else:
        work = _host_work(events, ranges, main)
    sent = [_span(event, "collectives") for event in events if event["name"].startswith(_COLLECTIVES)]
    # In this order, because a later span covers an earlier one: computation hides a collective that runs beside it.
    return _paint([window, *host, *sent, *work], window)


class Ranges:
    """Nested ranges of one thread."""

    def __init__(self, events: Iterable[Event]) -> None:
        spans = [_span(event, event["name"].removeprefix(RANGE_PREFIX)) for event in events]
        self.spans = sorted(spans, key=lambda span: (span.start, -span.stop))
        """Sorted by start; an outer span comes before those inside of it."""
        self._starts = [span.start for span in self.spans]

    def at(self, moment: float) -> str | None:
        """Return the name of the innermost range around a moment."""
        for span in reversed(self.spans[: bisect_right(self._starts, moment)]):
            if span.stop >= moment:
                return span.range_name
        return None


def _by_thread(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in events:
        if event["cat"] == "user_annotation" and event["name"].removeprefix(RANGE_PREFIX) in RANGES:
            found.setdefault(event["tid"], []).append(event)
    return found


def _host_work(events: Sequence[Event], ranges: dict[int, Ranges], main: int) -> list[Span]:
    return [
        _span(event, ranges[main].at(event["ts"]) or "idle")
        for event in sorted(events, key=lambda event: event["ts"])
        if event["cat"] == "cpu_op" and event["tid"] == main
    ]


def _device_work(
    events: Sequence[Event], kernels: Sequence[Event], ranges: dict[int, Ranges], main: int
) -> list[Span]:
    """Assign each kernel to the range in which the host launched it.

    A backward pass launches from autograd's thread, which has ranges only for the head; elsewhere the range of the
    training thread at that moment counts.
    """
    launches = {event["args"].get("correlation"): event for event in events if event["cat"] in _LAUNCHES}
    spans = []
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch is None or kernel["name"].startswith(_COLLECTIVES):
            continue
        # The range of the thread that has launched the kernel, if it has any.
        local = ranges[launch["tid"]].at(launch["ts"]) if launch["tid"] in ranges else None
        spans.append(_span(kernel, local or ranges[main].at(launch["ts"]) or "idle"))
    return spans


def _span(event: Event, range_name: str) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"], range_name)


def _paint(spans: Sequence[Span], window: Span) -> dict[str, float]:
    """Return the seconds of each range within the window, where a later span covers the earlier ones."""
    # Between two neighboring edges all time has one owner: the last span that covers it.
    edges = np.unique([edge for span in spans for edge in (span.start, span.stop)])
    names = ["idle", *RANGES]
    owner = np.zeros(len(edges) - 1, dtype=np.int8)
    for span in spans:
        owner[np.searchsorted(edges, span.start) : np.searchsorted(edges, span.stop)] = names.index(
            span.range_name
        )
    inside = (edges[:-1] >= window.start) & (edges[:-1] < window.stop)
    length = np.where(inside, np.diff(edges), 0) / 1e6
    seconds = np.bincount(owner, weights=length, minlength=len(names))
    return {name: float(seconds[names.index(name)]) for name in (*RANGES, "idle")}
