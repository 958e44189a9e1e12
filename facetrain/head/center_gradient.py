"""Gradient of the class centers: of one chunk, as the backward pass leaves it, or summed over micro-batches."""

# S rows of a step   C classes of a chunk   D embedding   G gathered batch

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.device.page_locked import to_device
from facetrain.errors import UsageError
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
        self.finite: Tensor | bool = True
        """Whether loss and slopes of all micro-batches are finite; a scalar on the device after the first."""
        self._of_slices: dict[tuple[int, int], Tensor] = {}
        """Gradients (C, D) of consecutive rows, by their first one and the one after the last."""
        self._of_samples: list[tuple[np.ndarray, Tensor]] = []
        """Rows on the host, int64 (S,), and their gradients (S, D)."""

    def of_micro_batch(self, host_index_S: np.ndarray | None) -> Callable[[Rows, Gradient, Tensor], None]:
        """Return the function that adds the chunks of a micro-batch, in the order of their rows.

        `host_index_S` has the rows of the sample, int64 on the host; None: the rows are slices.
        """
        # Each micro-batch of a step adds its labels to the same drawn sample. Summed now, the gradients take the memory
        # of one sample; kept, of one sample per micro-batch.
        self._merge_samples()
        first = 0

        def add(rows: Rows, gradient: Gradient, finite: Tensor) -> None:
            """Add a chunk's gradient (S, D), which may be changed later, and whether loss and slopes are finite."""
            nonlocal first
            self.finite = finite & self.finite
            # An unfinished gradient lacks the targets of its micro-batch; the update that finishes it runs in the
            # backward pass only.
            assert isinstance(gradient, Tensor), "only finished gradients can be accumulated"
            if isinstance(rows, slice):
                bounds = rows.start, rows.stop
                if bounds in self._of_slices:
                    self._of_slices[bounds].add_(gradient)
                else:
                    self._of_slices[bounds] = gradient
                return
            assert host_index_S is not None, "rows by index are known on the host"
            self._of_samples.append((host_index_S[first : first + len(rows)], gradient))
            first += len(rows)

        return add

    def by_rows(self, device: torch.device) -> list[tuple[Rows, Tensor]]:
        """Return (rows, gradient) with every row at most once.

        Rows of samples are on `device`, gradients where they were computed.

        Raises:
            UsageError: the slices of the micro-batches differ.
        """
        if any(start < stop for (_, stop), (start, _) in pairwise(sorted(self._of_slices))):
            raise UsageError(
                "PartialFC: micro-batches of one step have different sizes, and their chunks other classes; give them "
                "one size, or the head a chunk_size"
            )
        self._merge_samples()
        return [
            *((slice(*bounds), gradient_CD) for bounds, gradient_CD in self._of_slices.items()),
            *((to_device(index_S, device), gradient_SD) for index_S, gradient_SD in self._of_samples),
        ]

    def _merge_samples(self) -> None:
        """Sum the gradients of samples, so that each row is there once."""
        # Each row must reach the optimizer once: two updates would apply momentum and weight decay twice.
        if len(self._of_samples) < 2:
            return
        unique, place = np.unique(
            np.concatenate([index for index, _ in self._of_samples]), return_inverse=True
        )
        parts, self._of_samples = [gradient_SD for _, gradient_SD in reversed(self._of_samples)], []
        device = parts[0].device
        total_SD = parts[0].new_zeros(len(unique), parts[0].shape[1])
        first = 0
        while parts:  # freed one by one
            gradient_SD = parts.pop()
            total_SD.index_add_(0, to_device(place[first : first + len(gradient_SD)], device), gradient_SD)
            first += len(gradient_SD)
        self._of_samples = [(unique, total_SD)]
