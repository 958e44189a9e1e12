"""Decompressed copies of .tar.gz shards: gzip has no random access, so each shard is decompressed once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as, replacing, user_cache_folder

GZIP_SUFFIXES = (".tar.gz", ".tgz")
_CHUNK_BYTES = 1 << 20
_MAX_RATIO, _SPARE_BYTES = 20, 64 << 20
"""Bytes per compressed byte, and some more: images are compressed already, headers and labels are not."""


def decompressed(path: Path) -> Path:
    """Return the .tar file that a .tar.gz contains: a copy beside it, or in ~/.cache/facetrain.

    A copy that is as old as the compressed file is used again.

    Raises:
        DataError: the file is damaged, or decompresses to far more than images would need.
    """
    digest = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:24]
    places = [path.with_name(f".{path.name}.tar")]
    with contextlib.suppress(FileNotFoundError):
        places.append(user_cache_folder() / f"{digest}.tar")
    with os_errors_as(DataError, path):
        stamp = path.stat().st_mtime_ns
    for place in places:
        with contextlib.suppress(OSError):
            if place.stat().st_mtime_ns == stamp:
                return place
    reason = ""
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(path, place, stamp)
        except OSError as error:
            reason = error_reason(error)
        else:
            return place
    folders = " or ".join(str(place.parent) for place in places)
    raise DataError(f"{path}: cannot be decompressed into {folders}: {reason}")


def _write(path: Path, place: Path, stamp: int) -> None:
    with replacing(place) as temporary:
        with temporary.open("wb") as file:
            for chunk in _chunks(path):
                file.write(chunk)
        # The copy is complete only with the time of its source.
        os.utime(temporary, ns=(stamp, stamp))


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a gzip file of one or more members."""
    limit = path.stat().st_size * _MAX_RATIO + _SPARE_BYTES
    total, stream = 0, zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        with path.open("rb") as file:
            data = file.read(_CHUNK_BYTES)
            while data:
                if stream.eof:
                    stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
                chunk = stream.decompress(data, _CHUNK_BYTES)
                total += len(chunk)
                if total > limit:
                    raise DataError(
                        f"{path}: decompresses to more than {limit:,} bytes, {_MAX_RATIO} times its size; it is not an "
                        "archive of images"
                    )
                yield chunk
                data = (stream.unused_data if stream.eof else stream.unconsumed_tail) or file.read(
                    _CHUNK_BYTES
                )
    except zlib.error as error:
        raise DataError(f"{path}: not a gzip file, or damaged ({error}); download it again") from None
    if not stream.eof:
        raise DataError(f"{path}: the gzip file is truncated; download it again")
