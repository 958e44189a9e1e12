"""Memory that a part of a test takes, whatever the process has taken before."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """Largest memory of a part of a test, known when it has ended."""

    bytes: int = 0


def resident_bytes(which: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


@contextmanager
def resident_peak() -> Iterator[Peak]:
    """Measure how far the resident memory of this process rises above that at the start."""
    # Resets VmHWM (proc(5)): ru_maxrss would stay the peak of the tests before.
    Path("/proc/self/clear_refs").write_text("5")
    before, peak = resident_bytes("VmRSS"), Peak()
    yield peak
    peak.bytes = resident_bytes("VmHWM") - before


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
