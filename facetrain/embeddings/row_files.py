"""Embeddings that are appended to a file chunk by chunk.

The file is a temporary one, or belongs to `facetrain embed`, which continues from it after an interruption:

.OUTPUT.partial       rows that are finished, of one type and size
.OUTPUT.partial.json  their number and size, and what was embedded
"""

# N images   n images of one chunk   D embedding

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as, parse_json, sync_file, write_atomically


class RowFile:
    """Rows of one type and size in an unnamed file in TMPDIR, which disappears with this object and its array.

    Args:
        count: number of rows in the end, whose space is reserved at the beginning.
    """

    def __init__(self, count: int) -> None:
        self._path, self._advice = (
            Path(tempfile.gettempdir()),
            "free some space, or set TMPDIR to another disk",
        )
        self._count, self._dtype = count, np.dtype(np.float32)
        self._size = self.done = 0
        with os_errors_as(DataError, self._path, self._advice):
            self._keep_open(tempfile.TemporaryFile())  # noqa: SIM115

    def _keep_open(self, file: Any) -> None:
        """Close the file when this object is garbage collected; a mapped array keeps its content."""
        self._file = file
        weakref.finalize(self, file.close)

    def append(self, row_nD: np.ndarray) -> None:
        """Write rows.

        Raises:
            DataError: the disk is full, or the file cannot be written.
        """
        row_nD = np.ascontiguousarray(row_nD, self._dtype)
        with os_errors_as(DataError, self._path, self._advice):
            if not self.done:
                self._size = row_nD.shape[1]
                # A full disk is reported now and not after hours; and a write to mapped memory would end the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file.fileno(), 0, self._count * self._size * row_nD.itemsize)
            self._file.write(row_nD.data)
            self._file.flush()
        self.done += len(row_nD)

    def array(self) -> np.ndarray:
        """Return all rows, (N, D), mapped into memory; changes of the array are not written.

        Raises:
            DataError: the file cannot be read.
        """
        with os_errors_as(DataError, self._path):
            return np.asarray(np.memmap(self._file, self._dtype, "c", shape=(self.done, self._size)))


class PartialEmbeddings(RowFile):
    """Rows in a file beside the output, which survives the process.

    Args:
        output: the file that the rows are for.
        key: what is embedded, and how; rows of another key are discarded.
        count: number of rows in the end.
        dtype: type of the numbers.

    Attributes:
        done: number of rows that are finished, by this process or by an interrupted one.
    """

    def __init__(self, output: Path, key: str, count: int, dtype: str) -> None:
        self._path, self._facts_path = _paths(output)
        self._advice = "free some space, or choose another --output; the same command then continues"
        self._count, self._dtype = count, np.dtype(dtype)
        self._key = hashlib.sha256(f"{key}\n{count}\n{self._dtype}".encode()).hexdigest()
        self.done, self._size = self._read_facts()
        with os_errors_as(DataError, self._path, self._advice):
            self._keep_open(self._path.open("r+b" if self.done else "w+b"))
            self._file.seek(self.done * self._size * self._dtype.itemsize)

    def append(self, row_nD: np.ndarray) -> None:
        """Write rows, and wait until they are on the disk.

        Raises:
            DataError: the disk is full, or the file cannot be written.
        """
        super().append(row_nD)
        with os_errors_as(DataError, self._path, self._advice):
            # The rows before the facts: after a power cut, these must not promise rows that are not on the disk.
            sync_file(self._file.fileno(), self._path)
            facts = {"key": self._key, "done": self.done, "size": self._size}
            write_atomically(self._facts_path, json.dumps(facts))

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
