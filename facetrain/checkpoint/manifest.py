"""manifest.json: the table of contents of a checkpoint, and everything in it that is not a tensor.

    {
     "format": 1,
     "sha256": "…",          checksum of the fields below, as compact JSON with sorted keys
     "step": 2000,
     "world_size": 2,        number of ranks that wrote the checkpoint
     "num_classes": 93431,
     "files": [{"name": "rows_00000_of_00002.safetensors", "size": …, "sha256": "…", "start": 0, "stop": 46716}, …],
     "meta": {…},            JSON of the run: its id, its config, its network, digests of its data, …
     "metrics": {…}          newest verification, "set/metric" -> number
    }

The manifest is written after all other files, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from facetrain.errors import CheckpointError, DamagedCheckpointError
from facetrain.files import error_reason, parse_json
from facetrain.text import printable

MANIFEST = "manifest.json"
FORMAT = 1
# A manifest comes from outside: this bound keeps a crafted one from filling the memory.
MAX_BYTES = 1 << 26
# No separators and no dots in front: a name cannot lead out of the checkpoint's folder.
_FileName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*\.safetensors$")]
_Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]
_FIELDS = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_FIELDS)
class FileEntry:
    """A file of a checkpoint."""

    name: _FileName
    size: _Count
    """Bytes."""
    sha256: str
    """Hexadecimal digits."""
    start: _Count | None = None
    """First class of a row file; None for other files."""
    stop: _Count | None = None
    """Class after the last one of a row file; None for other files."""

    def __post_init__(self) -> None:
        if (self.start is None) != (self.stop is None) or (self.start or 0) > (self.stop or 0):
            raise ValueError(f"{self.name} has invalid rows")


@dataclass(frozen=True, config=_FIELDS)
class Manifest:
    """The table of contents of a checkpoint, and everything in it that is not a tensor."""

    step: _Count
    world_size: _Count
    num_classes: _Count
    files: tuple[FileEntry, ...]
    meta: dict[str, Any]
    metrics: dict[str, float]

    def __post_init__(self) -> None:
        if any((file.stop or 0) > self.num_classes for file in self.files):
            raise ValueError("a file has rows past the last class")
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("a file is listed twice")

    def dump(self) -> str:
        """Return the manifest as JSON, with its own checksum."""
        # Encode and decode once: JSON turns tuples into lists, and the checksum must match the decoded form.
        body = json.loads(json.dumps(asdict(self)))
        return json.dumps({"format": FORMAT, "sha256": checksum(body)} | body, indent=1)

    @property
    def digest(self) -> str:
        """SHA-256 of the file, as `dump` writes it."""
        return hashlib.sha256(self.dump().encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        DamagedCheckpointError: the manifest is missing, damaged, or names files outside its folder.
        CheckpointError: the manifest is of another format version.
    """
    path = folder / MANIFEST
    if not is_regular_file(path):
        state = "not a regular file" if os.path.lexists(path) else "missing"
        raise DamagedCheckpointError(f"{folder}: {MANIFEST} is {state}; the checkpoint is damaged")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DamagedCheckpointError(
                f"{path}: {path.stat().st_size:,} bytes, more than the {MAX_BYTES:,} that a manifest may have"
            )
        return parse_manifest(path.read_text(encoding="utf-8", errors="replace"), path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error_reason(error)}") from error


def parse_manifest(text: str, path: Path | str) -> Manifest:
    """Check the text of a manifest; errors, as of `read_manifest`, name the path."""
    try:
        value = parse_json(text)
    except ValueError as error:
        # Without the parser's message: it speaks of a file that a person has written.
        raise DamagedCheckpointError(f"{path}: cannot be read as JSON; the checkpoint is damaged") from error
    if not isinstance(value, dict) or "format" not in value:
        raise DamagedCheckpointError(f"{path}: not the manifest of a checkpoint")
    # Before the checksum, which another version may compute differently.
    if value.pop("format") != FORMAT:
        raise CheckpointError(
            f"{path}: written by another version of facetrain, in a format that this version cannot read; "
            "use that version"
        )
    expected = value.pop("sha256", None)
    if checksum(value) != expected:
        raise DamagedCheckpointError(
            f"{path}: wrong checksum of the manifest itself; the checkpoint is damaged"
        )
    try:
        # Not Manifest(**value): a crafted key could be the name of an argument of pydantic's constructor.
        return TypeAdapter(Manifest).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        place = printable(".".join(map(str, fault["loc"])))  # a key may have line breaks
        raise DamagedCheckpointError(
            f"{path}: not the manifest of a checkpoint: {place}: {fault['msg']}"
        ) from error


def checksum(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's fields, without `format` and `sha256`."""
    # Sorted and without spaces: the same fields have the same checksum, however the file is laid out.
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_regular_file(path: Path) -> bool:
    """Return whether a path is a regular file and not a link.

    A link could lead out of the checkpoint's folder, and reading a pipe could block forever.
    """
    return path.is_file() and not path.is_symlink()
