"""Brings the rows of a step to the device one step ahead, and puts them back behind it."""

# K this rank's classes   S the rows of a step

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from facetrain.head.class_centers import RowTables


@dataclass
class _Rows:
    """Rows that were taken out of the tables: `tables[name][i]` is row `index[i]`."""

    index: Tensor
    """int64, on the host; what was drawn, ascending, then what the batch added."""
    tables: dict[str, Tensor]
    """With room for more rows than `index` has."""


class Stage:
    """A step's rows on the device, while the worker thread moves those of the steps around it.

    What a step's sample draws is known before its batch is, so it is fetched during the step before; the
    few classes that only the batch has are fetched when it is there. The worker does one thing after the
    other: it puts back step t − 1, then fetches step t + 1. So what it fetches misses the changes of step t
    alone, and those are copied from its rows, which are still at hand.
    """

    def __init__(self, home: RowTables, device: torch.device) -> None:
        self._home, self._device = home, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rows", initializer=self._use_device)
        self._ahead: tuple[Tensor, Future[_Rows]] | None = None
        self._behind: Future[None] | None = None
        self._here: _Rows | None = None
        self._spare: list[dict[str, Tensor]] = []
        """Tables on the host that are put back; the worker's. Pinned memory is kept by torch itself."""

    def enter(self, drawn: Tensor, added: Tensor, next_drawn: Tensor) -> tuple[Tensor, RowTables]:
        """Return the rows of a step: which (S,), and tables of them.

        `drawn` is what the sample draws of itself, `added` what the batch has besides, `next_drawn` what the
        next step will draw; ascending int64 row numbers on the host.
        """
        left, rows = self._here, self._append(self._take(drawn, room=len(added)), added)
        if left is not None:
            _copy_common(left, rows)
            self._behind = self._worker.submit(self._put_back, left, self._mark())
        self._here = rows
        self._ahead = (
            next_drawn,
            self._worker.submit(self._fetch, next_drawn, len(added) + len(drawn) // 64),
        )
        return rows.index, RowTables(
            {name: table[: len(rows.index)] for name, table in rows.tables.items()}, self._device
        )

    def settle(self) -> None:
        """Put everything back, and wait until it is; what was fetched ahead is forgotten."""
        if self._here is not None:
            self._behind = self._worker.submit(self._put_back, self._here, self._mark())
        if self._behind is not None:
            self._behind.result()
        self._here = self._ahead = self._behind = None

    def _use_device(self) -> None:
        # A thread begins on the first GPU of the machine, and would open a context there: half a gigabyte.
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def _take(self, drawn: Tensor, room: int) -> _Rows:
        """Return the rows that were fetched ahead, or fetch them now."""
        if self._ahead is not None and torch.equal(self._ahead[0], drawn):
            rows = self._ahead[1].result()
            if all(len(table) >= len(drawn) + room for table in rows.tables.values()):
                return rows
        if self._behind is not None:
            self._behind.result()
        # The first step, or the first after a checkpoint.
        self._home.let_go()
        return self._worker.submit(self._fetch, drawn, room).result()

    def _fetch(self, index: Tensor, room: int) -> _Rows:
        near = self._spare_tables(len(index) + room) or self._new_tables(len(index) + room)
        self._home.take(index, near)
        if self._stream is None:
            return _Rows(index, near)
        with torch.cuda.stream(self._stream):
            tables = {name: table.to(self._device, non_blocking=True) for name, table in near.items()}
        self._stream.synchronize()
        return _Rows(index, tables)

    def _append(self, rows: _Rows, added: Tensor) -> _Rows:
        start, stop = len(rows.index), len(rows.index) + len(added)
        near = self._new_tables(len(added))
        self._home.take(added, near)
        for name, table in near.items():
            rows.tables[name][start:stop] = table.to(self._device)
        return _Rows(torch.cat([rows.index, added]), rows.tables)

    def _new_tables(self, count: int) -> dict[str, Tensor]:
        """Return tables on the host with room for rows."""
        pinned = self._stream is not None
        return {
            name: torch.empty(count, *home.data.shape[1:], dtype=home.data.dtype, pin_memory=pinned)
            for name, home in self._home.by_name.items()
        }

    def _spare_tables(self, count: int) -> dict[str, Tensor] | None:
        """Return an earlier step's tables if they have room for rows.

        To clear the pages of new ones takes the kernel longer than the copying does.
        """
        while self._spare:
            tables = self._spare.pop()
            if all(len(table) >= count for table in tables.values()):
                return tables
        return None

    def _put_back(self, rows: _Rows, done: torch.cuda.Event | None) -> None:
        near = {name: table[: len(rows.index)] for name, table in rows.tables.items()}
        if self._stream is not None and done is not None:
            done.synchronize()
            near = self._bring_home(near)
        self._home.put(rows.index, near)
        if self._stream is None:
            self._spare.append(rows.tables)

    def _bring_home(self, near: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tables from the device to memory that it reaches without help of the processor."""
        assert self._stream is not None, "only a device has a stream"
        tables = self._new_tables(len(next(iter(near.values()))))
        with torch.cuda.stream(self._stream):
            for name, table in tables.items():
                table.copy_(near[name], non_blocking=True)
        self._stream.synchronize()
        return tables

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event that is reached when the work queued so far is done; None: it is."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()


def _copy_common(old: _Rows, new: _Rows) -> None:
    """Copy the rows that both have from the old to the new."""
    _, old_place, new_place = np.intersect1d(
        old.index.numpy(), new.index.numpy(), assume_unique=True, return_indices=True
    )
    for name, table in new.tables.items():
        table[torch.from_numpy(new_place).to(table.device)] = old.tables[name][
            torch.from_numpy(old_place).to(table.device)
        ]
