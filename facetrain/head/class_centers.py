"""Tables of class centers and their optimizer state, in device memory, host memory or a file on disk."""

# K this rank's classes   S rows of a step   X columns of a table

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.counter_rng import key_of
from facetrain.device.page_locked import page_locked, to_device
from facetrain.device.thread_device import use_device
from facetrain.errors import RunError
from facetrain.head.class_shard import ClassShard
from facetrain.head.row_file import DiskRows, Layout
from facetrain.head.stochastic_rounding import Noise, round_to_bfloat16, round_to_int8

Rows = slice | Tensor
"""Rows of a table: consecutive ones as a slice, or selected ones as an int64 index.

An index is on the table's device where rows are read, has no repetitions where they are written, and ascends where the
optimizer updates them.
"""

NOISE, CENTERS, MARGIN_DRAWS = 1, 2, 3
"""Numbers that separate the random keys of a head's seed: of rounding, the first centers, and draws of margins."""
_INIT_STD = 0.01
_INIT_BLOCK = 4096
"""Classes that share a random generator. Changing it changes the initial centers of every seed."""


@dataclass(frozen=True)
class Storage:
    """Memory and dtype in which class centers are stored."""

    dtype: torch.dtype = torch.float32
    placement: str = "device"
    """`device`; `host`: host memory; `disk`: a file. From the latter two, rows are copied when they are needed."""
    folder: Path | None = None
    """Folder of the files of all ranks."""
    classes_per_block: int = 1
    """Consecutive classes that are sampled together, because a disk reads neighbors at once."""


class RowTable:
    """Table (K, X) whose rows are fetched to the device and stored back; it may use fewer bits per number there."""

    scale: RowTable | None = None
    """For an int8 table, the value of one unit in each block of numbers."""
    copies_slices = False
    """Whether slices are copies also on the device: for a forecast of a table that will be elsewhere."""

    def __init__(self, data: Tensor, device: torch.device) -> None:
        self._data, self._device = data, device

    @property
    def data(self) -> Tensor:
        """All rows, in the table's dtype."""
        return self._data

    @property
    def is_elsewhere(self) -> bool:
        """Whether the table is on another device than its fetched rows."""
        return self.data.device.type != self._device.type

    def fetch(self, rows: Rows) -> Tensor:
        """Return rows (S, X) on the device, int8 ones converted to float32.

        The result may be a view of the table, so a caller that changes it must call `store`.
        """
        values = self._stored(rows)
        if self.scale is None:
            return values
        # (S, blocks, numbers of a block): each block has one scale.
        scale = self.scale.fetch(rows)
        return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1)

    def _stored(self, rows: Rows) -> Tensor:
        """Return rows (S, X) on the device, in the table's dtype."""
        if isinstance(rows, slice):
            # On the device this is a view, so that an update in place needs no copy back.
            return self.data[rows].to(self._device, non_blocking=True, copy=self.copies_slices)
        # Several times faster than indexing on a CPU.
        return to_device(torch.index_select(self.data, 0, rows), self._device)

    def read(self, rows: Rows) -> Tensor:
        """Return rows (S, X) on the device, contiguous and in the table's dtype, which must be on another device."""
        return self._stored(rows).contiguous()

    def store(self, rows: Rows, values: Tensor, noise: Noise | None = None) -> None:
        """Write rows back. With `noise`, conversion to bfloat16 or int8 rounds at random and without bias.

        The values may be overwritten.
        """
        if self.scale is not None and noise is not None:
            values, scale = round_to_int8(values, self.scale.data.shape[1], noise)
            self.scale.store(rows, scale)
        if self.data.dtype == torch.bfloat16 and values.dtype != torch.bfloat16 and noise is not None:
            values = round_to_bfloat16(values, noise)
        if isinstance(rows, Tensor):
            self.data.index_copy_(0, rows.to(self.data.device), values.to(self.data.device, self.data.dtype))
        # The same address: the values are a view that was changed in place, and are stored already.
        elif values.data_ptr() != self.data[rows].data_ptr():
            # Blocks the host for a table in host memory: the next fetch of these rows must see the new values.
            self.data[rows].copy_(values)


class ParameterTable(RowTable):
    """Rows of a parameter, on its device."""

    def __init__(self, parameter: nn.Parameter) -> None:
        # Not the data that it has now: once it is moved, they would take memory for nothing.
        self.parameter, self._device = parameter, parameter.device

    @property
    def data(self) -> Tensor:
        """All rows."""
        # `Module.to` gives a parameter other data.
        if self.parameter.device != self._device:
            self._device = self.parameter.device
        return self.parameter.data


