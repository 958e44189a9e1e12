"""The host's memory allocator, set up for training on CPU."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MOST = 2**31 - 1
_LARGE = 1 << 16


def keep_freed_memory() -> None:
    """Have large blocks kept when they are freed, and taken in huge pages.

    glibc returns every large block to the kernel, which clears its pages before it gives them out
    again: half of a step on CPU went into that. It must be called before the first tensor is made.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _MOST})


def give_back_freed_memory() -> None:
    """Have blocks of 64 KiB and more given back when they are freed: slower, but no memory is held in vain."""
    _set({_M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _LARGE})


def _set(values: dict[int, int]) -> None:
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # musl has none
            for option, value in values.items():
                mallopt(option, value)
