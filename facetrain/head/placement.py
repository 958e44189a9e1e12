"""Where the rows of a head live: on the device, in the host's memory, or in a file mapped into it."""

# K this rank's classes

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from facetrain.errors import RunError
from facetrain.head.storage import RowTable

Layout = dict[str, tuple[int, torch.dtype]]
"""Name of a table -> numbers in a row of it, and how they are stored."""

_ALIGNMENT = 64
"""Bytes: rows start at a line of the processor's cache."""


class RowTables:
    """The tables of one head by name, all in the same place."""

    def __init__(
        self,
        data: dict[str, Tensor],
        device: torch.device,
        file: RowFile | None = None,
    ) -> None:
        self.by_name = {
            name: RowTable(tensor, device, _scale_of(name, data, device)) for name, tensor in data.items()
        }
        self._file = file

    def read_ahead(self, index: Tensor) -> None:
        """Say which rows (ascending) will be read next; returns at once."""
        if self._file is not None:
            self._file.read_ahead(index)

    def take(self, index: Tensor, near: dict[str, Tensor]) -> None:
        """Copy rows (ascending, on the host) into the beginnings of tables on the host."""
        if self._file is not None:
            self._file.take(index, near)
            return
        for name, table in self.by_name.items():
            _records(near[name])[: len(index)] = _records(table.data)[index.numpy()]

    def put(self, index: Tensor, near: dict[str, Tensor]) -> None:
        """Copy tables on the host back to their rows, none twice."""
        if self._file is not None:
            self._file.put(index, near)
            return
        for name, table in self.by_name.items():
            _records(table.data)[index.numpy()] = _records(near[name])


def place_tables(
    layout: Layout,
    num_rows: int,
    device: torch.device,
    *,
    placement: str = "device",
    folder: Path | None = None,
) -> RowTables:
    """Make tables full of zeros on the device, in the `host`'s memory, or on `disk`, in a file in `folder`.

    Raises:
        RunError: there is no room for the file.
    """
    if placement == "disk":
        if folder is None:
            raise RunError("head.placement is disk, and the run gave it no folder")
        file = RowFile(folder / "rows.bin", num_rows, layout)
        return RowTables(file.tables, device, file)
    on_host = placement == "host"
    # Pinned, so that the copy to a GPU runs beside the computation.
    options: dict[str, Any] = {"pin_memory": device.type == "cuda"} if on_host else {"device": device}
    return RowTables(
        {
            name: torch.zeros(num_rows, columns, dtype=dtype, **options)
            for name, (columns, dtype) in layout.items()
        },
        device,
    )


def _records(table: Tensor) -> np.ndarray:
    """Return a table on the host as an array of records, one per row, which NumPy copies whole."""
    return table.view(torch.uint8).numpy().view(f"V{table.shape[1] * table.element_size()}")[:, 0]


def _scale_of(name: str, data: dict[str, Tensor], device: torch.device) -> RowTable | None:
    scale = data.get(f"{name}_scale")
    return None if scale is None else RowTable(scale, device)


class RowFile:
    """A file of rows, each of which holds its numbers of all tables side by side.

    A class's centre and momentum then come in one read of the disk. The file is mapped into memory:
    what is used often stays in the kernel's cache, and changes reach the disk behind the program's back.
    It is a place to work in, not a checkpoint.
    """

    def __init__(self, path: Path, num_rows: int, layout: Layout) -> None:
        self._layout = layout
        self._offsets, end = {}, 0
        # The widest numbers first, so that all are aligned to their own width.
        for name, (columns, dtype) in sorted(layout.items(), key=lambda item: -item[1][1].itemsize):
            self._offsets[name], end = end, end + columns * dtype.itemsize
        self._row_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        size = max(num_rows, 1) * self._row_bytes
        self._descriptor = _reserve(path, size)
        mapped = mmap.mmap(self._descriptor, size)
        # A page fault would otherwise read the 32 pages around it, of which a sample needs one.
        mapped.madvise(mmap.MADV_RANDOM)
        rows = torch.frombuffer(mapped, dtype=torch.uint8).view(-1, self._row_bytes)[:num_rows]
        self.tables = self._split(rows)

    def read_ahead(self, index: Tensor) -> None:
        """Have the kernel read rows (ascending) into its cache, many at a time, while the caller goes on.

        A thread that meets them one by one waits for the disk at each.
        """
        for row, _, length in _runs(index):
            os.posix_fadvise(
                self._descriptor, row * self._row_bytes, length * self._row_bytes, os.POSIX_FADV_WILLNEED
            )

    def take(self, index: Tensor, near: dict[str, Tensor]) -> None:
        """Copy rows (ascending) into the beginnings of tables.

        By calls, not through the mapping, whose every page costs a fault to read and another to write.
        """
        rows = torch.empty(len(index), self._row_bytes, dtype=torch.uint8)
        content = rows.numpy()
        for row, place, length in _runs(index):
            os.preadv(self._descriptor, [content[place : place + length].data], row * self._row_bytes)
        for name, table in self._split(rows).items():
            near[name][: len(index)].copy_(table)

    def put(self, index: Tensor, near: dict[str, Tensor]) -> None:
        """Copy tables back to their rows."""
        rows = torch.empty(len(index), self._row_bytes, dtype=torch.uint8)
        order = index.argsort()
        for name, table in self._split(rows).items():
            table.copy_(torch.index_select(near[name], 0, order))
        content = rows.numpy()
        for row, place, length in _runs(index[order]):
            os.pwritev(self._descriptor, [content[place : place + length].data], row * self._row_bytes)

    def _split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the tables that lie side by side in rows of bytes (..., row_bytes)."""
        return {
            name: rows[:, self._offsets[name] : self._offsets[name] + columns * dtype.itemsize].view(dtype)
            for name, (columns, dtype) in self._layout.items()
        }

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _runs(index: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, its place in the index, length) of each run of consecutive rows; ascending."""
    if not len(index):
        return
    first = torch.ones(len(index), dtype=torch.bool)
    first[1:] = index.diff() > 1
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
            f"{path}: cannot reserve {size / 2**30:.1f} GiB for centres: {error.strerror}; "
            "free space, or name another disk"
        ) from error
    return descriptor