class RowTables:
    """All tables of one head by name, in the same place."""

    def __init__(self, data: dict[str, Tensor], device: torch.device, file: DiskRows | None = None) -> None:
        self.by_name = {name: RowTable(table, device) for name, table in data.items()}
        # The scales of an int8 table are a table of their name, so that files and prefetching move them like any other.
        for name, table in self.by_name.items():
            table.scale = self.by_name.get(f"{name}_scale")
        self._file = file
        self.is_written_back = False
        """Whether these are copies whose rows have gone back to their tables: later changes would be lost."""

    @property
    def device(self) -> torch.device:
        """Device of the tables: the CPU for a file on disk."""
        return self.by_name["weight"].data.device

    @property
    def on_host(self) -> bool:
        """Whether the tables are in host memory or on disk, and the device is another one."""
        return any(table.is_elsewhere for table in self.by_name.values())

    def release_pages(self) -> None:
        """Give back the memory of a file's mapping, after a pass over all rows."""
        if self._file is not None:
            self._file.release_pages()

    def read_ahead(self, index: Tensor) -> None:
        """Start reading rows (ascending) from disk that will be fetched next; return at once."""
        if self._file is not None:
            self._file.read_ahead(index)

    def read_rows(self, index: Tensor, into: dict[str, Tensor]) -> None:
        """Copy rows (ascending, on the host) into the first rows of tables on the host."""
        if self._file is not None:
            self._file.read_rows(index, into)
            return
        for name, table in self.by_name.items():
            # `clip`, and no number is out of range: with `raise`, NumPy copies into a buffer first.
            out = _as_records(into[name])[: len(index)]
            np.take(_as_records(table.data), index.numpy(), out=out, mode="clip")

    def write_rows(self, index: Tensor, source: dict[str, Tensor]) -> None:
        """Copy tables on the host back to their rows; `index` must not repeat a row."""
        if self._file is not None:
            self._file.write_rows(index, source)
            return
        for name, table in self.by_name.items():
            _as_records(table.data)[index.numpy()] = _as_records(source[name])


def allocate_tables(
    layout: Layout,
    num_rows: int,
    device: torch.device,
    storage: Storage,
    *,
    fetched_in_slices: bool = False,
) -> RowTables:
    """Allocate tables of zeros; rows are fetched to the device.

    `fetched_in_slices` states that rows will be fetched from host memory as slices and not by index.

    Raises:
        RunError: the disk has no space for the file, or the storage names no folder.
    """
    if storage.placement == "disk":
        if storage.folder is None:
            raise RunError("placement disk needs a folder for the row file; pass Storage.folder")
        file = DiskRows(storage.folder / "rows.bin", num_rows, layout)
        return RowTables(file.tables, device, file)
    place = torch.device("cpu") if storage.placement == "host" else device
    # Slices are copied between the table itself and the GPU, twice as fast if it is page-locked. Rows by index are
    # gathered into other memory first.
    locked = storage.placement == "host" and fetched_in_slices and device.type == "cuda" and num_rows
    return RowTables(
        {
            name: page_locked(torch.Size((num_rows, columns)), dtype)
            if locked
            else torch.zeros(num_rows, columns, dtype=dtype, device=place)
            for name, (columns, dtype) in layout.items()
        },
        device,
    )


def draw_centers(table: Tensor, shard: ClassShard, seed: int) -> None:
    """Fill a shard's table of centers from N(0, 0.01²).

    Each block of 4,096 classes has its random generator, so the centers do not depend on the number of ranks.
    """
    if table.device.type == "meta":  # a table that is only counted
        return
    blocks = range(shard.start // _INIT_BLOCK, -(-shard.stop // _INIT_BLOCK))
    threads = torch.get_num_threads()
    use = partial(use_device, table.device)
    # A generator draws on one core; the blocks are drawn on all.
    with ThreadPoolExecutor(threads, initializer=use) as pool:
        for _ in pool.map(
            lambda first: _draw_blocks(table, shard, seed, blocks[first::threads]), range(threads)
        ):
            pass


def _draw_blocks(table: Tensor, shard: ClassShard, seed: int, blocks: range) -> None:
    # One buffer for all blocks: if each allocates its own, the C library keeps 100 MB of them for the thread.
    drawn = torch.empty(_INIT_BLOCK, table.shape[1])
    for block in blocks:
        # On the CPU whatever the device is: a GPU's generator draws other numbers from the same seed.
        generator = torch.Generator().manual_seed(key_of(seed, CENTERS, block) & (2**63 - 1))
        first = block * _INIT_BLOCK
        start, stop = max(first, shard.start), min(first + _INIT_BLOCK, shard.stop)
        rows = table[start - shard.start : stop - shard.start]
        is_whole = len(rows) == _INIT_BLOCK and rows.is_contiguous()
        if is_whole and rows.dtype == torch.float32 and rows.device.type == "cpu":
            rows.normal_(0, _INIT_STD, generator=generator)
        else:
            # The first and the last block of a shard can be cut. It is drawn whole, so that a class has the same center
            # whichever rank holds it.
            drawn.normal_(0, _INIT_STD, generator=generator)
            rows.copy_(drawn[start - first : stop - first])


def _as_records(table: Tensor) -> np.ndarray:
    """Return a table on the host as an array of one record per row, which NumPy copies whole."""
    return table.view(torch.uint8).numpy().view(f"V{table.shape[1] * table.element_size()}")[:, 0]
