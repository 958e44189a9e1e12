"""What a checkpoint is made from, and the copy of it that is written while training goes on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


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

    It is kept from one to the next: the first use of fresh memory costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, snapshot: Snapshot, *, leader: bool) -> Snapshot:
        """Copy what this rank will write of a snapshot; it stays until the next call."""
        kept, self._buffers = self._buffers, {}
        copy = replace(
            snapshot,
            replicated=self._copied("replicated", snapshot.replicated, kept) if leader else {},
            rows=self._copied("rows", snapshot.rows, kept),
            rank_state=self._copied("rank", snapshot.rank_state, kept),
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy

    def _copied(self, group: str, tensors: dict[str, Tensor], kept: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            buffer = kept.get(f"{group}/{name}")
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[f"{group}/{name}"] = buffer
            copies[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        return copies
