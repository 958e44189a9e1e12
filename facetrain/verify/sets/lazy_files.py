"""Contents of many files as a sequence that reads each file on access."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from facetrain.embeddings.embed_images import LazySequence
from facetrain.errors import PairsError
from facetrain.files import os_errors_as, printable


def lazy_files(paths: Sequence[Path]) -> LazySequence[bytes]:
    """Return the bytes of files, one item per path: millions of images are never in memory together.

    The access to an item raises PairsError if the file cannot be read.
    """

    def read(index: int) -> bytes:
        with os_errors_as(PairsError, paths[index]):
            return paths[index].read_bytes()

    return LazySequence(len(paths), read, lambda index: printable(str(paths[index])))
