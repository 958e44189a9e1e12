"""Columns of numbers kept in a file and mapped into memory, so that a large dataset opens at once.

A file is one page of JSON and the columns behind it, each at a multiple of 64 bytes. It belongs to
the sizes and times of the files that it was made from, and it is checked whole before it is used:
a stale or damaged one is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_VERSION = 1
_PAGE = 4096
_ALIGN = 64
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Columns:
    """Arrays by name, and a few facts about them that fit into JSON.

    Mapped columns travel to another process as the path of their file, not as copies.
    """

    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]
    path: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the path where there is one: every process maps the same file."""
        if self.path is not None:
            return _map, (self.path,)
        return Columns, (dict(self.arrays), dict(self.facts))


def stamp_of(paths: Sequence[Path]) -> list[list[int] | None]:
    """Describe files as they are now: size and time of the last change, None where there is no file."""
    return [[p.stat().st_size, p.stat().st_mtime_ns] if p.exists() else None for p in paths]


def load_columns(name: Path, sources: Sequence[Path]) -> Columns | None:
    """Return what was kept for these files in their present state, or None."""
    for path in _places(name):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if _head(path)["stamp"] == stamp_of(sources) and _is_whole(path):
                return _map(path)
    return None


def save_columns(
    name: Path, sources: Sequence[Path], arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> Columns:
    """Keep columns beside the dataset, or in the user's cache folder where the dataset's cannot be written.

    Where neither can, the columns come back as they are, in memory.
    """
    layout, position = [], _PAGE
    for column, array in arrays.items():
        layout.append([column, array.dtype.str, len(array), position])
        position += array.nbytes + -array.nbytes % _ALIGN
    head = {
        "version": _VERSION, "stamp": stamp_of(sources), "facts": dict(facts), "crc": 0, "columns": layout
    }  # fmt: skip
    for path in _places(name):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, head, arrays)
            return _map(path)
    return Columns(dict(arrays), dict(facts))


def _places(name: Path) -> list[Path]:
    mark = hashlib.sha256(str(name.resolve()).encode()).hexdigest()[:24]
    return [name, Path.home() / ".cache" / "facetrain" / f"{mark}{name.suffix}"]


def _write(path: Path, head: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.seek(_PAGE)
            for array in arrays.values():
                padding = np.zeros(-array.nbytes % _ALIGN, dtype=np.uint8)
                for part in (array.view(np.uint8), padding):
                    for start in range(0, len(part), _CHUNK):
                        data = part[start : start + _CHUNK].tobytes()
                        head["crc"] = zlib.crc32(data, head["crc"])
                        file.write(data)
            file.seek(0)
            file.write(json.dumps(head).encode().ljust(_PAGE))
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _head(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head = json.loads(file.read(_PAGE))
    if not isinstance(head, dict) or head["version"] != _VERSION:
        raise ValueError("another version")
    return head


def _is_whole(path: Path) -> bool:
    # Read, not mapped: the pages stay the system's and do not count as this process's memory.
    crc = 0
    with path.open("rb") as file:
        file.seek(_PAGE)
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return bool(crc == _head(path)["crc"])


def _map(path: Path) -> Columns:
    head = _head(path)
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, length, position in head["columns"]:
        empty = np.empty(0, dtype=dtype)
        # As a plain array: taking one number out of a memmap costs ten times as much.
        arrays[name] = np.asarray(np.memmap(path, dtype, "r", position, (length,))) if length else empty
    return Columns(arrays, head["facts"], path)
