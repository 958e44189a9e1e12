"""What a run will hold, by the forecast of `facetrain plan`, against what this machine has."""

from __future__ import annotations

from facetrain.doctor.finding import Finding, failure, ok, warning
from facetrain.plan.forecast import Forecast
from facetrain.plan.limits import USABLE

_GIB = 1 << 30


def checkpoint_bytes(needed: Forecast, world_size: int) -> int:
    """Return the bytes of one checkpoint: each weight with its moments, of the backbone once, of all centres."""
    centres = needed.centres + needed.centre_moments + needed.elsewhere
    return needed.weights + needed.moments + centres * world_size


def check_memory(needed: Forecast, memory: int) -> list[Finding]:
    """Compare the bytes that a rank will need at the worst moment of a step with those that its device has."""
    found = f"{needed.total / _GIB:.1f} of {memory / _GIB:.0f} GiB by the forecast"
    if needed.total > memory:
        do = "`facetrain plan` names the cheapest change that makes it fit, and the largest batch"
        return [failure("memory", found, do)]
    if needed.total > USABLE * memory:
        do = "it may fail on what is lost between blocks: `facetrain plan` names the largest batch"
        return [warning("memory", found, do)]
    return [ok("memory", found)]
