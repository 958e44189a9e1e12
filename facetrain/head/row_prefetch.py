"""Prefetching of a step's sampled rows from host memory or disk to the device, one step ahead."""

# S rows of a step

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from facetrain.device.page_locked import to_device
from facetrain.device.thread_device import use_device
from facetrain.head.class_centers import RowTables

_SPARE_SHARE = 1 / 64
"""Extra rows to allocate, as a share of the drawn rows, for the classes that the next batch adds."""


@dataclass
class _StepRows:
    """Rows copied out of the tables: `tables[name][i]` is row `index[i]`."""

    index: Tensor
    """int64 on the host: the drawn rows, ascending, followed by those that the batch added."""
    tables: dict[str, Tensor]
    """May have more rows than `index`; the rest is spare."""
    drawn: int
    """Number of the drawn rows."""
    common: Tensor
    """Places of the drawn rows that the step before has too, there and here: int64 (2, count) on the device."""


class RowPrefetcher:
    """Copies of a step's rows on the device, which a worker thread reads before the step and writes back after it.

    The rows that a step's sample draws are known before its batch is, so they are read during the step before.
    The few classes that only the batch contains are read when it arrives. The worker does one task after the
    other: it writes back step t − 1, then reads for step t + 1. What it reads therefore lacks the changes of step t
    only, and these are copied from the rows of step t, which are still on the device.
    """

    def __init__(self, source: RowTables, device: torch.device) -> None:
        self._source, self._device = source, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="rows", initializer=partial(use_device, device)
        )
        self._next: tuple[Tensor, Future[_StepRows]] | None = None
        self._write: Future[None] | None = None
        self._current: _StepRows | None = None
        self._given: RowTables | None = None
        """What `step_rows` has returned last."""
        self._spare: list[dict[str, Tensor]] = []
        """Host tables for reuse, accessed by the worker only. Pinned memory is cached by torch itself."""

    def __reduce__(self) -> tuple[type[RowPrefetcher], tuple[RowTables, torch.device]]:
        # A copy reads for itself: threads cannot be copied.
        return RowPrefetcher, (self._source, self._device)

    def step_rows(self, drawn: Tensor, added: Tensor, next_drawn: Tensor) -> RowTables:
        """Return tables of the rows of a step on the device: first the drawn ones, then the added ones.

        `drawn` are the rows that the step's sample draws, `added` those that only the batch contains, and
        `next_drawn` those that the next step will draw: ascending int64 row numbers on the host.

        Raises:
            RunError: the disk has failed, also while rows of an earlier step were written back.
        """
        # Steps of training, and the tasks of the worker beside them:
        #
        #     training   step t − 1              step t                      step t + 1
        #     worker     write t − 2, read t     write t − 1, read t + 1     write t, read t + 2
        #
        # When step t begins, its drawn rows are there. They lack what step t − 1 has changed, which is copied below.
        previous = self._current
        self._end_step()
        rows = self._take_prefetched(drawn, added, previous)
        # The prefetched rows were read after this, so it never waits. It raises the error of a write that has failed.
        self._wait_for_write()
        self._append(rows, added)
        if previous is not None:
            # Rows of both steps were read before the last step changed them; the new values are still on the device.
            _copy_rows(previous, rows, rows.common)
            common_added = to_device(_common_rows(previous, added.numpy(), offset=rows.drawn), self._device)
            _copy_rows(previous, rows, common_added)
            # Queued before the next read: the worker does one task after the other, so that read sees these values in
            # the tables.
            self._write = self._worker.submit(self._write_back, previous, self._record_event())
        self._current = rows
        spare = len(added) + int(len(drawn) * _SPARE_SHARE)
        self._next = next_drawn, self._worker.submit(self._read, next_drawn, spare, rows)
        tables = {name: table[: len(rows.index)] for name, table in rows.tables.items()}
        self._given = RowTables(tables, self._device)
        return self._given

    def flush(self) -> None:
        """Write everything back and wait for it. Prefetched rows are discarded."""
        self._end_step()
        if self._current is not None:
            self._wait_for_write()
            self._write = self._worker.submit(self._write_back, self._current, self._record_event())
        self._wait_for_write()
        self._current = self._next = self._write = None

    def _end_step(self) -> None:
        """Mark the tables of the last step: from now on, what changes in them is lost."""
        if self._given is not None:
            self._given.is_written_back = True
            self._given = None

    def _wait_for_write(self) -> None:
        """Wait until the last rows to write back are written. If that has failed, raise its error, each time."""
        if self._write is not None:
            self._write.result()

    def _take_prefetched(self, drawn: Tensor, added: Tensor, previous: _StepRows | None) -> _StepRows:
        """Return the prefetched rows; read them now if other rows, or fewer spare ones, were prefetched."""
        if self._next is not None and torch.equal(self._next[0], drawn):
            # The rows are known from the seed and the step. Others are needed after a resume, or at the beginning of a
            # stage.
            rows = self._next[1].result()
            if all(len(table) >= len(drawn) + len(added) for table in rows.tables.values()):
                return rows
        # The first step, or the first after a checkpoint: all rows may have been read through the mapping.
        self._source.release_pages()
        return self._worker.submit(self._read, drawn, len(added), previous).result()

    def _read(self, index: Tensor, spare: int, previous: _StepRows | None) -> _StepRows:
        """Read rows, and find those that the step before has too. Runs in the worker, one step ahead."""
        host = self._spare_tables(len(index) + spare) or self._new_tables(len(index) + spare)
        self._source.read_rows(index, host)
        places = np.empty((2, 0), np.int64) if previous is None else _common_rows(previous, index.numpy())
        common = torch.from_numpy(places)
        if self._stream is None:
            return _StepRows(index, host, len(index), common)
        with torch.cuda.stream(self._stream):
            # On a stream of the worker, beside the kernels of the step before.
            tables = {name: table.to(self._device, non_blocking=True) for name, table in host.items()}
            common = common.to(self._device)
        # The training thread uses the tables on another stream, which does not wait for this one.
        self._stream.synchronize()
        return _StepRows(index, tables, len(index), common)

    def _append(self, rows: _StepRows, added: Tensor) -> None:
        """Read the rows that the batch added into the spare rows of the tables."""
        start, stop = rows.drawn, rows.drawn + len(added)
        # In the training thread: the step cannot begin without these rows.
        host = self._new_tables(len(added))
        self._source.read_rows(added, host)
        for name, table in host.items():
            rows.tables[name][start:stop].copy_(table, non_blocking=True)
        rows.index = torch.cat([rows.index, added])

    def _new_tables(self, count: int) -> dict[str, Tensor]:
        """Allocate host tables with `count` rows."""
        pinned = self._stream is not None
        return {
            name: torch.empty(count, *table.data.shape[1:], dtype=table.data.dtype, pin_memory=pinned)
            for name, table in self._source.by_name.items()
        }

    def _spare_tables(self, count: int) -> dict[str, Tensor] | None:
        """Return the tables of an earlier step, if they have at least `count` rows.

        Allocating new ones instead takes the kernel longer, to clear their pages, than copying the rows does.
        """
        while self._spare:
            tables = self._spare.pop()
            if all(len(table) >= count for table in tables.values()):
                return tables
        return None

    def _write_back(self, rows: _StepRows, step_done: torch.cuda.Event | None) -> None:
        tables = {name: table[: len(rows.index)] for name, table in rows.tables.items()}
        if self._stream is not None and step_done is not None:
            step_done.synchronize()
            tables = self._copy_to_host(tables)
        self._source.write_rows(rows.index, tables)
        if self._stream is None:
            self._spare.append(rows.tables)

    def _copy_to_host(self, tables: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tables from the device to pinned memory, on the worker's stream."""
        assert self._stream is not None, "only CUDA devices have a stream"
        host = self._new_tables(len(next(iter(tables.values()))))
        with torch.cuda.stream(self._stream):
            for name, table in host.items():
                table.copy_(tables[name], non_blocking=True)
        self._stream.synchronize()
        return host

    def _record_event(self) -> torch.cuda.Event | None:
        """Return an event that follows the work queued so far; None on the CPU, where that work is done."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()


def find(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the place of each value in an ascending array, −1 where it is missing."""
    if not len(ascending):
        return np.full(len(values), -1)
    place = np.searchsorted(ascending, values)
    is_present = ascending[np.minimum(place, len(ascending) - 1)] == values
    return np.where(is_present, place, -1)


def _common_rows(old: _StepRows, index: np.ndarray, *, offset: int = 0) -> np.ndarray:
    """Return the places in `old.index`, and `offset` after those in `index`, of the rows of both: int64 (2, count)."""
    rows = old.index.numpy()
    place = find(rows[: old.drawn], index)
    added = find(rows[old.drawn :], index)
    place = np.where(added >= 0, old.drawn + added, place)
    here = np.flatnonzero(place >= 0)
    return np.stack([place[here], offset + here])


def _copy_rows(old: _StepRows, new: _StepRows, places: Tensor) -> None:
    for name, table in new.tables.items():
        table.index_copy_(0, places[1], old.tables[name].index_select(0, places[0]))
