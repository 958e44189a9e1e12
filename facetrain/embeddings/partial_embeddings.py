"""Embeddings of an interrupted `facetrain embed`, from which the next run continues.

.OUTPUT.partial       rows that are finished, of one type and size
.OUTPUT.partial.json  their number and size, and what was embedded
"""

# N images   n images of one chunk   D embedding

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as, parse_json, sync_file, write_atomically


class PartialEmbeddings:
    """Rows that are appended chunk by chunk to a file beside the output.

    Args:
        output: the file that the rows are for.
        key: what is embedded, and how; rows of another key are discarded.
        count: number of rows in the end.
        dtype: type of the numbers.
    """

    def __init__(self, output: Path, key: str, count: int, dtype: str) -> None:
        self._path, self._facts_path = _paths(output)
        self._dtype, self._count = np.dtype(dtype), count
        self._key = hashlib.sha256(f"{key}\n{count}\n{self._dtype}".encode()).hexdigest()
        self.done, self._size = self._read_facts()

    def append(self, row_nD: np.ndarray) -> None:
        """Write rows, and wait until they are on the disk.

        Raises:
            DataError: the disk is full, or the file cannot be written.
        """
        self._size = row_nD.shape[1]
        row_bytes = self._size * self._dtype.itemsize
        advice = "free some space, or choose another --output, and repeat the command, which then continues"
        with os_errors_as(DataError, self._path, advice):
            with self._path.open("r+b" if self.done else "wb") as file:
                if not self.done and hasattr(os, "posix_fallocate"):
                    # Report a full disk now, and not after hours.
                    os.posix_fallocate(file.fileno(), 0, self._count * row_bytes)
                file.seek(self.done * row_bytes)
                file.write(np.ascontiguousarray(row_nD, self._dtype).tobytes())
                file.flush()
                sync_file(file.fileno(), self._path)
            self.done += len(row_nD)
            facts = {"key": self._key, "done": self.done, "size": self._size}
            write_atomically(self._facts_path, json.dumps(facts))

    def rows(self) -> np.ndarray:
        """Return all rows, (N, D), mapped into memory.

        Raises:
            DataError: the file cannot be read.
        """
        with os_errors_as(DataError, self._path):
            return np.asarray(np.memmap(self._path, self._dtype, "r", shape=(self._count, self._size)))

    def _read_facts(self) -> tuple[int, int]:
        """Return the number of finished rows and their size; 0, 0 without rows of this key."""
        try:
            facts: Any = parse_json(self._facts_path.read_text(encoding="utf-8"))
            done, size = facts["done"], facts["size"]
            if facts["key"] != self._key or not 0 < done <= self._count:
                return 0, 0
            stored = self._path.stat().st_size
        except FileNotFoundError:
            return 0, 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self._facts_path}: damaged ({error_reason(error)}); remove it to embed all images again"
            ) from error
        return (done, size) if stored >= done * size * self._dtype.itemsize else (0, 0)


def remove_partial_files(output: Path) -> None:
    """Remove the rows that were kept for an output that is complete now."""
    for path in reversed(_paths(output)):
        path.unlink(missing_ok=True)


def _paths(output: Path) -> tuple[Path, Path]:
    rows = output.with_name(f".{output.name}.partial")
    return rows, rows.with_name(f"{rows.name}.json")


def embedding_key(model: Path, input: Path, images: Any, labels: np.ndarray, settings: dict[str, Any]) -> str:
    """Return a text that names a model file, a dataset and the settings; it changes if one of them does.

    The dataset is identified by its path, its labels and its first and last image.
    """
    digest = hashlib.sha256(np.ascontiguousarray(labels).tobytes())
    for image in (images[0], images[len(images) - 1]):
        digest.update(hashlib.sha256(image).digest())
    files = sorted(path for path in model.rglob("*") if path.is_file()) if model.is_dir() else [model]
    stamps = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return json.dumps([str(input.resolve()), digest.hexdigest(), stamps, settings], sort_keys=True)
