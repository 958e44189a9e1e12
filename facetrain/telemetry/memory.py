"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys

import torch


def peak_gib(device: torch.device) -> float:
    """Return the peak so far in GiB: memory allocated on a CUDA device, else resident memory of the process.

    A peak never falls. It rises in the first steps and verifications, and then stays level unless memory leaks.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux reports KiB, macOS bytes.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
