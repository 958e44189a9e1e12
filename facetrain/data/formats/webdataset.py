"""WebDataset: tar shards of images.

The identity of `KEY.jpg` is in `KEY.cls` or `KEY.json` in the same shard, or it is the name of the image's folder.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import load_columns, save_columns
from facetrain.data.image_header import IMAGE_SUFFIXES
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError
from facetrain.files import error_reason, parse_json

_LABEL_KEYS = ("label", "identity", "class", "cls")
_MAX_LABEL_FILE_BYTES = 1 << 20
_MAX_OPEN_SHARDS = 256


class TarDataset:
    """Images of a folder of uncompressed .tar shards; their offsets are cached in a catalog in the folder.

    Raises:
        DataError: if a shard is damaged or compressed, or an image has no identity.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards = sorted(folder.glob("*.tar"))
        name = folder / ".shards.catalog"
        columns = load_columns(name, self._shards) or save_columns(
            name, self._shards, _build_catalog(self._shards), {}
        )
        self._shard, self._offset = columns.arrays["shard"], columns.arrays["offset"]
        self._size, self.labels = columns.arrays["size"], columns.arrays["label"]
        self.num_images = len(self.labels)
        if not self.num_images:
            raise DataError(f"{folder}: the {len(self._shards):,} .tar shards contain no images")
        self.num_classes = int(self.labels.max()) + 1
        self._open = lru_cache(maxsize=_MAX_OPEN_SHARDS)(PositionalFile)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the folder."""
        return TarDataset, (self._folder,)

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            DataError: if the shard is truncated.
        """
        size = int(self._size[index])
        data = self._open(self._shards[self._shard[index]]).bytes_at(int(self._offset[index]), size)
        if len(data) < size:
            raise DataError(f"{self.location(index)}: the shard is truncated; download it again")
        return data

    def location(self, index: int) -> str:
        """Return the shard and the byte offset."""
        return f"{self._shards[self._shard[index]]}: image at byte {self._offset[index]:,}"


def _build_catalog(shards: list[Path]) -> dict[str, np.ndarray]:
    """Return shard (int32), offset (int64), size (int64) and label (int32) of every image.

    The labels are the identities if all of them are whole numbers, otherwise their rank in sorted order.
    """
    found = [(shard, *image) for shard, path in enumerate(shards) for image in _images(path)]
    all_numbers = {type(name) for *_, name in found} == {int}
    names = sorted({name for *_, name in found}, key=str)
    label_of = {name: name if all_numbers else label for label, name in enumerate(names)}
    table = np.array([(*place, label_of[name]) for *place, name in found], dtype=np.int64).reshape(-1, 4)
    shard, offset, size, label = (np.ascontiguousarray(column) for column in table.T)
    return {"shard": shard.astype(np.int32), "offset": offset, "size": size, "label": label.astype(np.int32)}


def _images(path: Path) -> Iterator[tuple[int, int, int | str]]:
    """Yield (offset, size, identity) of every image; the identity is a number if .cls or .json has one, else a name."""
    images: dict[str, tuple[int, int]] = {}
    identities: dict[str, int | str] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                stem, _, kind = file.partition(".")
                key, suffix = f"{folder}/{stem}", "." + kind.lower()
                if not member.isfile():
                    continue
                if suffix in IMAGE_SUFFIXES:
                    images[key] = member.offset_data, member.size
                elif suffix in (".cls", ".json") and member.size <= _MAX_LABEL_FILE_BYTES:
                    content = archive.extractfile(member)
                    identities[key] = _identity(
                        content.read() if content else b"", suffix, f"{path}: {member.name}"
                    )
    except (tarfile.TarError, OSError, MemoryError) as error:  # MemoryError: a header claims gigabytes
        raise DataError(
            f"{path}: not an uncompressed tar archive ({error_reason(error)}); unpack it if it is compressed"
        ) from error
    for key, (offset, size) in images.items():
        folder = key.rpartition("/")[0].rpartition("/")[2]
        if key not in identities and not folder:
            raise DataError(
                f"{path}: image {key[1:]} has neither a .cls or .json file nor a folder that names its "
                "identity"
            )
        yield offset, size, identities.get(key, folder)


def _identity(content: bytes, suffix: str, location: str) -> int | str:
    try:
        value = content.decode("utf-8").strip()
        if suffix == ".json":
            fields = parse_json(value)
            value = next(str(fields[name]) for name in _LABEL_KEYS if name in fields)
    except (ValueError, StopIteration, TypeError) as error:
        raise DataError(f"{location}: contains no identity (keys: {', '.join(_LABEL_KEYS)})") from error
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else value
