"""How many bytes of tensors exist at a time, counted operation by operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storage of every tensor that an operation makes, until the last tensor on it is gone.

    Works on real and on fake tensors: fake ones have shapes and lifetimes but no memory, so a network
    of any size is counted on any machine. Storage that existed before is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that exist."""
        self.peak = 0
        """The most that existed at a time."""
        self.moved = 0
        """Bytes of what operations read and wrote; what only looks at its arguments otherwise moves none."""
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made; what its arguments lie in was there before."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        if not func.is_view:
            self.moved += sum(_bytes(tensor) for tensor in tree_leaves((args, kwargs, result)))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.now -= size


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
