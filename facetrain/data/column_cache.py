"""Cache files of large arrays, memory-mapped so that a dataset of millions of images opens at once.

A file is one page of JSON, followed by the arrays, each aligned to 64 bytes. It records a digest of the names,
sizes and times of change of the files that it was computed from, and a checksum. A stale or damaged file is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.shared_array import SharedArray, SharedFile
from facetrain.distributed.user_environment import user_cache_folder
from facetrain.errors import DataError
from facetrain.files import error_reason, locked, open_regular, parse_json, replacing, stamp_of

_VERSION = 16
"""Raised when a reader finds other labels or places in the same files."""
_HEADER_BYTES = 4096
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24
_LEAST_SHARED_BYTES = 1 << 20
"""Smallest array that is shared: each takes two file descriptors, and a mixture can have hundreds of small folders."""
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')
"""Text in JSON."""


@dataclass(frozen=True)
class Columns:
    """Arrays by name. Values that JSON can hold, such as a list of names, are arrays of its bytes.

    Started processes map the same cache file, also after it was replaced: the readers of a later stage of a run need
    the places of the images whose labels the run has. They share large arrays in memory, too, after `in_shared_memory`.
    Elsewhere, pickling sends the arrays.
    """

    arrays: Mapping[str, np.ndarray]
    path: Path | None = None
    """Cache file; None if the arrays are in memory only."""
    file: SharedFile | None = None
    """The cache file, open."""
    inputs: Mapping[Path, list[int] | None] = field(default_factory=dict)
    """Files that the columns describe, and which started processes read, with the stamps that they had."""
    shared: Mapping[str, SharedArray] = field(default_factory=dict)
    """Those of the arrays that are in memory that this process shares with those that it starts."""

    @classmethod
    def of(cls, **columns: Any) -> Columns:
        """Return columns of arrays and of values that JSON can hold."""
        return cls({name: _as_array(value) for name, value in columns.items()})

    def in_shared_memory(self) -> Columns:
        """Return the columns so that started processes map the memory of the large arrays."""
        if self.path is not None or self.shared:
            return self
        shared = {
            name: SharedArray.of(array, array.dtype.str)
            for name, array in self.arrays.items()
            if array.nbytes >= _LEAST_SHARED_BYTES
        }
        return replace(_with_shared(self.arrays, shared), inputs=self.inputs)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a column that was not an array; the default if there is no such column."""
        return parse_json(self.arrays[name].tobytes().decode()) if name in self.arrays else default

    def texts(self, name: str) -> Iterator[str]:
        """Yield the texts of a column that was a list of texts, without a list of all; none if there is no column."""
        column = self.arrays[name].data if name in self.arrays else b""
        for match in _TEXT.finditer(column):
            text = match[0]
            yield parse_json(text.decode()) if b"\\" in text else text[1:-1].decode()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the cache file, or as the arrays if there is none, or no process is being started.

        Raises:
            DataError: a process is being started, and an input has changed: it could read other images.
        """
        if get_spawning_popen() is not None:
            _require_unchanged(self.inputs)
            if self.file is not None:
                return _mapped, (self.file, self.path)
        own = {name: array for name, array in self.arrays.items() if name not in self.shared}
        return _with_shared, (own, self.shared)


def _with_shared(arrays: Mapping[str, np.ndarray], shared: Mapping[str, SharedArray]) -> Columns:
    """Return the columns with `shared` beside the other arrays, or in their place."""
    return Columns({**arrays, **{name: each.array for name, each in shared.items()}}, shared=shared)


def _as_array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else np.frombuffer(json.dumps(value).encode(), np.uint8)


def _require_unchanged(inputs: Mapping[Path, list[int] | None]) -> None:
    """Raise a DataError if a file has another stamp than before."""
    for path, stamp in inputs.items():
        # Size and modification time: a network file system may give the same file another inode.
        if (stamp or [])[::2] != (_stamp(path) or [])[::2]:
            raise DataError(
                f"{path}: was changed or removed while the run read it; start the command again to use the new file"
            )


def _stamp(path: Path) -> list[int] | None:
    """Return the stamp of a file; None if it does not exist.

    Raises:
        DataError: it is not a regular file: a pipe would be waited for, a folder cannot be read.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # such as a loop of links
        raise DataError(f"{path}: {error_reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file")
    return stamp_of(status)


