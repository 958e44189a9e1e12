"""manifest.json: the table of contents of a checkpoint, and everything in it that is not a tensor.

    {
     "format": 1,
     "sha256": "…",          checksum of the fields below, as compact JSON with sorted keys
     "step": 2000,
     "world_size": 2,        number of ranks that wrote the checkpoint
     "num_classes": 93431,
     "files": [{"name": "rows_00000_of_00002.safetensors", "size": …, "sha256": "…", "start": 0, "stop": 46716}, …],
     "meta": {…},            JSON of the run: its config, its position in the data
     "metrics": {…}          newest verification, "set/metric" -> number
    }

The manifest is written after all other files, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from facetrain.errors import CheckpointError, DamagedCheckpointError
from facetrain.files import error_reason

MANIFEST = "manifest.json"
FORMAT = 1
# A manifest comes from outside: these bounds keep a crafted one from filling the memory.
_MAX_BYTES = 1 << 26
_MAX_NUMBER = 1 << 62
# No separators and no dots in front: a name cannot lead out of the checkpoint's folder.
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_]*\.safetensors")
_TYPES: dict[str, type] = {
    "step": int,
    "world_size": int,
    "num_classes": int,
    "files": list,
    "meta": dict,
    "metrics": dict,
}


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digits."""
    start: int | None = None
    """First class of a row file; None for other files."""
    stop: int | None = None
    """Class after the last one of a row file; None for other files."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint, and everything in it that is not a tensor."""

    step: int
    world_size: int
    num_classes: int
    files: tuple[FileEntry, ...]
    meta: dict[str, Any]
    metrics: dict[str, float]

    def dump(self) -> str:
        """Return the manifest as JSON, with its own checksum."""
        # Encode and decode once: JSON turns tuples into lists, and the checksum must match the decoded form.
        body = json.loads(json.dumps(asdict(self)))
        return json.dumps({"format": FORMAT, "sha256": checksum(body)} | body, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        DamagedCheckpointError: the manifest is missing, damaged, or names files outside its folder.
        CheckpointError: the manifest is of another format version.
    """
    path = folder / MANIFEST
    value = _read_json(path)
    if not isinstance(value, dict) or "format" not in value:
        raise DamagedCheckpointError(f"{path}: not the manifest of a checkpoint")
    if value.pop("format") != FORMAT:
        raise CheckpointError(
            f"{path}: written by another version of facetrain, in a format that this version cannot read; "
            "use that version"
        )
    expected = value.pop("sha256", None)
    if value.keys() != _TYPES.keys() or any(type(value[key]) is not kind for key, kind in _TYPES.items()):
        raise DamagedCheckpointError(f"{path}: not the manifest of a checkpoint: wrong fields")
    if checksum(value) != expected:
        raise DamagedCheckpointError(
            f"{path}: wrong checksum of the manifest itself; the checkpoint is damaged"
        )
    files = tuple(_checked_entry(entry, value["num_classes"], path) for entry in value.pop("files"))
    if len({file.name for file in files}) < len(files):
        raise DamagedCheckpointError(f"{path}: lists a file twice")
    if not all(isinstance(number, int | float) for number in value["metrics"].values()):
        raise DamagedCheckpointError(f"{path}: has metrics that are not numbers")
    return Manifest(files=files, **value)


def checksum(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's fields, without `format` and `sha256`."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_regular_file(path: Path) -> bool:
    """Return whether a path is a regular file and not a link.

    A link could lead out of the checkpoint's folder, and reading a pipe could block forever.
    """
    return path.is_file() and not path.is_symlink()


def _read_json(path: Path) -> Any:
    if not is_regular_file(path):
        state = "not a regular file" if os.path.lexists(path) else "missing"
        raise DamagedCheckpointError(f"{path.parent}: {MANIFEST} is {state}; the checkpoint is damaged")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DamagedCheckpointError(
                f"{path}: {path.stat().st_size:,} bytes, more than the {_MAX_BYTES:,} that a manifest may have"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        # Without the parser's message: it speaks of a file that a person has written.
        raise DamagedCheckpointError(f"{path}: cannot be read as JSON; the checkpoint is damaged") from error


def _checked_entry(value: Any, num_classes: int, path: Path) -> FileEntry:
    try:
        entry = FileEntry(**value)
    except TypeError as error:
        raise DamagedCheckpointError(
            f"{path}: not the manifest of a checkpoint: an entry of `files` has wrong fields"
        ) from error
    if not (isinstance(entry.name, str) and _FILE_NAME.fullmatch(entry.name)):
        raise DamagedCheckpointError(f"{path}: invalid file name {entry.name!r}")
    # Only row files have start and stop; one without the other is invalid.
    start, stop = (0, 0) if entry.start is None and entry.stop is None else (entry.start, entry.stop)
    if not (
        isinstance(entry.sha256, str)
        and all(type(number) is int for number in (entry.size, start, stop))
        and 0 <= entry.size < _MAX_NUMBER
        and 0 <= (start or 0) <= (stop or 0) <= num_classes < _MAX_NUMBER
    ):
        raise DamagedCheckpointError(f"{path}: invalid entry of the file {entry.name}")
    return entry
