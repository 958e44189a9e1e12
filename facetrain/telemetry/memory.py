"""Peak memory of this process, and memory of its host that is left."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

from facetrain.control_groups import own_groups

_MEMORY_FACTS = Path("/proc/meminfo")
_NO_LIMIT = 1 << 60
"""Limits from here on are none: cgroup v1 writes the largest number of pages in bytes."""
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By the version of a control group: files of the limit and of the use, and the prefix of numbers with groups below."""


def available_bytes() -> int | None:
    """Return the host memory that processes can still take, of the machine, or of the container or job (cgroup).

    The smallest of them; None if the system says none. The cache of files counts as available, since the system gives
    it up.
    """
    left = [_available_on_machine(), *(_available_in(*group) for group in own_groups("memory"))]
    return min((size for size in left if size is not None), default=None)


def _available_on_machine() -> int | None:
    facts = _numbers(_MEMORY_FACTS)
    return facts["MemAvailable"] * 1024 if "MemAvailable" in facts else None


def _available_in(group: Path, version: int) -> int | None:
    limit_name, used_name, whole = _NAMES[version]
    try:
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in (limit_name, used_name))
    except (OSError, ValueError):  # "max"
        return None
    facts = _numbers(group / "memory.stat")
    cached = facts.get(f"{whole}active_file", 0) + facts.get(f"{whole}inactive_file", 0)
    return limit - used + cached if limit < _NO_LIMIT else None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with lines of a name and a number; none if it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return {words[0].rstrip(":"): int(words[1]) for words in lines}
    except (OSError, ValueError, IndexError):
        return {}


def peak_gib(device: torch.device) -> float:
    """Return the peak so far in GiB: memory allocated on a CUDA device, else resident memory of the process.

    A peak never falls. It rises in the first steps and verifications, and then stays level unless memory leaks.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Not all systems have this line. ru_maxrss can be the peak of the process that has started this one.
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
