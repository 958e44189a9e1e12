"""How much memory this process has needed."""

from __future__ import annotations

import resource
import sys

import torch


def peak_gib(device: torch.device) -> float:
    """Return the peak so far in GiB: of the device's allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
