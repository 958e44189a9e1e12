"""A file that many threads and processes read at once."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, ClassVar

from facetrain.errors import DataError


class File:
    """Reads at positions that the caller gives: nothing is shared, also after a fork.

    Sent to another process, it opens the file there.
    """

    error: ClassVar[type[DataError]] = DataError

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self.error(f"{path}: {error.strerror or error}") from error
        self.close = weakref.finalize(self, os.close, self._file)
        """Close the file; also done when nobody holds this object any more."""
        self.size = os.fstat(self._file).st_size

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the path."""
        return type(self), (self.path,)

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes from an offset on; fewer where the file ends.

        Raises:
            DataError: the system cannot read there.
        """
        try:
            return os.pread(self._file, count, offset)
        except OSError as error:
            raise self.error(
                f"{self.path}: reading {count:,} bytes at byte {offset:,} failed: {error.strerror or error}"
            ) from error

    def prefetch_bytes(self, offset: int, count: int) -> None:
        """Tell the system that a stretch will be read soon, so that it fetches it in one go."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, count, os.POSIX_FADV_WILLNEED)