def cached_columns(name: Path, inputs: Sequence[Path], build: Callable[[], Columns]) -> Columns:
    """Return the cached columns of input files, or those that `build` computes, which are then cached.

    The cache file is beside the dataset, or in ~/.cache/facetrain if that folder is read-only; if neither can be
    written, the columns are in memory. If an input changes while `build` reads it, the file is stale from the start.
    Of several processes of a machine, one builds and the others wait for it.

    Args:
        name: path of the cache file.
        inputs: files that the columns are computed from.
        build: computes the columns.

    Raises:
        DataError: an input is not a regular file; and what `build` raises.
    """
    stamps = {path: _stamp(path) for path in inputs}
    # A digest: a page of JSON has no room for the stamps of a thousand files. With the names: columns number the files
    # in their order, and a symbolic link that is renamed keeps the stamp of its file.
    named = [[path.name, stamp] for path, stamp in stamps.items()]
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
    columns = _find(name, digest)
    if columns is None:
        with _built_once(name):
            # Another process may have built them meanwhile.
            columns = _find(name, digest) or _keep(name, digest, build())
    return replace(columns, inputs=stamps)


def _find(name: Path, stamp: str) -> Columns | None:
    """Return the cached columns; None if there is no sound file of this stamp."""
    for path in _cache_paths(name):
        # Of any type: whatever is wrong with a cache file, the columns are computed again.
        with contextlib.suppress(Exception):
            return _open(path, stamp)
    return None


def _keep(name: Path, stamp: str, columns: Columns) -> Columns:
    """Write columns to a cache file, and return them mapped from it; as they are if none can be written."""
    layout, position = [], _HEADER_BYTES
    for column, array in columns.arrays.items():
        layout.append([column, array.dtype.str, len(array), position])
        position += array.nbytes + -array.nbytes % _ALIGNMENT
    header = {"version": _VERSION, "stamp": stamp, "columns": layout}
    for path in _cache_paths(name):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, header, columns.arrays)
            return _mapped(SharedFile(os.open(path, os.O_RDONLY)), path)
    return columns


@contextlib.contextmanager
def _built_once(name: Path) -> Iterator[None]:
    """Let one process of this machine at a time build a cache file: that of 100 million images takes 2.3 GB.

    Where no lock can be had, as without a folder that can be written to, each process builds it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = path_in_cache_folder(name).with_suffix(".lock")
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock))
        yield


def _cache_paths(name: Path) -> Iterator[Path]:
    yield name
    yield path_in_cache_folder(name)


def path_in_cache_folder(name: Path) -> Path:
    """Return the path in the user's cache folder for a cache file; `name` itself if the user has no home folder."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(name))).hexdigest()[:24]
    with contextlib.suppress(FileNotFoundError):
        return user_cache_folder() / f"{digest}{name.suffix}"
    return name


def _write(path: Path, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    crc = 0
    with replacing(path) as scratch, scratch.open("wb") as file:
        file.seek(_HEADER_BYTES)
        for array in arrays.values():
            padding = np.zeros(-array.nbytes % _ALIGNMENT, dtype=np.uint8)
            for part in (array.view(np.uint8), padding):
                crc = zlib.crc32(part.data, crc)
                file.write(part.data)
        file.seek(0)  # the header last, because it has the checksum of the arrays
        file.write(json.dumps(header | {"crc": crc}).encode().ljust(_HEADER_BYTES))


def _open(path: Path, stamp: str) -> Columns:
    """Map a cache file after a check that it is one of this stamp and sound.

    Raises:
        ValueError: it is of another version, of other inputs, or damaged.
    """
    with open(path, "rb", opener=open_regular) as file:
        header = parse_json(file.read(_HEADER_BYTES).decode())
        if header["version"] != _VERSION or header["stamp"] != stamp:
            raise ValueError("a cache file of another version, or of other inputs")
        crc = 0
        while chunk := file.read(_CHUNK_BYTES):  # mapped pages would count as memory of this process
            crc = zlib.crc32(chunk, crc)
        if crc != header["crc"]:
            raise ValueError("a damaged cache file")
        return _mapped(SharedFile(os.dup(file.fileno())), path)


def _mapped(file: SharedFile, path: Path) -> Columns:
    """Map an open cache file.

    Raises:
        ValueError: it is damaged.
    """
    header = parse_json(os.pread(file.descriptor, _HEADER_BYTES, 0).decode())
    data = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ)
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, length, position in header["columns"]:
        if np.dtype(dtype).kind not in "biuf" or not 0 <= length <= len(data):
            raise ValueError("a column of something else than numbers, or longer than the file")
        # Not np.memmap: indexing takes ten times as long. An empty array cannot be mapped.
        arrays[name] = np.frombuffer(data, dtype, length, position) if length else np.empty(0, dtype=dtype)
    return Columns(arrays, path, file)
