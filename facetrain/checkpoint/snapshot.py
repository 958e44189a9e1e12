"""The state of a run as a checkpoint holds it, and its copy in host memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from facetrain.device.page_locked import page_locked

_LARGE = 1 << 20
"""Bytes from which a tensor has page-locked memory of exactly its size. Smaller ones share torch's pool."""
_Tables = dict[str, dict[str, Tensor]]
"""Field of the snapshot (with the number of one of `further_rows`) -> name -> tensor."""


@dataclass(frozen=True)
class ClassRows:
    """Tables of a range of classes: row i belongs to class `start` + i."""

    start: int
    stop: int
    tables: dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step, as one rank holds it."""

    step: int
    replicated: dict[str, Tensor]
    """Tensors that are equal on all ranks; only the leader writes them."""
    rows: dict[str, Tensor]
    """Tables of this rank's classes: row i belongs to class `shard[0]` + i."""
    shard: tuple[int, int]
    """This rank's classes, [start, stop)."""
    num_classes: int
    """Number of classes of all ranks."""
    rank_state: dict[str, Tensor]
    """Tensors that differ between ranks: random states, batch-norm statistics."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest verification, by which the best checkpoint is kept."""
    further_rows: tuple[ClassRows, ...] = ()
    """Further ranges of this rank's classes: those of the other heads, if there is one per dataset."""
    copy_rows: bool = True
    """Whether `rows` may be copied to host memory. False where the tables themselves fill the host's
    memory or are on a disk."""


class HostCopy:
    """Reused host memory for the copy of a snapshot.

    The first use of fresh memory costs several times the copy itself (page faults, and page-locking for
    a GPU), so the buffers are kept from one save to the next.
    """

    def __init__(self) -> None:
        self._buffers: _Tables = {}
        self._preparation: threading.Thread | None = None

    def prepare(self, snapshot: Snapshot, *, leader: bool) -> None:
        """Start to allocate the buffers for such snapshots in a thread."""
        # Not a daemon thread: Python aborts if it exits while a daemon thread is inside torch.
        self._preparation = threading.Thread(
            target=self._allocate,
            args=(_tables_to_write(snapshot, leader),),
            name="checkpoint-buffers",
            daemon=False,
        )
        self._preparation.start()

    def take(self, snapshot: Snapshot, *, leader: bool) -> Snapshot:
        """Return a copy of the tensors that this rank writes. It is valid until the next call.

        Raises:
            RuntimeError: torch cannot allocate the memory, or cannot page-lock it.
        """
        if self._preparation is not None:
            self._preparation.join()
            self._preparation = None
        tables = _tables_to_write(snapshot, leader)
        self._buffers = {
            group: {
                name: _buffer_like(tensor, self._buffers.get(group, {}).get(name))
                for name, tensor in table.items()
            }
            for group, table in tables.items()
        }
        # All copies are queued, then awaited once: page-locked memory lets the GPU copy them without the host.
        for group, table in tables.items():
            for name, tensor in table.items():
                self._buffers[group][name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            # Training changes the tensors after this call: all copies must have ended.
            torch.cuda.synchronize()
        copied = self._buffers
        further = tuple(
            replace(rows, tables=copied[_further(number)])
            for number, rows in enumerate(snapshot.further_rows)
        )
        return replace(
            snapshot,
            replicated=copied["replicated"],
            rows=copied["rows"],
            rank_state=copied["rank_state"],
            further_rows=further,
        )

    def _allocate(self, tables: _Tables) -> None:
        tensors = (tensor for table in tables.values() for tensor in table.values())
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:
            # Each thread has a current device, at first GPU 0: page-locking there would create a context on it.
            torch.cuda.set_device(device)
        for group, table in tables.items():
            for name, tensor in table.items():
                try:
                    buffer = _buffer_like(tensor, None)
                except RuntimeError:
                    return  # not enough memory: `take` raises the same error, where it can be reported
                # Touch every page. NumPy fills with one thread; torch's `fill_` would take the cores of the training.
                buffer.view(-1).view(torch.uint8).numpy().fill(0)
                self._buffers.setdefault(group, {})[name] = buffer


def _tables_to_write(snapshot: Snapshot, leader: bool) -> _Tables:
    """Return the tensors of a snapshot that a rank writes."""
    return {
        "replicated": snapshot.replicated if leader else {},
        "rows": snapshot.rows,
        **{_further(number): rows.tables for number, rows in enumerate(snapshot.further_rows)},
        "rank_state": snapshot.rank_state,
    }


def _further(number: int) -> str:
    return f"further_rows.{number}"


def _buffer_like(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    """Return the buffer if it has the shape and dtype of a tensor, else a new one, page-locked for a GPU tensor."""
    if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
        return buffer
    if tensor.is_cuda and tensor.numel() * tensor.element_size() >= _LARGE:
        return page_locked(tensor.shape, tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
