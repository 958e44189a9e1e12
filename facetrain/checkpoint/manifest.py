"""manifest.json: what a checkpoint consists of. It is written last, so a folder that has one is whole."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from facetrain.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1
_MAX_BYTES = 1 << 26
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_]*\.safetensors")


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint; row files also say which classes they hold."""

    name: str
    size: int
    sha256: str
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents, and everything about the run that is not a tensor."""

    step: int
    world_size: int
    num_classes: int
    files: tuple[FileEntry, ...]
    meta: dict[str, Any]
    metrics: dict[str, float]

    def dump(self) -> str:
        """Return it as JSON."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, it is of another format, or it names files outside its folder.
    """
    path = folder / NAME
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes are too many for a manifest")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: no checkpoint ({NAME} is missing)") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    try:
        if value.pop("format") != FORMAT:
            raise CheckpointError(
                f"{path}: written by another version of facetrain, in a format that this one cannot read"
            )
        files = tuple(_checked(FileEntry(**entry), path) for entry in value.pop("files"))
        return Manifest(files=files, **value)
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no manifest ({error})") from error


def _checked(entry: FileEntry, path: Path) -> FileEntry:
    numbers = [entry.size, *(n for n in (entry.start, entry.stop) if n is not None)]
    if not (isinstance(entry.name, str) and _FILE_NAME.fullmatch(entry.name)):
        raise CheckpointError(f"{path}: names the file {entry.name!r}, which no checkpoint has")
    if not all(isinstance(n, int) and 0 <= n < 2**62 for n in numbers) or not isinstance(entry.sha256, str):
        raise CheckpointError(f"{path}: the entry of {entry.name} makes no sense")
    return entry


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
