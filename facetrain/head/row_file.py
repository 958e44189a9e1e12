"""The file that holds the rows of a head whose centers lie on disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from facetrain.errors import RunError

Layout = dict[str, tuple[int, torch.dtype]]
"""Name of a table -> numbers in a row of it, and how they are stored."""

_CACHE_LINE, _SECTOR, _PAGE = 64, 512, 4096
"""Bytes: what rows, what transfers past the kernel's cache, and what the memory for them are aligned to."""
_IN_FLIGHT = 16
"""Transfers at once; a disk answers many in the time of one."""
_LONGEST_RUN = 4096
"""Rows in a transfer: the kernel moves no more than 2 GiB by one call, and long runs are shared out."""


class RowFile:
    """A file of rows, each of which holds its numbers of all tables side by side.

    A class's center and momentum then come in one read of the disk. The file is a place to work in, not a
    checkpoint. It is mapped into memory for whoever goes through all rows. A step's rows are read and
    written by calls, which pass the kernel's cache by where rows fill whole sectors: a sample hardly ever
    finds its rows there, and making room in the cache costs the processor several times what the disk does.

    While rows are moved by calls, the mapping must not be used: it could keep a page as it was before.
    """

    def __init__(self, path: Path, num_rows: int, layout: Layout) -> None:
        self._path, self._layout = path, layout
        self._offsets, end = {}, 0
        # The widest numbers first, so that all are aligned to their own width.
        for name, (columns, dtype) in sorted(layout.items(), key=lambda item: -item[1][1].itemsize):
            self._offsets[name], end = end, end + columns * dtype.itemsize
        self._row_bytes = -(-end // _CACHE_LINE) * _CACHE_LINE
        size = max(num_rows, 1) * self._row_bytes
        self._descriptor = _reserve(path, size)
        self._direct = _open_direct(path, self._row_bytes) if num_rows > 1 else None
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="disk")
        self._buffer, self._buffer_use = _aligned(0, self._row_bytes), Lock()
        self._mapped = mmap.mmap(self._descriptor, size)
        # A page fault would otherwise read the 32 pages around it, of which a sample needs one.
        self._mapped.madvise(mmap.MADV_RANDOM)
        rows = torch.frombuffer(self._mapped, dtype=torch.uint8).view(-1, self._row_bytes)[:num_rows]
        self.tables = self._split(rows)
        """All rows, through the mapping."""

    def let_go(self) -> None:
        """Say that who went through all rows is done: the mapping's pages leave the program's memory."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def read_ahead(self, index: Tensor) -> None:
        """Have the kernel read rows into its cache, for whoever reads them through the mapping."""
        for row, _, length in _runs(index):
            os.posix_fadvise(
                self._descriptor, row * self._row_bytes, length * self._row_bytes, os.POSIX_FADV_WILLNEED
            )

    def take(self, index: Tensor, near: dict[str, Tensor]) -> None:
        """Copy rows into the beginnings of tables.

        Raises:
            RunError: the disk does not give them.
        """
        with self._rows_of_calls(len(index)) as rows:
            self._move(os.preadv, rows, index)
            for name, table in self._split(rows).items():
                near[name][: len(index)].copy_(table)

    def put(self, index: Tensor, near: dict[str, Tensor]) -> None:
        """Copy tables back to their rows, none twice.

        Raises:
            RunError: the disk does not take them.
        """
        with self._rows_of_calls(len(index)) as rows:
            for name, table in self._split(rows).items():
                table.copy_(near[name])
            self._move(os.pwritev, rows, index)

    @contextmanager
    def _rows_of_calls(self, count: int) -> Iterator[Tensor]:
        """Lend memory for rows (count, row_bytes), kept from call to call: new pages cost more than the disk."""
        with self._buffer_use:
            if len(self._buffer) < count:
                self._buffer = _aligned(count, self._row_bytes)
            yield self._buffer[:count]

    def _move(self, transfer: Callable[..., int], rows: Tensor, index: Tensor) -> None:
        content, runs = rows.numpy(), list(_runs(index))
        descriptor = self._descriptor if self._direct is None else self._direct

        def share(first: int) -> None:
            for row, place, length in runs[first::_IN_FLIGHT]:
                part = content[place : place + length].data
                if transfer(descriptor, [part], row * self._row_bytes) != part.nbytes:
                    raise RunError(
                        f"{self._path}: row {row} was moved in part; resume from the last checkpoint"
                    )

        try:
            for _ in self._pool.map(share, range(min(_IN_FLIGHT, len(runs)))):
                pass
        except OSError as error:
            raise RunError(
                f"{self._path}: {error.strerror}; mend the disk, then resume from the last checkpoint"
            ) from error

    def _split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the tables that lie side by side in rows of bytes (..., row_bytes)."""
        return {
            name: rows[:, self._offsets[name] : self._offsets[name] + columns * dtype.itemsize].view(dtype)
            for name, (columns, dtype) in self._layout.items()
        }

    def __del__(self) -> None:
        for name in ("_descriptor", "_direct"):
            if (descriptor := getattr(self, name, None)) is not None:
                os.close(descriptor)


def _runs(index: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, its place in the index, length) of runs of consecutive rows."""
    if not len(index):
        return
    first = torch.ones(len(index), dtype=torch.bool)
    first[1:] = index.diff() != 1
    first[::_LONGEST_RUN] = True
    places = first.nonzero()[:, 0]
    lengths = torch.cat([places[1:], torch.tensor([len(index)])]) - places
    yield from zip(index[places].tolist(), places.tolist(), lengths.tolist(), strict=True)


def _reserve(path: Path, size: int) -> int:
    """Create a file whose space is taken, and return its descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # Not sparse: a disk that fills up later would end the process by SIGBUS.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise RunError(
            f"{path}: cannot reserve {size / 2**30:.1f} GiB for centers: {error.strerror}; "
            "free space, or name another disk"
        ) from error
    return descriptor


def _open_direct(path: Path, row_bytes: int) -> int | None:
    """Open a file past the kernel's cache; None where its file system or its disk's sectors forbid it."""
    if row_bytes % _SECTOR or not hasattr(os, "O_DIRECT"):
        return None
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        # What sectors a disk has shows only when it is asked for a row that lies across one.
        os.preadv(descriptor, [_aligned(1, row_bytes).numpy().data], row_bytes)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def _aligned(count: int, row_bytes: int) -> Tensor:
    """Return memory for rows (count, row_bytes), uint8, aligned as transfers past the cache want it."""
    memory = torch.empty(count * row_bytes + _PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE
    return memory[start : start + count * row_bytes].view(count, row_bytes)
