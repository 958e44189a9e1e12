"""CPU cores that this process, or one of several, may use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    Respects the CPU affinity (taskset, Slurm) and the CPU quota of the container (cgroup v2), both of
    which `os.cpu_count` ignores.
    """
    return cores_of([affinity()])


def cores_of(processes: Iterable[Set[int]]) -> int:
    """Return how many cores all processes of a machine may use together, at least 1.

    `processes` are the cores of each, as `affinity` returns them: a launcher may bind each to others.
    """
    count, quota = len(set().union(*processes)), _cgroup_cores()
    return count if quota is None else min(count, quota)


def share_of_cores(own: Set[int], others: Iterable[Set[int]]) -> int:
    """Return how many cores one of several processes of a machine may use, at least 1.

    Args:
        own: the cores that the process may run on, as `os.sched_getaffinity` gives them.
        others: the cores of each other process. Those that are bound to other cores take nothing away.
    """
    others = list(others)
    sharing = 1 + sum(not own.isdisjoint(other) for other in others)
    quota = _cgroup_cores()
    share = len(own) // sharing
    return max(share if quota is None else min(share, quota // (1 + len(others))), 1)


def affinity() -> set[int]:
    """Return the numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0)


def _cgroup_cores() -> int | None:
    """Return the container's CPU quota in whole cores, rounded up; None if there is no quota."""
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
