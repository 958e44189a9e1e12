"""Peak memory of this process, and memory of its host that is left."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_FACTS = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Return the host memory that processes can still take, of the machine or of the container (cgroup v2).

    The smaller of the two; None if the system says neither. The cache of files counts as available, since the system
    gives it up.
    """
    known = [size for size in (_available_on_machine(), _available_in_container()) if size is not None]
    return min(known, default=None)


def _available_on_machine() -> int | None:
    facts = _numbers(_MEMORY_FACTS)
    return facts["MemAvailable"] * 1024 if "MemAvailable" in facts else None


def _available_in_container() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        if limit == "max":
            return None
        facts = _numbers(_CGROUP / "memory.stat")
        return int(limit) - used + facts.get("active_file", 0) + facts.get("inactive_file", 0)
    except (OSError, ValueError):
        return None


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
