"""Page-locked host memory, which a GPU reads and writes while the CPU works on."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy an array or a tensor of the host to the device, unless it is there; the host does not wait for a GPU."""
    tensor = torch.as_tensor(values)
    if tensor.device.type == device.type:
        return tensor
    # From other memory than page-locked one the host waits for the copy.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def page_locked(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in page-locked memory of its own size, to which a GPU copies without the CPU.

    `torch.empty(pin_memory=True)` rounds the size up to a power of two (torch's notes on CUDA,
    `pinned_max_round_threshold_mb`). That could double the memory of a table of many gigabytes.

    Raises:
        RuntimeError: the memory cannot be allocated or page-locked.
    """
    size = shape.numel() * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size)  # begins at a page, and shares none
    except OSError as error:
        raise RuntimeError(f"cannot allocate {size:,} bytes of host memory ({error.strerror})") from error
    memory = np.frombuffer(pages, np.uint8)
    address = memory.ctypes.data
    torch.cuda.check_error(lock_pages(address, size))
    # The finalizer holds the pages: an mmap object gives them back before its finalizers run, and so does an array of
    # NumPy 2.5. Not when Python exits: CUDA may have ended before, and the system releases the pages anyway.
    weakref.finalize(memory, _unlock_pages, address, pages).atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)


def _unlock_pages(address: int, pages: mmap.mmap) -> None:
    """Give back locked memory. `pages` are mapped until then: afterwards, another thread may get the same addresses."""
    torch.cuda.cudart().cudaHostUnregister(address)


def lock_pages(address: int, size: int) -> int:
    """Page-lock memory; return the error code of CUDA, which is 0 if it is locked.

    It fails where the limit of locked memory is low (ulimit -l).
    """
    code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if code:
        # CUDA keeps the error for this thread, whose next kernel launch would report it: launch one here and ignore it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code
