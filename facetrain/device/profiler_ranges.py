"""Named profiler ranges of a training step."""

from __future__ import annotations

from torch.profiler import record_function

RANGES = ("data", "forward", "backward", "head", "teacher", "collectives", "optimizer")
"""Names of the ranges. Where ranges nest, time belongs to the innermost one."""
RANGE_PREFIX = "facetrain:"
"""First characters of a range's name in a trace, so that it cannot be mistaken for torch's own events."""


def profiler_range(name: str) -> record_function:
    """Return a context manager that marks one of RANGES in a profiler's trace.

    It costs about 5 µs when no profiler records.
    """
    return record_function(RANGE_PREFIX + name)
