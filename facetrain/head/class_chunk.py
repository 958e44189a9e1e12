"""Logits and gradients of one chunk of classes: the part of the head whose memory is O(batch · chunk)."""

# G gathered batch   D embedding   C classes of the chunk   P statistics per sample

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from facetrain.device.capability import can_run_kernels
from facetrain.head import softmax
from facetrain.head.center_gradient import UnfinishedGradient
from facetrain.head.margins.base import Margin
from facetrain.head.target import TargetClass
from facetrain.torch_private import onednn_linear

if TYPE_CHECKING:
    from facetrain.head.kernels.margin_softmax import LogitFactors


class BackwardInputs(NamedTuple):
    """Inputs of the backward pass that are the same for all chunks."""

    weighted_GD: Tensor
    """Unit embeddings times the derivative of the step's loss by each sample's loss, times the scale; product dtype."""
    target_grad_GD: Tensor
    """Contribution of each sample to the gradient of its target center."""
    target_order: tuple[Tensor, Tensor] | None
    """Samples in the order of their target classes, int64 (G,), and where in it those of each class begin, int32
    (S + 1,). For `Chunk.unfinished_gradients`."""


class Chunk:
    """Logits (G, C) of the gathered batch to one chunk of classes, recomputed in the backward pass."""

    is_bounded: ClassVar[bool] = False
    """Whether exp of the logits needs no running maximum, see `BoundedChunk`."""

    def __init__(
        self,
        unit_GD: Tensor,
        weight_CD: Tensor,
        target: TargetClass,
        margin: Margin,
        start: int,
        inverse_norm_C: Tensor,
        *,
        has_norms: bool,
    ) -> None:
        """Take the factor of the embeddings (`factor_of`), and centers; `start` is the chunk's first position.

        `inverse_norm_C` has 1 / |w| of each center if `has_norms`; otherwise it is written.
        """
        self._start, self._stop = start, start + len(weight_CD)
        self._target, self._margin, self._unit_GD = target, margin, unit_GD
        self._weight_CD, self._inverse_norm_C = weight_CD, inverse_norm_C
        self._factor_CD = self._center_factor() if has_norms else self._norms_and_factor()
        """The centers as the products take them."""

    @staticmethod
    def factor_of(unit_GD: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Return what all chunks multiply with their centers: the unit embeddings in the dtype of the products."""
        return unit_GD.to(dtype)

    def _norms_and_factor(self) -> Tensor:
        """Write the inverse norms; return the factor."""
        # In the embeddings' precision for bfloat16 centers, too: a norm that is rounded to 8 bits would change all
        # logits of a class by up to 0.2 %. A center of zeros gets the cosine 0, not NaN.
        norm_C = self._inverse_norm_C
        torch.linalg.vector_norm(self._weight_CD, dim=1, dtype=norm_C.dtype, out=norm_C)
        norm_C.clamp_min_(1e-12).reciprocal_()
        return self._center_factor()

    def _center_factor(self) -> Tensor:
        return self._weight_CD.to(self._unit_GD.dtype)

    @functools.cached_property
    def _targets(self) -> tuple[Tensor, Tensor]:
        """Whether each sample's target class is in this chunk, and its column; any column, if it is not."""
        return self._target.columns(self._start, self._stop)

    def add_to(self, statistics_PG: Tensor) -> Tensor:
        """Return the loss's statistics with this chunk's negatives added."""
        return softmax.add_chunk(statistics_PG, self._logits()[0])

    def slopes(self, log_total_G: Tensor) -> Tensor:
        """Return the derivative of each sample's loss by its negatives' logits, over the center's norm.

        (G, C) in the product dtype: the factor of both products of the backward pass. `log_total_G` is the logarithm of
        the softmax's denominator.
        """
        logit_GC, factor_GC = self._logits()
        slope_GC = softmax.negative_slope_(logit_GC, log_total_G)
        if factor_GC is not None:
            slope_GC.mul_(factor_GC)
        # cos = e·w / |w|: both gradients have the factor 1 / |w|. It is multiplied in before the slopes are rounded to
        # 16 bits, so that each of them is rounded once.
        return slope_GC.mul_(self._inverse_norm_C).to(self._unit_GD.dtype)

    def embedding_gradient(self, slope_GC: Tensor) -> Tensor:
        """Return this chunk's part of the embeddings' gradient (G, D), without a factor per sample."""
        return product(slope_GC, self._factor_CD)

    def gradients(self, slope_GC: Tensor, inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
        """Return this chunk's part of the embeddings' gradient (G, D), and the centers' gradient (C, D).

        The former still lacks a factor per sample, which is the same for all chunks.
        """
        grad_GD = self.embedding_gradient(slope_GC)
        grad_CD = self._center_product(slope_GC, inputs.weighted_GD).to(self._inverse_norm_C.dtype)
        # Samples whose target class is not in this chunk add 0 to an arbitrary row.
        inside_G, column_G = self._targets
        grad_CD.index_add_(0, column_G, torch.where(inside_G[:, None], inputs.target_grad_GD, 0))
        # cos = e·w/|w| does not depend on |w|: remove the gradient's component along w.
        weight_CD = self._weight_CD.to(grad_CD.dtype)
        along_C = torch.linalg.vecdot(grad_CD, weight_CD)
        return grad_GD, grad_CD.addcmul_(weight_CD, (along_C * self._inverse_norm_C**2)[:, None], value=-1)

    def unfinished_gradients(
        self, slope_GC: Tensor, inputs: BackwardInputs
    ) -> tuple[Tensor, UnfinishedGradient]:
        """Return the embeddings' gradient and the unprojected gradient of the centers; the fused update finishes it."""
        assert inputs.target_order is not None, "the update needs the samples in the order of their targets"
        grad_GD = self.embedding_gradient(slope_GC)
        product_CD = self._center_product(slope_GC, inputs.weighted_GD)
        # The samples of a center are between two neighbors of `first_C1`: the kernel needs no atomic additions, whose
        # order would change from run to run.
        sample_G, first_S1 = inputs.target_order
        first_C1 = first_S1[self._start : self._stop + 1]
        return grad_GD, UnfinishedGradient(product_CD, inputs.target_grad_GD, sample_G, first_C1)

    def _center_product(self, slope_GC: Tensor, weighted_GD: Tensor) -> Tensor:
        return product(slope_GC.T, weighted_GD)

    def _logits(self) -> tuple[Tensor, Tensor | None]:
        """Return the negatives' logits (−∞ for targets), and the margin's factor on their derivatives; None: 1."""
        logit_GC = product(self._unit_GD, self._factor_CD.T).to(self._inverse_norm_C.dtype)
        # Scaled by columns after the product: unit centers would be a second table of the size of the chunk.
        logit_GC.mul_(self._inverse_norm_C * self._margin.scale)
        # Before the targets are taken out: a margin may compare negatives with the target, and −∞ passes through no
        # formula.
        factor_GC = self._margin.change_negatives_(logit_GC, self._target.cos_G)
        self._leave_targets_out_(logit_GC)
        return logit_GC, factor_GC

    def _leave_targets_out_(self, logit_GC: Tensor) -> None:
        # Write one column of every sample, with the value it has if the target is not here. To select only the samples
        # whose target is here, the host would have to wait for the GPU to count them.
        inside_G1, column_G1 = (each[:, None] for each in self._targets)
        present_G1 = logit_GC.gather(1, column_G1)
        logit_GC.scatter_(1, column_G1, torch.where(inside_G1, -torch.inf, present_G1))


class BoundedChunk(Chunk):
    """The same chunk where exp(z) of each negative is a normal number, see `_is_bounded`.

    The derivative by a negative's logit is exp(z) / Σ exp z. Both products of the backward pass multiply exp(z) itself,
    and the denominator, a factor per sample, is multiplied in before and after them. So exp(z) can be kept from the
    forward pass: a step then has three large products and not four.
    """

    is_bounded: ClassVar[bool] = True

    @staticmethod
    def factor_of(unit_GD: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Return the unit embeddings times the scale, in the dtype of the products."""
        return (unit_GD * scale).to(dtype)

    def add_to(self, statistics_PG: Tensor) -> Tensor:
        """Return the loss's statistics with this chunk's negatives added."""
        return self.exponentials(statistics_PG)[0]

    def slopes(self, log_total_G: Tensor) -> Tensor:
        """Return exp(z), as `exponentials` does: the slopes before the division by the softmax's denominator."""
        return self._over_norms(self._masked_logits()[0].exp_())

    def exponentials(self, statistics_PG: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics with this chunk's negatives added, and exp(z), (G, C) in the product dtype.

        The latter is 0 for target and filtered classes; in float32 it is divided by |w|.
        """
        logit_GC, filtered_G = self._masked_logits()
        largest_G, total_G = statistics_PG.unbind()
        largest_G = torch.maximum(largest_G, logit_GC.amax(1).to(largest_G.dtype))
        exponential_GC = logit_GC.exp_()
        total_G = total_G + exponential_GC.sum(1, dtype=total_G.dtype)
        if filtered_G is not None:
            total_G += filtered_G  # each of them has the logit 0
        return torch.stack([largest_G, total_G]), self._over_norms(exponential_GC)

    def _masked_logits(self) -> tuple[Tensor, Tensor | None]:
        """Return the negatives' logits, −∞ for targets and filtered ones; and how many are filtered, or None."""
        logit_GC = self._over_norms(product(self._unit_GD, self._factor_CD.T))
        self._leave_targets_out_(logit_GC)
        if not self._margin.filter_threshold:
            return logit_GC, None
        is_noise_GC = logit_GC > self._margin.filter_threshold * self._margin.scale
        return logit_GC.masked_fill_(is_noise_GC, -torch.inf), is_noise_GC.sum(1)

    def _over_norms(self, number_GC: Tensor) -> Tensor:
        """Divide by the norms of the centers, in place, unless the product has had unit centers."""
        return number_GC if self._has_unit_centers else number_GC.mul_(self._inverse_norm_C)

    @property
    def _has_unit_centers(self) -> bool:
        # In 16 bits, the copy of the centers is of unit ones: their norms cost no further pass then.
        return self._unit_GD.dtype.itemsize < self._target.cos_G.dtype.itemsize

    def _center_factor(self) -> Tensor:
        if not self._has_unit_centers:
            return super()._center_factor()
        narrow_CD = torch.empty_like(self._weight_CD, dtype=self._unit_GD.dtype)
        return torch.mul(self._weight_CD, self._inverse_norm_C[:, None], out=narrow_CD)

    def _center_product(self, slope_GC: Tensor, weighted_GD: Tensor) -> Tensor:
        product_CD = super()._center_product(slope_GC, weighted_GD)
        if not self._has_unit_centers:
            return product_CD
        # Converted first: on a CPU, a product of two dtypes takes 25 times as long.
        return product_CD.to(self._inverse_norm_C.dtype).mul_(self._inverse_norm_C[:, None])


class FusedChunk(BoundedChunk):
    """The same chunk computed by Triton kernels that never write a logit to memory; see `fused_chunks_available`."""

    # The kernels are imported inside the methods, because Triton may be absent on other devices.

    def add_to(self, statistics_PG: Tensor) -> Tensor:
        """Return the loss's statistics with this chunk's negatives added."""
        from facetrain.head.kernels.margin_softmax import add_statistics

        return add_statistics(statistics_PG, self._logit_factors())

    def exponentials(self, statistics_PG: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics with this chunk's negatives added, and exp(z)/|w|, (G, C)."""
        from facetrain.head.kernels.margin_softmax import add_and_keep

        return add_and_keep(statistics_PG, self._logit_factors())

    def slopes(self, log_total_G: Tensor) -> Tensor:
        """Return exp(z)/|w|, as `exponentials` does."""
        from facetrain.head.kernels.margin_softmax import exponentials

        return exponentials(self._logit_factors())

    def _norms_and_factor(self) -> Tensor:
        if self._weight_CD.dtype == self._unit_GD.dtype:
            return super()._norms_and_factor()
        from facetrain.head.kernels.margin_softmax import narrowed

        return narrowed(self._weight_CD, self._unit_GD.dtype, self._inverse_norm_C)

    @property
    def _has_unit_centers(self) -> bool:
        # The kernels divide by the norms, so that centers that are stored in 16 bits need no copy.
        return False

    def _logit_factors(self) -> LogitFactors:
        from facetrain.head.kernels.margin_softmax import LogitFactors

        threshold = self._margin.filter_threshold
        return LogitFactors(
            self._unit_GD,
            self._factor_CD,
            self._inverse_norm_C,
            self._target.position_G,
            self._start,
            threshold * self._margin.scale if threshold else math.inf,
        )


def plain_chunk_type(margin: Margin) -> type[Chunk]:
    """Return how PyTorch's operations compute the chunks: without a running maximum where the logits permit it."""
    return BoundedChunk if _is_bounded(margin) else Chunk


def fused_chunks_available(device: torch.device, margin: Margin, product_dtype: torch.dtype | None) -> bool:
    """Return whether the Triton kernels can compute this head here.

    They need a GPU of compute capability 8.0 or higher, products in bfloat16, since the matrix library is faster at
    float32 products, and logits that are bounded.
    """
    return product_dtype == torch.bfloat16 and _is_bounded(margin) and can_run_kernels(device)


def _is_bounded(margin: Margin) -> bool:
    """Return whether exp(z) of all negatives is a normal number, as |z| ≤ scale where the margin leaves them alone."""
    return not margin.changes_negatives and margin.scale <= softmax.LARGEST_SCALE


def default_chunk_size(global_batch: int, embedding_size: int, device_type: str) -> int:
    """Return the classes per chunk.

    On CUDA a chunk has 2^26 logits, enough to occupy the device, but centers of 2^28 numbers at most: with a small
    batch, the centers and their gradient need the memory. On a CPU a chunk's logits (held twice), centers, momentum and
    gradient together have 2^22 numbers, which fit into the last-level cache.
    """
    if device_type == "cuda":
        # A multiple, so that the rows of all chunks are aligned in memory.
        return max(min((1 << 26) // global_batch, (1 << 28) // embedding_size) // 128, 1) * 128
    return max((1 << 22) // (2 * global_batch + 3 * embedding_size), 128)


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a·b, (M, N); on a CPU in float32 by oneDNN.

    torch gives float32 products on a CPU to MKL, which on AMD's processors does not use AVX-512: half the speed of
    oneDNN's kernels, which are in the same build. Both compute with the same float32 multiply-adds, in another order;
    on Intel's processors they are equally fast.
    """
    if (
        onednn_linear is None
        or a_MK.dtype != torch.float32
        or a_MK.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
    ):
        return a_MK @ b_KN
    # oneDNN reads its first factor by rows: a copy costs less than its slow kernel for columns.
    return onednn_linear(a_MK.contiguous(), b_KN.T)
