"""Objects of a store, read by ranges through a bounded folder of blocks that all processes of a host share.

    CACHE/blocks/OBJECT/NUMBER    one block; OBJECT is a digest of an address and its version. The CRC-32 of each 4 KiB
                                  follow the bytes of the object.
    CACHE/locks/NUMBER            held while a part of an object is fetched
    CACHE/used, CACHE/limit       bytes of all blocks, and the most that there may be

A block never changes. One that is removed while a process reads it stays readable to this process. One that the disk
has damaged is fetched again.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, cast

from facetrain.errors import DataError, FacetrainError
from facetrain.files import locked, os_errors_as, parse_json, replacing
from facetrain.remote.address import public
from facetrain.remote.filesystem import open_filesystem, with_retries
from facetrain.remote.listing import version_token

BLOCK_BYTES = 1 << 18
"""About what `shuffle: blocks` reads at one place: larger blocks would be read in vain, smaller ones are more files."""
_CHECKED_BYTES = 1 << 12
"""Bytes of a block with one checksum: the reading of an image does not read a whole block to check it."""
_REGION_BLOCKS = 16
"""Blocks that one request may fetch, and that one process fetches at a time."""
_THREADS = 8
_LOCKS = 1024
READ_BY_RANGES = (".rec", ".tar", ".tar.gz", ".tgz", ".parquet")
"""Ends of the names of objects that are read by ranges; other files of a remote dataset are copied."""


class ObjectPath(PosixPath):
    """Path in a folder that describes a remote dataset; paths that are made from it are of this type as well.

    Only facetrain makes such paths. A text in a dataset of other people cannot lead to a store.
    """


class StoredObject:
    """One version of an object, read at any offset by any number of threads and processes.

    Args:
        url: address of the object.
        version: its ETag or generation, or what else distinguishes versions in the store.
        size: its bytes.
        cache: folder of the blocks.
    """

    def __init__(self, url: str, version: str, size: int, cache: str) -> None:
        self.url, self.version, self.size, self._cache = url, version, size, Path(cache)
        digest = hashlib.sha256(f"{url}\n{version}\n{size}".encode()).hexdigest()[:24]
        self._folder = f"{cache}/blocks/{digest}"
        self._thread = threading.local()

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from an offset on; fewer at the end of the object.

        Raises:
            DataError: the object was changed or removed, or the store does not answer.
        """
        parts, end = [], min(offset + count, self.size)
        while 0 <= offset < end:
            number, low = divmod(offset, BLOCK_BYTES)
            high = min(end - offset + low, BLOCK_BYTES)
            part = self._cached(number, low, high)
            if part is None:
                part = self._fetched(number, -(-end // BLOCK_BYTES))[low : end - offset + low]
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def prefetch(self, offset: int, count: int) -> None:
        """Have threads of this process fetch a range. A region that another process fetches is left to that process."""
        stop = -(-min(offset + count, self.size) // BLOCK_BYTES)
        first = offset // BLOCK_BYTES
        while first < stop:
            region_end = _end_of_region(first)
            _fetch_threads().put((self, first, min(stop, region_end)))
            first = region_end

    def fetch_blocks(self, first: int, stop: int) -> None:
        """Fetch the missing blocks from `first` to `stop` - 1 of one region, if no other thread or process does."""
        with self._region_lock(first, wait=False) as is_held:
            while is_held and first < stop:
                if self._is_cached(first):
                    with suppress(FileNotFoundError):
                        os.utime(self._path(first))  # needed soon: it is not the oldest any more
                    first += 1
                else:
                    first += -(-len(self._get_missing(first, stop)) // BLOCK_BYTES)

    def forget(self, offset: int, count: int) -> None:
        """Remove the blocks of a range from the cache: what they hold makes no sense, and is to be fetched again."""
        for number in range(offset // BLOCK_BYTES, -(-min(offset + count, self.size) // BLOCK_BYTES)):
            with suppress(OSError):
                os.unlink(self._path(number))

    def _fetched(self, first: int, stop: int) -> bytes:
        """Return the block `first`, and the blocks after it that are missing up to the end of its region."""
        with self._region_lock(first):
            # Another process may have fetched it while this one waited for the lock.
            block = self._cached(first, 0, self._block_size(first))
            return block or self._get_missing(first, min(stop, _end_of_region(first)))

    def _get_missing(self, first: int, stop: int) -> bytes:
        """Fetch the block `first` and those after it that are missing, by one request; store and return them."""
        end = first + 1
        while end < stop and not self._is_cached(end):
            end += 1
        data = self._get(first * BLOCK_BYTES, min(end * BLOCK_BYTES, self.size))
        for number in range(first, end):
            start = (number - first) * BLOCK_BYTES
            # On a full disk, or with a damaged limit, the run goes on: the block is fetched again when it is needed.
            with suppress(OSError, ValueError):
                self._store(number, data[start : start + BLOCK_BYTES])
        return data

    def _get(self, start: int, end: int) -> bytes:
        filesystem, path = open_filesystem(self.url)
        opened: list[Any] = [getattr(self._thread, "file", None)]

        def read() -> tuple[str, bytes]:
            file = opened.pop() if opened else None  # after an error, the next attempt opens the object again
            file = file or filesystem.open(path, "rb", cache_type="none")
            version, data = version_token(file.details), b""
            if version == self.version:
                # Never a part of another version: s3fs reads with If-Match, and gcsfs the generation in a path. It
                # ignores the argument `generation` in zonal buckets.
                if generation := file.details.get("generation"):
                    try:
                        data = filesystem.cat_file(f"{path}#{generation}", start=start, end=end)
                    except FileNotFoundError:  # replaced
                        return "", b""
                else:
                    file.seek(start)
                    data = file.read(end - start)
                if len(data) != end - start:
                    raise OSError("the answer has another length than the range")
                opened.append(file)
            return version, data

        self._thread.file = None
        version, data = with_retries(self.url, read, most_bytes=end - start)
        if version != self.version:
            raise DataError(
                f"{public(self.url)}: the object was changed while the run read it; restore it, or start the command "
                "again to use the new one"
            )
        self._thread.file = opened.pop()
        return data

    def _cached(self, number: int, low: int, high: int) -> bytes | None:
        """Return the bytes from `low` to `high` of a block; None if it is not in the cache, or damaged there."""
        first, size = low // _CHECKED_BYTES, self._block_size(number)
        last = -(-high // _CHECKED_BYTES)
        try:
            with open(self._path(number), "rb", buffering=0) as file:
                file.seek(first * _CHECKED_BYTES)
                data = file.read(min(last * _CHECKED_BYTES, size) - first * _CHECKED_BYTES)
                file.seek(size + 4 * first)
                stored = file.read(4 * (last - first))
        except OSError:  # not there, or the disk cannot read it
            return None
        part = data[low - first * _CHECKED_BYTES :][: high - low]
        return part if len(part) == high - low and stored == _checksums(data) else None

    def _is_cached(self, number: int) -> bool:
        with suppress(FileNotFoundError):
            size = self._block_size(number)
            return os.stat(self._path(number)).st_size == size + 4 * -(-size // _CHECKED_BYTES)
        return False

    def _block_size(self, number: int) -> int:
        return min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number}"

    def _store(self, number: int, data: bytes) -> None:
        block = data + _checksums(data)
        os.makedirs(self._folder, exist_ok=True)
        with locked(self._cache / "used") as file:
            assert file is not None, "waits for the lock"
            text = file.read()
            used = int(text) + len(block) if text.isdigit() else self._limit + 1
            if used > self._limit:
                # An eighth at once: the search for the oldest blocks goes through all of them.
                used = _remove_oldest(self._cache / "blocks", self._limit * 7 // 8 - len(block)) + len(block)
            file.seek(0)
            file.truncate()
            file.write(str(used))
        if used <= self._limit:
            with replacing(Path(self._path(number))) as scratch:
                scratch.write_bytes(block)

    @cached_property
    def _limit(self) -> int:
        return int((self._cache / "limit").read_text())

    @contextmanager
    def _region_lock(self, block: int, *, wait: bool = True) -> Iterator[bool]:
        region = f"{self._folder}:{block // _REGION_BLOCKS}"
        with (
            os_errors_as(DataError, self._cache),
            locked(self._cache / "locks" / str(zlib.crc32(region.encode()) % _LOCKS), wait=wait) as file,
        ):
            yield file is not None


def _checksums(data: bytes) -> bytes:
    """Return the CRC-32 of every `_CHECKED_BYTES`, 4 bytes each."""
    parts = (data[start : start + _CHECKED_BYTES] for start in range(0, len(data), _CHECKED_BYTES))
    return b"".join(zlib.crc32(part).to_bytes(4, "little") for part in parts)


def open_object(stored: StoredObject) -> BinaryIO:
    """Return an object as a file for the libraries that read archives and tables."""
    from fsspec.spec import AbstractBufferedFile

    class Stream(AbstractBufferedFile):  # type: ignore[misc]
        read_end = 0

        def _fetch_range(self, start: int, end: int) -> bytes:
            region = _REGION_BLOCKS * BLOCK_BYTES
            if 0 <= start - self.read_end < region and end // region != self.read_end // region:
                stored.prefetch(end, _THREADS // 2 * region)  # it is read from the beginning to the end
            self.read_end = end
            return stored.bytes_at(start, end - start)

    return cast(BinaryIO, Stream(None, stored.url, size=stored.size, block_size=BLOCK_BYTES))


def stored_object(path: Path) -> StoredObject | None:
    """Return the object that a path describes; None for a file of this machine.

    Raises:
        DataError: the description was damaged or removed.
    """
    if not isinstance(path, ObjectPath) or not path.name.lower().endswith(READ_BY_RANGES):
        return None
    try:
        return StoredObject(**parse_json(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path}: not the description of an object; remove the folder, and start again"
        ) from error


def _end_of_region(block: int) -> int:
    return (block // _REGION_BLOCKS + 1) * _REGION_BLOCKS


def _remove_oldest(folder: Path, most_bytes: int) -> int:
    """Remove the blocks that were fetched or announced first until `most_bytes` are left; return what is left."""
    blocks = []
    for entry in (entry for each in os.scandir(folder) for entry in os.scandir(each)):
        with suppress(FileNotFoundError):
            status = entry.stat()
            blocks.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(size for _, size, _ in blocks)
    for _, size, path in sorted(blocks):
        if total <= most_bytes:
            break
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
    return total


@cache
def _fetch_threads() -> queue.SimpleQueue[tuple[StoredObject, int, int]]:
    """Return the queue of (object, first block, block after the last one) of threads that fetch."""
    tasks: queue.SimpleQueue[tuple[StoredObject, int, int]] = queue.SimpleQueue()
    for _ in range(_THREADS):
        # Daemons: the end of the process does not wait for a store, and a killed request leaves no half block.
        threading.Thread(target=_fetch, args=(tasks,), daemon=True).start()
    return tasks


def _fetch(tasks: queue.SimpleQueue[tuple[StoredObject, int, int]]) -> None:
    while True:
        stored, first, stop = tasks.get()
        # Whoever needs the blocks tries again, and reports what is wrong.
        with suppress(FacetrainError, OSError):
            stored.fetch_blocks(first, stop)
