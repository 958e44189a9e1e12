"""Contents of many files as a sequence that reads each file on access."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from facetrain.errors import PairsError
from facetrain.files import os_errors_as, printable


class LazyFiles(Sequence[bytes]):
    """Bytes of files, one item per path. Millions of images are never in memory together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def location(self, index: int) -> str:
        """Return the path of one file, for messages."""
        return printable(str(self.paths[index]))

    def __getitem__(self, index: Any) -> Any:
        """Return the bytes of one file.

        Raises:
            PairsError: the file cannot be read.
        """
        path = self.paths[index]
        with os_errors_as(PairsError, path):
            return path.read_bytes()
