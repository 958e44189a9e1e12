"""Device of a thread."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Make a device the current one of this thread, if it is a GPU; each new thread calls it before it uses the GPU.

    A new thread uses the first GPU of the machine. On the other ranks it would create a context there, of 0.5 GB each.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
