"""Private torch APIs that facetrain uses; the only module that may import them.

A new torch version may change them without notice, so each entry states the versions it was tested with, why no public
API does the same, and what is gained.

- `FakeTensorMode` (torch 2.11 to 2.13): tensors with shape and device but without memory. `facetrain plan` runs a
  training step on them to count its bytes and operations. The public `meta` device is not enough: autocast ignores
  tensors on it, so 16-bit steps would be counted in 32 bits. Gain: a forecast for any batch size without its memory.
- `TorchDispatchMode` (same versions): intercepts every operation, to follow which tensors exist at the same time.
  No public API reports that on the CPU. torch documents the class in its notes on extending PyTorch.
- `foreach_copy_` (`torch._foreach_copy_`, same versions): copies a list of tensors by a few kernels. The
  public `Tensor.copy_` launches one for each tensor: 300 in a step, for the statistics of an r100's batch norms.
- `onednn_linear` (`torch.ops.mkldnn._linear_pointwise`, same versions; None in a build without oneDNN): x·weightᵀ in
  float32 on a CPU by oneDNN, as torch.compile calls it. The public `torch.mm` calls MKL, which on AMD's processors does
  not use AVX-512. Gain on a Zen 4: 12 % of the CPU time of a step of the sampled head with 1 million identities.
- `tree_leaves` (same versions): the tensors in the nested arguments of an intercepted operation, in the order and
  with the containers that torch itself knows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "FakeTensorMode",
    "LiveBytes",
    "TorchDispatchMode",
    "foreach_copy_",
    "onednn_linear",
    "tree_leaves",
]

foreach_copy_ = torch._foreach_copy_


def _find_onednn_linear() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None

    def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, None, "none", [], "")
        return product

    return linear


onednn_linear = _find_onednn_linear()


class LiveBytes(TorchDispatchMode):
    """Counter of the storage of all tensors that operations create, until the last tensor on it is deleted.

    Works on real and on fake tensors: fake tensors have shapes and lifetimes but no memory, so a network of
    any size can be counted on any machine. Storage that existed before is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that exist now."""
        self.history: list[int] = []
        """Bytes that existed after each new storage."""
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @property
    def peak(self) -> int:
        """Largest number of bytes that existed at a time."""
        return max(self.history, default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storage that it created: storage of its arguments existed before."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.history.append(self.now)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.now -= size
