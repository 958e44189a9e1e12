"""GPU driver of this machine, asked without torch: its GPUs, and whether torch fails to use them."""

from __future__ import annotations

import ctypes
from pathlib import Path

# From cuda.h.
_SUCCESS, _STUB_LIBRARY, _NO_DEVICE = 0, 34, 100


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is installed. Without one there is no need to import torch to count devices."""
    return _cuda_driver() is not None or Path("/dev/kfd").exists()  # AMD's


def gpu_failure() -> str:
    """Return why torch cannot use the GPUs of this machine; "" if it can, or if there are none (or all are hidden).

    A driver that is older than torch's CUDA is such a reason.
    """
    import torch  # takes seconds

    if torch.cuda.is_available():
        return ""
    status, count = _asked_driver()
    if count == 0 and status in (_SUCCESS, _NO_DEVICE, _STUB_LIBRARY):
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return "torch finds no GPU"


def count_gpus() -> int:
    """Return how many GPUs, or instances of MIG, the driver lets this process use; 0 for AMD's."""
    return _asked_driver()[1]


def _asked_driver() -> tuple[int, int]:
    """Return the status of NVIDIA's driver, and the number of its GPUs; none for AMD's."""
    driver, count = _cuda_driver(), ctypes.c_int()
    if driver is None:
        return _NO_DEVICE, 0
    # The driver itself is never too old. It respects CUDA_VISIBLE_DEVICES.
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return status, count.value


def _cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
