"""The bytes of many files, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from facetrain.errors import PairsError


class LazyFiles(Sequence[bytes]):
    """A list of files that reads as a list of their bytes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: Any) -> Any:
        """Return one file's bytes.

        Raises:
            PairsError: it cannot be read.
        """
        path = self.paths[number]
        try:
            return path.read_bytes()
        except OSError as error:
            raise PairsError(f"{path}: {error.strerror or error}") from error
