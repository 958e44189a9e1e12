"""File that holds the rows of a head whose centers are placed on disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NoReturn

import torch
from torch import Tensor

from facetrain.errors import RunError, UsageError
from facetrain.files import os_errors_as

Layout = dict[str, tuple[int, torch.dtype]]
"""Name of a table -> columns, and dtype in storage."""

_CACHE_LINE, _SECTOR, _PAGE = 64, 512, 4096
"""Alignment in bytes of rows, of transfers with O_DIRECT, and of the memory of such transfers."""
_IN_FLIGHT = 16
"""Transfers at the same time: a disk answers many in the time of one."""
_LONGEST_RUN = 4096
"""Rows per transfer. One call moves at most 2 GiB, and long runs are divided among the threads."""


class DiskRows:
    """File of rows; a row holds its numbers of all tables side by side.

    A class's center and momentum then take one read of the disk. The file is working storage and not a checkpoint. It
    is removed from its folder as soon as it is open, so its space is free when the process ends, also if it is killed.

    Rows are accessed in two ways. `tables` maps the whole file into memory, for passes over all rows. `read_rows`
    and `write_rows` move the rows of a step by system calls. If a row fills whole sectors, the calls bypass the
    kernel's page cache (O_DIRECT): a sample rarely finds its rows in the cache, and making space in the cache costs
    several times as much processor time as the disk takes.

    The mapping must not be used while rows are moved by calls: it could keep an older copy of a page.
    """

    def __init__(self, path: Path, num_rows: int, layout: Layout) -> None:
        self._path, self._layout = path, layout
        self._offsets, end = {}, 0
        # Widest dtypes first, so that every table is aligned to its own width.
        for name, (columns, dtype) in sorted(layout.items(), key=lambda item: -item[1][1].itemsize):
            self._offsets[name], end = end, end + columns * dtype.itemsize
        self._row_bytes = -(-end // _CACHE_LINE) * _CACHE_LINE
        # An empty file cannot be mapped.
        size = max(num_rows, 1) * self._row_bytes
        self._descriptor = _reserve(path, size)
        # Two rows at least: the probe reads the second, whose offset shows what alignment the disk wants.
        self._direct = _open_direct(path, self._row_bytes) if num_rows > 1 else None
        path.unlink()
        # Threads, because preadv and pwritev wait for the disk without Python's lock.
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="disk")
        self._buffer, self._buffer_lock = _aligned(0, self._row_bytes), Lock()
        self._mapped = mmap.mmap(self._descriptor, size)
        # A page fault would otherwise read 32 pages, of which a sample needs one.
        self._mapped.madvise(mmap.MADV_RANDOM)
        rows = torch.frombuffer(self._mapped, dtype=torch.uint8).view(-1, self._row_bytes)[:num_rows]
        self.tables = self._split(rows)
        """All rows by table, through the mapping."""

    def release_pages(self) -> None:
        """Give back the memory of the mapping's pages; the file keeps their content."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def read_ahead(self, index: Tensor) -> None:
        """Ask the kernel to read rows into its cache, before they are read through the mapping."""
        for row, _, length in _runs(index):
            os.posix_fadvise(
                self._descriptor, row * self._row_bytes, length * self._row_bytes, os.POSIX_FADV_WILLNEED
            )

    def read_rows(self, index: Tensor, into: dict[str, Tensor]) -> None:
        """Copy rows into the first rows of tables.

        Raises:
            RunError: the disk fails.
        """
        with self._buffer_for(len(index)) as rows:
            self._transfer(os.preadv, rows, index)
            for name, table in self._split(rows).items():
                into[name][: len(index)].copy_(table)

    def write_rows(self, index: Tensor, source: dict[str, Tensor]) -> None:
        """Copy tables to their rows; `index` must not repeat a row.

        Raises:
            RunError: the disk fails.
        """
        with self._buffer_for(len(index)) as rows:
            for name, table in self._split(rows).items():
                table.copy_(source[name])
            self._transfer(os.pwritev, rows, index)

    @contextmanager
    def _buffer_for(self, count: int) -> Iterator[Tensor]:
        """Lend memory for rows (count, row_bytes). It is kept between calls: new pages cost more than the disk."""
        # The worker of the prefetcher and the training thread both read rows.
        with self._buffer_lock:
            if len(self._buffer) < count:
                self._buffer = _aligned(count, self._row_bytes)
            yield self._buffer[:count]

    def _transfer(self, call: Callable[..., int], rows: Tensor, index: Tensor) -> None:
        """Move rows between the buffer and the file by os.preadv or os.pwritev, on several threads."""
        # Neighbors in one transfer: a sample of blocks (`classes_per_block`) then needs one for each block, not for
        # each row.
        content, runs = rows.numpy(), list(_runs(index))
        descriptor = self._descriptor if self._direct is None else self._direct

        def every_nth_run(first: int) -> None:
            for row, place, length in runs[first::_IN_FLIGHT]:
                memory = content[place : place + length].data
                if call(descriptor, [memory], row * self._row_bytes) != memory.nbytes:
                    raise RunError(
                        f"{self._path}: the transfer at row {row} was incomplete; resume from the last checkpoint"
                    )

        with os_errors_as(RunError, self._path, "check the disk, then resume from the last checkpoint"):
            for _ in self._pool.map(every_nth_run, range(min(_IN_FLIGHT, len(runs)))):
                pass

    def _split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the tables that are side by side in rows of bytes (..., row_bytes), as views."""
        return {
            name: rows[:, self._offsets[name] : self._offsets[name] + columns * dtype.itemsize].view(dtype)
            for name, (columns, dtype) in self._layout.items()
        }

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a head with its centers on disk cannot be copied or pickled; load its state_dict into another head"
        )

    def __del__(self) -> None:
        for name in ("_descriptor", "_direct"):
            if (descriptor := getattr(self, name, None)) is not None:
                os.close(descriptor)


def _runs(index: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, position in the index, length) of every run of consecutive rows."""
    if not len(index):
        return
    is_first = torch.ones(len(index), dtype=torch.bool)
    is_first[1:] = index.diff() != 1
    is_first[::_LONGEST_RUN] = True
    starts = is_first.nonzero()[:, 0]
    lengths = torch.cat([starts[1:], torch.tensor([len(index)])]) - starts
    yield from zip(index[starts].tolist(), starts.tolist(), lengths.tolist(), strict=True)


def _reserve(path: Path, size: int) -> int:
    """Create a file, allocate its space, and return its descriptor."""
    descriptor = -1
    with os_errors_as(
        RunError,
        path,
        f"the class centers need {size / 2**30:.1f} GiB on this disk; free space or choose another disk",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            # Allocated and not sparse: a disk that fills up later would end the process by SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
                path.unlink()  # it would keep the space that was allocated until the disk was full
            raise
    return descriptor


def _open_direct(path: Path, row_bytes: int) -> int | None:
    """Open a file with O_DIRECT; return None if its row size, file system or disk does not allow that."""
    if row_bytes % _SECTOR:
        return None
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        # A disk with larger sectors reports that only when it is asked for a row that is not aligned to them.
        os.preadv(descriptor, [_aligned(1, row_bytes).numpy().data], row_bytes)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def _aligned(count: int, row_bytes: int) -> Tensor:
    """Return memory for rows (count, row_bytes), uint8, aligned to pages as O_DIRECT requires."""
    memory = torch.empty(count * row_bytes + _PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE
    return memory[start : start + count * row_bytes].view(count, row_bytes)
