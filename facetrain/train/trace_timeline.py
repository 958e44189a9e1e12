"""To which part of a step every moment of a trace belongs.

A trace is a list of events in Chrome's format: `ph` "X", `cat`, `name`, `tid`, start `ts` and length `dur`
in microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from facetrain.profiling import RANGE_PREFIX, RANGES

Event = dict[str, Any]
_STEP = "ProfilerStep#"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")


class Span(NamedTuple):
    """Microseconds from start to stop that belong to a part."""

    start: float
    stop: float
    part: str


def seconds_by_part(events: Iterable[Event]) -> dict[str, float]:
    """Share the recorded steps' seconds out among RANGES and `idle`, each moment to one of them.

    On CUDA a moment belongs to the part whose kernel runs; where only a collective's kernel does, to
    `collectives`; where none does and the host waits for images, to `data`; else it is idle. On the CPU it
    belongs to the innermost range of the thread that trains, but to `collectives` where that thread waits
    while one is under way: the end of the gradients' exchange, behind the backward pass.
    """
    events = [event for event in events if event.get("ph") == "X"]
    steps = [
        event for event in events if event["name"].startswith(_STEP) and event["cat"] == "user_annotation"
    ]
    main = steps[0]["tid"]
    window = Span(min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps), "idle")
    ranges = {tid: Ranges(found) for tid, found in _by_thread(events).items()}
    host = ranges[main].spans if main in ranges else []
    kernels = [event for event in events if event["cat"] in _ON_DEVICE]
    if kernels:
        host = [span for span in host if span.part == "data"]
        work = _device_work(events, kernels, ranges, main)
    else:
        work = _host_work(events, ranges, main)
    sent = [_span(event, "collectives") for event in events if event["name"].startswith(_COLLECTIVES)]
    return _paint([window, *host, *sent, *work], window)


class Ranges:
    """The ranges of one thread, which nest."""

    def __init__(self, events: Iterable[Event]) -> None:
        spans = [_span(event, event["name"].removeprefix(RANGE_PREFIX)) for event in events]
        self.spans = sorted(spans, key=lambda span: (span.start, -span.stop))
        """An outer one before those within it."""
        self._starts = [span.start for span in self.spans]

    def at(self, moment: float) -> str | None:
        """Return the part of the innermost range around a moment."""
        for span in reversed(self.spans[: bisect_right(self._starts, moment)]):
            if span.stop >= moment:
                return span.part
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
    """Give each kernel to the range in which it was launched; autograd's thread has none of its own but the head's."""
    launches = {event["args"].get("correlation"): event for event in events if event["cat"] in _LAUNCHES}
    spans = []
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch is None or kernel["name"].startswith(_COLLECTIVES):
            continue
        own = ranges[launch["tid"]].at(launch["ts"]) if launch["tid"] in ranges else None
        spans.append(_span(kernel, own or ranges[main].at(launch["ts"]) or "idle"))
    return spans


def _span(event: Event, part: str) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"], part)


def _paint(spans: Sequence[Span], window: Span) -> dict[str, float]:
    """Return the seconds of each part within the window; a later span hides the ones before it."""
    edges = np.unique([edge for span in spans for edge in (span.start, span.stop)])
    names = ["idle", *RANGES]
    owner = np.zeros(len(edges) - 1, dtype=np.int8)
    for span in spans:
        owner[np.searchsorted(edges, span.start) : np.searchsorted(edges, span.stop)] = names.index(span.part)
    inside = (edges[:-1] >= window.start) & (edges[:-1] < window.stop)
    length = np.where(inside, np.diff(edges), 0) / 1e6
    seconds = np.bincount(owner, weights=length, minlength=len(names))
    return {name: float(seconds[names.index(name)]) for name in (*RANGES, "idle")}
