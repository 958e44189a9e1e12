"""The state of a run as a checkpoint holds it, and its copy in host memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from facetrain.device.page_locked import page_locked
from facetrain.device.thread_device import use_device

_LARGE = 1 << 20
"""Bytes from which a tensor has page-locked memory of exactly its size. Smaller ones share torch's pool."""


@dataclass(frozen=True)
class ClassRows:
    """Tables of a range of classes: row i belongs to class `start` + i."""

    start: int
    stop: int
    tables: dict[str, Tensor]


@dataclass(frozen=True)
class TensorFile:
    """Tensors that a rank writes to one file of a checkpoint."""

    name: str
    tensors: dict[str, Tensor]
    start: int | None = None
    """First class of tables of class centers; None for other tensors."""
    stop: int | None = None
    """Class after the last one of such tables; None for other tensors."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step, as one rank holds it."""

    step: int
    replicated: dict[str, Tensor]
    """Tensors that are equal on all ranks; only the leader writes them."""
    rows: tuple[ClassRows, ...]
    """Tables of this rank's classes: one range for each head."""
    num_classes: int
    """Number of classes of all ranks and heads."""
    rank_state: dict[str, Tensor]
    """Tensors that differ between ranks, such as batch norm statistics."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest verification, by which the best checkpoint is kept."""
    copy_rows: bool = True
    """Whether `rows` may be copied to host memory. False where the tables themselves fill the host's
    memory or are on a disk."""

    def files(self, rank: int, world_size: int) -> list[TensorFile]:
        """Return the files that a rank writes."""
        files = []
        for number, rows in enumerate(self.rows):
            name = f"rows_{rank:05d}_of_{world_size:05d}" + (f"_head_{number}" if number else "")
            files.append(TensorFile(name, rows.tables, rows.start, rows.stop))
        files.append(TensorFile(f"rank_{rank:05d}", self.rank_state))
        return files + ([TensorFile("replicated", self.replicated)] if rank == 0 else [])


class HostCopy:
    """Reused host memory for the copy of the tensors of a snapshot.

    The first use of fresh memory costs several times the copy itself (page faults, and page-locking for
    a GPU), so the buffers are kept from one save to the next.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._preparation: threading.Thread | None = None

    def prepare(self, files: list[TensorFile]) -> None:
        """Start to allocate the buffers for such files in a thread."""
        # Not a daemon thread: Python aborts if it exits while a daemon thread is inside torch.
        self._preparation = threading.Thread(
            target=self._allocate, args=(files,), name="checkpoint-buffers", daemon=False
        )
        self._preparation.start()

    def take(self, files: list[TensorFile]) -> list[TensorFile]:
        """Return a copy of the files' tensors. It is valid until the next call.

        Raises:
            RuntimeError: torch cannot allocate the memory, or cannot page-lock it.
        """
        if self._preparation is not None:
            # The buffers of the first save are being allocated; to allocate them twice would take longer.
            self._preparation.join()
            self._preparation = None
        # A tensor that is new, or has another shape, gets a new buffer; the others keep theirs.
        self._buffers = {
            (file.name, name): _buffer_like(tensor, self._buffers.get((file.name, name)))
            for file in files
            for name, tensor in file.tensors.items()
        }
        # All copies are queued, then awaited once: page-locked memory lets the GPU copy them without the host.
        for file in files:
            for name, tensor in file.tensors.items():
                self._buffers[file.name, name].copy_(tensor.detach(), non_blocking=True)
        # Not for a run on the CPU: this would start CUDA, with half a gigabyte on a GPU that others use.
        if device := _gpu_of(files):
            # Training changes the tensors after this call: all copies must have ended.
            torch.cuda.synchronize(device)
        return [
            replace(file, tensors={name: self._buffers[file.name, name] for name in file.tensors})
            for file in files
        ]

    def _allocate(self, files: list[TensorFile]) -> None:
        if device := _gpu_of(files):
            use_device(device)
        for file in files:
            for name, tensor in file.tensors.items():
                try:
                    buffer = _buffer_like(tensor, None)
                except RuntimeError:
                    return  # not enough memory: `take` raises the same error, where it can be reported
                # Touch every page. NumPy fills with one thread; torch's `fill_` would take the cores of the training.
                buffer.view(-1).view(torch.uint8).numpy().fill(0)
                self._buffers[file.name, name] = buffer


def _gpu_of(files: list[TensorFile]) -> torch.device | None:
    """Return the GPU that the files' tensors are on; a rank has one at most."""
    return next((tensor.device for file in files for tensor in file.tensors.values() if tensor.is_cuda), None)


def _buffer_like(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    """Return the buffer if it has the shape and dtype of a tensor, else a new one, page-locked for a GPU tensor."""
    if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
        return buffer
    if tensor.is_cuda and tensor.nbytes >= _LARGE:
        return page_locked(tensor.shape, tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
