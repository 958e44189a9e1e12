"""Current GPU of a thread."""

from __future__ import annotations

import torch


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number, for other threads and processes: "cuda" alone is the current GPU of this one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def use_device(device: torch.device) -> None:
    """Make a device the current one of this thread, if it is a GPU; each new thread calls it before it uses the GPU.

    A new thread uses the first GPU of the machine. On the other ranks it would create a context there, of 0.5 GB each.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
