"""Memory that a part of a test takes, whatever the process has taken before."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import memory_bytes


@dataclass
class Peak:
    """Largest memory of a part of a test, known when it has ended."""

    bytes: int = 0


@contextmanager
def resident_peak() -> Iterator[Peak]:
    """Measure how far the resident memory of this process rises above that at the start."""
    # Resets VmHWM (proc(5)): ru_maxrss would stay the peak of the tests before.
    Path("/proc/self/clear_refs").write_text("5")
    before, peak = memory_bytes("VmRSS"), Peak()
    yield peak
    peak.bytes = memory_bytes("VmHWM") - before


@contextmanager
def traced_peak() -> Iterator[Peak]:
    """Measure the memory that Python and NumPy take; many small objects take several times as long as without."""
    peak = Peak()
    tracemalloc.start()
    try:
        yield peak
        peak.bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
