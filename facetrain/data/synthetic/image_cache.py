"""Images that one process has drawn, for the others: nobody draws one twice."""

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
    """As many places as there are images, in a file without a name: it is gone with the last process that has it.

    An image that is larger than its place, or finds no room on the disk, is not kept.
    """

    def __init__(self, place: int, file: int) -> None:
        """Take the bytes of a place, and an empty file, which this closes."""
        self._place, self._file = place, file

    @classmethod
    def beside(cls, folder: Path, place: int) -> ImageCache | None:
        """Open an album on the disk of a folder that is yet to be made; None where nothing can be written."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder.parent) as file:
                return cls(place, os.dup(file.fileno()))
        except OSError:
            return None

    def get(self, number: int) -> bytes | None:
        """Return an image, or None where it is not there."""
        start = number * self._place
        head = os.pread(self._file, _LENGTH.size, start)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        return os.pread(self._file, length, start + _LENGTH.size) if length else None

    def put(self, number: int, image: bytes) -> None:
        """Keep an image."""
        if _LENGTH.size + len(image) > self._place:
            return
        start = number * self._place
        with suppress(OSError):
            # The length comes last: who finds it finds the image.
            if os.pwrite(self._file, image, start + _LENGTH.size) == len(image):
                os.pwrite(self._file, _LENGTH.pack(len(image)), start)

    def __reduce__(self) -> tuple[Callable[..., ImageCache], tuple[int, Any]]:
        """Hand the file to a process that is being started."""
        return _attach, (self._place, reduction.DupFd(self._file))

    def __del__(self) -> None:
        """Close the file."""
        if hasattr(self, "_file"):
            os.close(self._file)


def _attach(place: int, handle: Any) -> ImageCache:
    return ImageCache(place, handle.detach())
