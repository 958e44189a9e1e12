"""Downloads of single files in parts, which continue what an earlier try has left."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facetrain.errors import DataError, FacetrainError
from facetrain.files import sync_file
from facetrain.remote.address import scheme
from facetrain.remote.filesystem import open_filesystem, with_retries

_FIRST_PART, _LARGEST_PART = 1 << 20, 1 << 24
"""Bytes of a request. The first ones are small, so that a slow server is noticed early."""


def download_ranges(
    url: str,
    path: str,
    size: int,
    target: Path,
    *,
    kind: type[FacetrainError] = DataError,
    report: Callable[[int], None] = lambda count: None,
) -> str:
    """Append to what a local file already has of a remote one, until it is complete; return its SHA-256.

    A local file that is longer than the remote one is no part of it, and is downloaded anew.

    Args:
        url: address for messages, in whose file system the file is.
        path: path in the file system.
        size: bytes of the file.
        target: the local file.
        kind: type of the errors.
        report: called with the number of bytes that were there, and of each part that arrives.

    Raises:
        FacetrainError: of type `kind`; the local file then has what has arrived.
    """
    with target.open("ab+") as output:
        if output.tell() > size:
            output.truncate(0)
        output.seek(0)
        digest, done = hashlib.file_digest(output, "sha256"), output.tell()
        report(done)
        part = _FIRST_PART
        while done < size:
            data = _read_part(url, path, done, min(done + part, size), size, kind)
            output.write(data)
            digest.update(data)
            done += len(data)
            part = min(2 * part, _LARGEST_PART)
            report(len(data))
        output.flush()
        sync_file(output.fileno(), target)
    return digest.hexdigest()


def _read_part(url: str, path: str, start: int, end: int, size: int, kind: type[FacetrainError]) -> bytes:
    """Return the bytes of a file from `start` to `end`, or to the end of the file from a server without ranges."""
    filesystem, _ = open_filesystem(url)
    web = scheme(url) in ("http", "https")
    options: dict[str, Any] = {"size": size} if web else {}
    if scheme(url) == "hf":
        options = {"cache_type": "none"}

    def read() -> bytes:
        data: bytes = filesystem.cat_file(path, start=start, end=end, **options)
        if len(data) not in ((end - start, size - start) if web else (end - start,)):
            raise OSError("the answer has another length than the range")
        return data

    # A server without ranges sends the whole file.
    return with_retries(url, read, kind, most_bytes=size if web else end - start)
