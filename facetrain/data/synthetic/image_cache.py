"""Cache of encoded images that several processes share: an unnamed file with one slot per image."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<I")


class ImageCache:
    """Cache of images in a file of fixed-size slots: 4 bytes for the length, then the image.

    The file is sparse and has no name, so that the operating system removes it with the last process that has it
    open. An image that is larger than its slot, or that the disk has no space for, is not cached.
    """

    def __init__(self, slot_size: int, descriptor: int) -> None:
        """Take the size of a slot in bytes, and the descriptor of the file; the cache closes it."""
        self._slot_size, self._descriptor = slot_size, descriptor

    @classmethod
    def create(cls, folder: Path, slot_size: int) -> ImageCache | None:
        """Create a cache on the disk of a folder that may not exist yet; None if nothing can be written there."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder.parent) as file:
                return cls(slot_size, os.dup(file.fileno()))
        except OSError:
            return None

    def get(self, number: int) -> bytes | None:
        """Return an image, or None if it is not cached."""
        start = number * self._slot_size
        header = os.pread(self._descriptor, _LENGTH.size, start)
        length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
        return os.pread(self._descriptor, length, start + _LENGTH.size) if length else None

    def put(self, number: int, image: bytes) -> None:
        """Cache an image if it fits."""
        if _LENGTH.size + len(image) > self._slot_size:
            return
        start = number * self._slot_size
        with suppress(OSError):
            # The length is written last: a reader that finds a length finds the complete image.
            if os.pwrite(self._descriptor, image, start + _LENGTH.size) == len(image):
                os.pwrite(self._descriptor, _LENGTH.pack(len(image)), start)

    def __reduce__(self) -> tuple[Callable[..., ImageCache], tuple[int, Any]]:
        """Pass the file descriptor to a process that is being started."""
        return _attach, (self._slot_size, reduction.DupFd(self._descriptor))

    def __del__(self) -> None:
        """Close the file."""
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _attach(slot_size: int, handle: Any) -> ImageCache:
    return ImageCache(slot_size, handle.detach())
