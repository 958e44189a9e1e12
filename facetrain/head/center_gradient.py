"""Gradient of the class centers: of one chunk, as the backward pass leaves it, or summed over micro-batches."""

# S rows of a step   C classes of a chunk   D embedding   G gathered batch

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.head.class_centers import Rows
from facetrain.head.sampling import to_device


class UnfinishedGradient(NamedTuple):
    """Gradient of a chunk's centers as the matrix product returns it.

    The update in one pass adds the contributions of the target classes and removes the component along each center.
    """

    product_CD: Tensor
    """In float32 or bfloat16."""
    target_grad_GD: Tensor
    """Contribution of each sample to the gradient of its target center; float32."""
    sample_G: Tensor
    """Samples in the order of their target centers, int64."""
    first_C1: Tensor
    """Samples `sample_G[first_C1[c] : first_C1[c + 1]]` have the target center c; int32 (C + 1,)."""


Gradient = Tensor | UnfinishedGradient


class ParameterGradient:
    """Gradient of a parameter that holds the centers, (K, D), filled chunk by chunk."""

    def __init__(self, weight: nn.Parameter, *, sparse: bool) -> None:
        """Take the parameter. `sparse`: rows that are selected by an index give a sparse gradient."""
        self.weight, self._sparse = weight, sparse
        self._chunks: list[tuple[Tensor, Tensor]] = []
        self._dense_KD: Tensor | None = None

    def add(self, rows: Rows, gradient: Gradient, finite: Tensor) -> None:
        """Take the gradient (C, D) of the rows of a chunk, of which every row is in one. `finite` is ignored."""
        assert isinstance(gradient, Tensor), "the update in one pass has no gradient"
        if self._sparse and isinstance(rows, Tensor):
            self._chunks.append((rows, gradient.to(self.weight.dtype)))
            return
        if self._dense_KD is None:
            # Slices fill all rows.
            new = torch.empty_like if isinstance(rows, slice) else torch.zeros_like
            self._dense_KD = new(self.weight, requires_grad=False)
        self._dense_KD[rows] = gradient.to(self.weight.dtype)

    def take(self) -> Tensor:
        """Return the gradient, and start again."""
        # Autograd copies a gradient, (K, D), to which there is another reference.
        chunks, self._chunks, dense_KD, self._dense_KD = self._chunks, [], self._dense_KD, None
        if self._sparse and dense_KD is None:
            # With a row of none: a rank of whose classes none takes part has a sparse gradient like the others.
            none = torch.empty(0, dtype=torch.int64, device=self.weight.device), self.weight.detach()[:0]
            index_S, gradient_SD = (torch.cat(parts) for parts in zip(none, *chunks, strict=True))
            return torch.sparse_coo_tensor(
                index_S[None], gradient_SD, self.weight.shape, is_coalesced=True, check_invariants=False
            )
        return torch.zeros_like(self.weight) if dense_KD is None else dense_KD


class AccumulatedGradient:
    """Gradient of rows, summed over micro-batches whose samples may differ. Slices are the same in all of them.

    Which rows are the same is decided on the host: the device has the rows too, but the host would wait for it.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def of_micro_batch(self, host_index_S: np.ndarray | None) -> Callable[[Rows, Gradient, Tensor], None]:
        """Return the function that adds the chunks of a micro-batch, in the order of their rows.

        `host_index_S` has the rows of the sample, int64 on the host; None: the rows are slices.
        """
        first = 0

        def add(rows: Rows, gradient: Gradient, finite: Tensor) -> None:
            """Add a chunk's gradient (S, D), which may be changed later. `finite` is ignored: `step` checks once."""
            nonlocal first
            # An unfinished gradient lacks the targets of its micro-batch; the update that finishes it runs in the
            # backward pass only.
            assert isinstance(gradient, Tensor), "only finished gradients can be accumulated"
            on_host: slice | np.ndarray
            if isinstance(rows, slice):
                on_host = rows
            else:
                assert host_index_S is not None, "rows by index are known on the host"
                on_host = host_index_S[first : first + len(rows)]
                first += len(rows)
            self._add(_Chunk(rows, on_host, gradient))

        return add

    def _add(self, chunk: _Chunk) -> None:
        for other in self._chunks:
            if _equal(chunk.on_host, other.on_host):
                other.gradient_SD.add_(chunk.gradient_SD)
                return
        # The first micro-batch of the step, or one whose labels have added other classes to the sample.
        self._chunks.append(chunk)

    def take(self) -> list[tuple[Rows, Tensor]]:
        """Return (rows, gradient) with every row at most once, and start again from zero."""
        chunks, self._chunks = self._chunks, []
        slices = sorted((rows.start, rows.stop) for rows, _, _ in chunks if isinstance(rows, slice))
        assert all(stop <= start for (_, stop), (start, _) in pairwise(slices)), "slices of a step overlap"
        if all(isinstance(rows, slice) for rows, _, _ in chunks) or len(chunks) <= 1:
            return [(rows, gradient) for rows, _, gradient in chunks]
        # Sampled micro-batches share most rows. Each row must reach the optimizer once: two updates would apply
        # momentum and weight decay twice.
        index = np.concatenate([rows for _, rows, _ in chunks if isinstance(rows, np.ndarray)])
        unique, place = np.unique(index, return_inverse=True)
        first = chunks[0].gradient_SD
        total = first.new_zeros(len(unique), first.shape[1])
        gradients = torch.cat([gradient for _, _, gradient in chunks])
        total.index_add_(0, to_device(place, first.device), gradients)
        return [(to_device(unique, first.device), total)]


class _Chunk(NamedTuple):
    rows: Rows
    on_host: slice | np.ndarray
    """The same rows."""
    gradient_SD: Tensor


def _equal(a: slice | np.ndarray, b: slice | np.ndarray) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return isinstance(a, slice) and isinstance(b, slice) and a == b
