"""Objects of one run in an object store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from facetrain.checkpoint.manifest import MANIFEST, MAX_BYTES
from facetrain.errors import CheckpointError, DamagedCheckpointError
from facetrain.files import open_regular, os_errors_as, replacing
from facetrain.remote.address import public
from facetrain.remote.filesystem import open_filesystem, with_retries
from facetrain.remote.ranges import download_ranges

T = TypeVar("T")


class MirrorStore:
    """Objects below an address, by their names. Every method waits for the store, and repeats what may pass.

    All methods raise a CheckpointError with the address and the reason if the store does not do what is asked.
    """

    def __init__(self, url: str) -> None:
        """Take the address."""
        self.url = url.rstrip("/")
        filesystem, self._root = open_filesystem(self.url)
        from fsspec.implementations.dirfs import DirFileSystem

        self._objects = DirFileSystem(self._root, filesystem)

    def find(self, place: str) -> dict[str, int]:
        """Return the sizes in bytes of the objects below a name."""
        found = self._do(place, lambda: self._objects.find(place, detail=True))
        return {name: info["size"] for name, info in found.items()}

    def read(self, name: str) -> str:
        """Return an object that is text.

        Raises:
            DamagedCheckpointError: it is larger than any manifest.
        """
        if (size := self._size(name)) > MAX_BYTES:
            raise DamagedCheckpointError(
                f"{public(self.url)}/{name}: {size:,} bytes, more than the {MAX_BYTES:,} that a manifest may have"
            )
        return self._do(name, lambda: self._objects.cat_file(name)).decode("utf-8", "replace")

    def write(self, name: str, text: str) -> None:
        """Write an object at once: it has its old content, or all of the text."""
        self._do(name, lambda: self._objects.pipe_file(name, text.encode()))

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store."""
        self._do(source, lambda: self._objects.cp_file(source, target))

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._do(name, lambda: self._objects.rm_file(name))

    def upload(self, path: Path, name: str) -> None:
        """Upload a file."""
        # Before: in the operation, a file that is gone would be an object that the store does not find.
        with os_errors_as(CheckpointError, path):
            os.close(open_regular(path))
        self._do(name, lambda: self._objects.put_file(str(path), name))

    def download(
        self,
        name: str,
        target: Path,
        sha256: str | None = None,
        report: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Download an object, and compare it with the checksum of a manifest if there is one.

        `report` is called as by `download_ranges`, and before anything is written.
        """
        size = self._size(name)
        report(0)
        with replacing(target) as scratch:
            place = f"{self._root}/{name}"
            found = download_ranges(self.url, place, size, scratch, kind=CheckpointError, report=report)
            if sha256 not in (None, found):
                raise DamagedCheckpointError(
                    f"{public(self.url)}/{name}: checksum differs from the one in {MANIFEST}; the checkpoint is "
                    "damaged: continue from another one with --checkpoint STEP"
                )

    def _size(self, name: str) -> int:
        return int(self._do(name, lambda: self._objects.info(name)["size"]))

    def _do(self, name: str, operation: Callable[[], T]) -> T:
        """Return the result of an operation on an object, or on those below a name; errors name it."""
        return with_retries(f"{self.url}/{name}".rstrip("/"), operation, CheckpointError)
