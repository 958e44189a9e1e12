"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


def peak_gib(device: torch.device) -> float:
    """Return the peak so far in GiB: memory allocated on a CUDA device, else resident memory of the process.

    A peak never falls. It rises in the first steps and verifications, and then stays level unless memory leaks.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux: ru_maxrss can be the peak of the process that has started this one.
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 2**20
    # macOS reports bytes, others KiB.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
