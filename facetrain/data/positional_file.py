"""File that many threads and processes read at once."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, open_regular, os_errors_as


class PositionalFile:
    """Reads at offsets that the caller gives, without a shared file position.

    Pickling sends the path; the receiving process opens the file again.

    Raises:
        DataError: of the subclass's `error` type, if the file cannot be opened.
    """

    error: ClassVar[type[DataError]] = DataError
    read_error: ClassVar[type[UnreadableError]] = UnreadableError

    def __init__(self, path: Path) -> None:
        self.path = path
        with os_errors_as(self.error, path):
            self._file = open_regular(path)
        self.close = weakref.finalize(self, os.close, self._file)
        """Close the file; runs by itself when the object is garbage collected."""
        self.size = os.fstat(self._file).st_size

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the path."""
        return type(self), (self.path,)

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from an offset on; fewer at the end of the file.

        Raises:
            UnreadableError: of the subclass's `read_error` type, if the operating system cannot read them.
        """
        try:
            return os.pread(self._file, count, offset)
        except OSError as error:
            raise self.read_error(
                f"{self.path}: cannot read {count:,} bytes at byte {offset:,}: {error_reason(error)}"
            ) from error

    def part(self, offset: int, size: int) -> Callable[[int, int], bytes]:
        """Return a function (position, count) that reads bytes of a part of the file, and none after the part."""
        return lambda position, count: self.bytes_at(offset + position, max(min(count, size - position), 0))

    def prefetch_bytes(self, offset: int, count: int) -> None:
        """Ask the operating system to read a range into its cache, in one request."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, count, os.POSIX_FADV_WILLNEED)
