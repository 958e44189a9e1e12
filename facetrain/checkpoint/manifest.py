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
_MAX_NUMBER = 1 << 62
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
        """Return it as JSON, with a checksum of itself."""
        # Through JSON once: it turns tuples into lists, and what is summed must be what will be read.
        body = json.loads(json.dumps(asdict(self)))
        return json.dumps({"format": FORMAT, "sha256": _sum_of(body)} | body, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, it is damaged, of another format, or names files outside its folder.
    """
    path = folder / NAME
    value = _read_json(path)
    if not isinstance(value, dict) or "format" not in value:
        raise CheckpointError(f"{path}: is no manifest of a checkpoint")
    if value.pop("format") != FORMAT:
        raise CheckpointError(
            f"{path}: written by another version of facetrain, in a format that this one cannot read"
        )
    expected = value.pop("sha256", None)
    if value.keys() != _TYPES.keys() or any(type(value[key]) is not kind for key, kind in _TYPES.items()):
        raise CheckpointError(f"{path}: is no manifest of a checkpoint; it has other fields")
    if _sum_of(value) != expected:
        raise CheckpointError(f"{path}: its own checksum is wrong; the checkpoint is damaged")
    files = tuple(_entry(entry, value["num_classes"], path) for entry in value.pop("files"))
    if len({file.name for file in files}) < len(files):
        raise CheckpointError(f"{path}: names a file twice")
    if not all(isinstance(number, int | float) for number in value["metrics"].values()):
        raise CheckpointError(f"{path}: has metrics that are no numbers")
    return Manifest(files=files, **value)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_plain_file(path: Path) -> bool:
    """Whether it is a file itself: a link could lead out of its folder, a pipe would never end."""
    return path.is_file() and not path.is_symlink()


def _read_json(path: Path) -> Any:
    if not is_plain_file(path):
        raise CheckpointError(f"{path.parent}: no checkpoint ({NAME} is missing, or no plain file)")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes are too many for a manifest")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _sum_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _entry(value: Any, num_classes: int, path: Path) -> FileEntry:
    try:
        entry = FileEntry(**value)
    except TypeError as error:
        raise CheckpointError(f"{path}: is no manifest of a checkpoint ({error})") from error
    if not (isinstance(entry.name, str) and _FILE_NAME.fullmatch(entry.name)):
        raise CheckpointError(f"{path}: names the file {entry.name!r}, which no checkpoint has")
    # A file without rows has neither start nor stop.
    start, stop = (0, 0) if entry.start is None and entry.stop is None else (entry.start, entry.stop)
    if not (
        isinstance(entry.sha256, str)
        and all(type(number) is int for number in (entry.size, start, stop))
        and 0 <= entry.size < _MAX_NUMBER
        and 0 <= (start or 0) <= (stop or 0) <= num_classes < _MAX_NUMBER
    ):
        raise CheckpointError(f"{path}: the entry of {entry.name} makes no sense")
    return entry
