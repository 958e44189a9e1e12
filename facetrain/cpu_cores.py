"""CPU cores that this process, or one of several, may use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from contextlib import suppress

from facetrain.control_groups import own_groups

_QUOTA_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}
"""Files with the CPU quota and its period, in microseconds, by the version of a control group."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    Respects the CPU affinity (taskset, Slurm) and the CPU quota of the container or job (cgroup), both of
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
    """Return the smallest CPU quota of the container or job in whole cores, rounded up; None if there is no quota."""
    quotas = []
    for group, version in own_groups("cpu"):
        with suppress(OSError, ValueError):  # no file, or "max"
            text = " ".join((group / name).read_text() for name in _QUOTA_FILES[version])
            quota, period = (int(number) for number in text.split())
            if quota > 0:  # version 1 writes -1 for no quota
                quotas.append(-(-quota // period))
    return min(quotas, default=None)
