"""Tables of which a few rows at a time are brought to the device, changed and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from facetrain.errors import RunError
from facetrain.head.row_file import Layout, RowFile
from facetrain.head.stochastic_rounding import Noise, round_to_bfloat16, round_to_int8

Rows = slice | Tensor
"""Consecutive rows, or chosen ones as an ascending int64 index."""


class RowTable:
    """A table (K, ...) that may lie elsewhere than on the device, and may hold its numbers in fewer bits."""

    def __init__(self, data: Tensor, device: torch.device, scale: RowTable | None = None) -> None:
        self.data, self._device = data, device
        self.scale = scale
        """What 1 stands for in each block of an int8 table."""

    def fetch(self, rows: Rows) -> Tensor:
        """Return rows on the device. Consecutive rows may be the table itself; who changes them stores them."""
        if isinstance(rows, Tensor):
            # Several times faster on a CPU than indexing.
            near = torch.index_select(self.data, 0, rows.to(self.data.device))
        else:
            near = self.data[rows]
        values = near.to(self._device, non_blocking=True)
        if self.scale is None:
            return values
        scale = self.scale.fetch(rows)
        return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1)

    def store(self, rows: Rows, values: Tensor, noise: Noise | None = None) -> None:
        """Put rows back; into fewer bits they are rounded up or down at random, right on average."""
        if self.scale is not None and noise is not None:
            values, scale = round_to_int8(values, self.scale.data.shape[1], noise)
            self.scale.store(rows, scale)
        if self.data.dtype == torch.bfloat16 and values.dtype != torch.bfloat16 and noise is not None:
            values = round_to_bfloat16(values, noise)
        if isinstance(rows, Tensor):
            self.data.index_copy_(0, rows.to(self.data.device), values.to(self.data.device, self.data.dtype))
        elif values.data_ptr() != self.data[rows].data_ptr():
            self.data[rows].copy_(values)


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

    def let_go(self) -> None:
        """Say that all rows were gone through, and only some will be read from now on."""
        if self._file is not None:
            self._file.let_go()

    def read_ahead(self, index: Tensor) -> None:
        """Say which rows (ascending) will be fetched next; returns at once."""
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
    in_stretches: bool = False,
) -> RowTables:
    """Make tables full of zeros on the device, in the `host`'s memory, or on `disk`, in a file in `folder`.

    `in_stretches`: rows will be fetched from the host by stretches as they lie, not chosen ones.

    Raises:
        RunError: there is no room for the file.
    """
    if placement == "disk":
        if folder is None:
            raise RunError("head.placement is disk, and the run gave it no folder")
        file = RowFile(folder / "rows.bin", num_rows, layout)
        return RowTables(file.tables, device, file)
    on_host = placement == "host"
    # Pinned, so that the copy to a GPU runs beside the computation. Chosen rows are gathered elsewhere first, and torch
    # rounds what it pins up to a power of two: of tables that fill a machine, half might be in vain.
    pinned = in_stretches and device.type == "cuda"
    options: dict[str, Any] = {"pin_memory": pinned} if on_host else {"device": device}
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
