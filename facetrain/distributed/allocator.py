"""The host's memory allocator, set up for training on CPU."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST = 2**31 - 1


def keep_freed_memory() -> None:
    """Have large blocks kept when they are freed, and taken in huge pages.

    glibc returns every large block to the kernel, which clears its pages before it gives them out
    again: half of a step on CPU went into that. It must be called before the first tensor is made.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # musl has none
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, _MOST)
