"""Gradient of the class centers: of one chunk, as the backward pass leaves it, or summed over micro-batches."""

# S rows of a step   C classes of a chunk   D embedding   G gathered batch

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from facetrain.head.class_centers import Rows


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


class ParameterGradient:
    """Gradient of a parameter that holds the centers, (K, D), filled chunk by chunk."""

    def __init__(self, weight: nn.Parameter, *, sparse: bool) -> None:
        """Take the parameter. `sparse`: rows that are selected by an index give a sparse gradient."""
        self.weight, self._sparse = weight, sparse
        self._chunks: list[tuple[Tensor, Tensor]] = []
        self._dense_KD: Tensor | None = None

    def add(self, rows: Rows, gradient: Tensor | UnfinishedGradient, finite: Tensor) -> None:
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
        if chunks:
            index_S, gradient_SD = (torch.cat(parts) for parts in zip(*chunks, strict=True))
            return torch.sparse_coo_tensor(
                index_S[None], gradient_SD, self.weight.shape, is_coalesced=True, check_invariants=False
            )
        return torch.zeros_like(self.weight) if dense_KD is None else dense_KD


class AccumulatedGradient:
    """Gradient of rows, summed over micro-batches whose samples may differ. Slices are the same in all of them."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Rows, Tensor]] = []

    def add(self, rows: Rows, gradient: Tensor | UnfinishedGradient, finite: Tensor) -> None:
        """Add a chunk's gradient (S, D), which may be changed later. `finite` is ignored: `step` checks all at once."""
        # An unfinished gradient lacks the targets of its micro-batch; the update that finishes it runs in the backward
        # pass only.
        assert isinstance(gradient, Tensor), "only finished gradients can be accumulated"
        for number, (others, total) in enumerate(self._chunks):
            if _equal(rows, others):
                self._chunks[number] = (others, total.add_(gradient))
                return
        # The first micro-batch of the step, or one whose labels have added other classes to the sample.
        self._chunks.append((rows, gradient))

    def take(self) -> list[tuple[Rows, Tensor]]:
        """Return (rows, gradient) with every row at most once, and start again from zero."""
        chunks, self._chunks = self._chunks, []
        slices = sorted((rows.start, rows.stop) for rows, _ in chunks if isinstance(rows, slice))
        assert all(stop <= start for (_, stop), (start, _) in pairwise(slices)), "slices of a step overlap"
        if all(isinstance(rows, slice) for rows, _ in chunks) or len(chunks) <= 1:
            return chunks
        # Sampled micro-batches share most rows. Each row must reach the optimizer once: two updates would apply
        # momentum and weight decay twice.
        index = torch.cat([rows for rows, _ in chunks if isinstance(rows, Tensor)])
        unique, place = index.unique(return_inverse=True)
        total = chunks[0][1].new_zeros(len(unique), chunks[0][1].shape[1])
        total.index_add_(0, place, torch.cat([gradient for _, gradient in chunks]))
        return [(unique, total)]


def _equal(a: Rows, b: Rows) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return isinstance(a, slice) and isinstance(b, slice) and a == b
