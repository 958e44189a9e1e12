"""Number of CPU cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    Respects the CPU affinity (taskset, Slurm) and the CPU quota of the container (cgroup v2), both of
    which `os.cpu_count` ignores.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(affinity, _cgroup_cores() or affinity), 1)


def _cgroup_cores() -> int | None:
    """Return the container's CPU quota in whole cores, rounded up; None if there is no quota."""
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
