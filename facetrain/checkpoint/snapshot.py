"""What a checkpoint is made from, and the copy of it that is written while training goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

_Tables = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step, as one rank holds it."""

    step: int
    replicated: dict[str, Tensor]
    """The same on all ranks; the leader writes it."""
    rows: dict[str, Tensor]
    """Tables of this rank's classes, row i of class `shard[0]` + i."""
    shard: tuple[int, int]
    num_classes: int
    rank_state: dict[str, Tensor]
    """What each rank has of its own: random states."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest verification, for keeping the best."""
    copy_rows: bool = True
    """Whether memory has room for a second copy of the tables; not where they fill the host's memory or a disk."""


class HostCopy:
    """Memory of the host that takes one snapshot after another.

    It is kept from one to the next: the first use of fresh memory costs several times the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: _Tables = {}
        self._preparation: threading.Thread | None = None

    def prepare(self, snapshot: Snapshot, *, leader: bool) -> None:
        """Begin to fetch the memory for copies of such a snapshot, beside whatever else is done."""
        # No daemon: one that the end of Python meets inside torch would abort it.
        self._preparation = threading.Thread(
            target=self._fetch, args=(_tables_of(snapshot, leader),), name="staging", daemon=False
        )
        self._preparation.start()

    def take(self, snapshot: Snapshot, *, leader: bool) -> Snapshot:
        """Copy what this rank will write of a snapshot; it stays until the next call."""
        if self._preparation is not None:
            self._preparation.join()
            self._preparation = None
        tables = _tables_of(snapshot, leader)
        self._buffers = {
            group: {
                name: _fitting(self._buffers.get(group, {}).get(name), tensor)
                for name, tensor in table.items()
            }
            for group, table in tables.items()
        }
        for group, table in tables.items():
            for name, tensor in table.items():
                self._buffers[group][name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        kept = self._buffers
        return replace(
            snapshot, replicated=kept["replicated"], rows=kept["rows"], rank_state=kept["rank_state"]
        )

    def _fetch(self, tables: _Tables) -> None:
        for group, table in tables.items():
            for name, tensor in table.items():
                try:
                    buffer = _fitting(None, tensor)
                except RuntimeError:
                    return  # there is not enough: whoever takes a copy will say so
                # NumPy fills with one thread: torch's would stand in the way of those that train.
                buffer.view(-1).view(torch.uint8).numpy().fill(0)
                self._buffers.setdefault(group, {})[name] = buffer


def _tables_of(snapshot: Snapshot, leader: bool) -> _Tables:
    """Return what a rank writes of a snapshot, by the name of the field."""
    return {
        "replicated": snapshot.replicated if leader else {},
        "rows": snapshot.rows,
        "rank_state": snapshot.rank_state,
    }


def _fitting(buffer: Tensor | None, like: Tensor) -> Tensor:
    """Return the buffer, or where it cannot hold such a tensor a new one, page-locked for a GPU's."""
    if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
    return buffer
