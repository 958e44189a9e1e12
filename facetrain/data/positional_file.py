"""File or object of a store that many threads and processes read at once."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from facetrain.data.object_blocks import open_object, stored_object
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
        self._object = stored_object(path)
        self.size = self._object.size if self._object else os.fstat(self._file).st_size

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the path."""
        return type(self), (self.path,)

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from an offset on; fewer at the end of the file.

        Raises:
            UnreadableError: of the subclass's `read_error` type, if the operating system cannot read them.
            DataError: the store cannot.
        """
        if self._object:
            return self._object.bytes_at(offset, count)
        try:
            return os.pread(self._file, count, offset)
        except OSError as error:
            raise self.read_error(
                f"{self.path}: cannot read {count:,} bytes at byte {offset:,}: {error_reason(error)}"
            ) from error

    def forget(self, offset: int, count: int) -> bool:
        """Have a range of an object fetched again when it is read next; return whether this is an object."""
        if self._object:
            self._object.forget(offset, count)
        return self._object is not None

    def prefetch_bytes(self, offset: int, count: int) -> None:
        """Ask the operating system to read a range into its cache, or threads to fetch that range of an object."""
        if self._object:
            self._object.prefetch(offset, count)
        elif count:  # 0 would be the whole rest of the file
            os.posix_fadvise(self._file, offset, count, os.POSIX_FADV_WILLNEED)


def open_stream(path: Path) -> BinaryIO:
    """Open a file, or an object of a remote dataset, for a library that reads archives or tables.

    Raises:
        OSError: the file cannot be opened.
        DataError: the store cannot read the object; later, also by `read`.
    """
    stored = stored_object(path)
    return open_object(stored) if stored else path.open("rb")
