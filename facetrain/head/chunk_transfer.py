"""Copies of chunks between tables in page-locked host memory and a GPU, beside the computation."""

# S rows of a chunk   X columns of a table

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class CopyStreams:
    """One stream for each direction: the bus between host and GPU carries both at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_device, self.to_host = torch.cuda.Stream(device), torch.cuda.Stream(device)


@dataclass
class _Copy:
    """Rows on the device."""

    rows_SX: Tensor
    arrived: torch.cuda.Event
    is_fetched: bool = False


class ChunkTransfer:
    """Copies of consecutive rows of one table.

    A chunk is copied to the device while the one before is computed, if `begin` was called in time, and back to the
    host while the next one is computed. The host waits for none of these copies, except in `wait`.
    """

    def __init__(self, table: Tensor, streams: CopyStreams) -> None:
        """Take a table (K, X) in page-locked memory, and the streams, which all tables of a head share."""
        self._table, self._streams = table, streams
        self._copies: dict[tuple[int, int], _Copy] = {}
        self._written: dict[tuple[int, int], torch.cuda.Event] = {}
        """Event after the last copy of rows [start, stop) to the host."""

    def begin(self, rows: slice) -> None:
        """Begin to copy rows to the device, unless they are there."""
        key = rows.start, rows.stop
        if key in self._copies:
            return
        stream = self._streams.to_device
        for (start, stop), event in self._written.items():
            if start < rows.stop and rows.start < stop:
                stream.wait_event(event)  # the rows are still on their way to the host
        with torch.cuda.stream(stream):
            values = self._table[rows].to(self._streams.device, non_blocking=True, copy=True)
            self._copies[key] = _Copy(values, stream.record_event())

    def fetch(self, rows: slice) -> Tensor:
        """Return rows (S, X) on the device, which the current stream may use at once.

        The same copy is returned until other rows are fetched or these are stored.
        """
        key = rows.start, rows.stop
        self._copies = {k: copy for k, copy in self._copies.items() if k == key or not copy.is_fetched}
        self.begin(rows)
        copy, current = self._copies[key], torch.cuda.current_stream(self._streams.device)
        if not copy.is_fetched:
            current.wait_event(copy.arrived)
            copy.rows_SX.record_stream(current)  # or the allocator may reuse its memory too early
            copy.is_fetched = True
        return copy.rows_SX

    def store(self, rows: slice, values_SX: Tensor) -> None:
        """Begin to copy rows back, of the table's dtype, as the current stream leaves them."""
        key, stream = (rows.start, rows.stop), self._streams.to_host
        self._copies.pop(key, None)
        stream.wait_stream(torch.cuda.current_stream(self._streams.device))
        with torch.cuda.stream(stream):
            self._table[rows].copy_(values_SX, non_blocking=True)
            self._written[key] = stream.record_event()
        values_SX.record_stream(stream)

    def wait(self) -> None:
        """Wait until the table on the host has all changes, and forget the copies on the device."""
        self._streams.to_host.synchronize()
        self._copies.clear()
        self._written.clear()
