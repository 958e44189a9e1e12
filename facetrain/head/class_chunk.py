"""Logits and gradients of one chunk of classes: the part of the head whose memory is O(batch · chunk)."""

# G gathered batch   D embedding   C classes of the chunk   N sub-centers of a class   R = C·N centers
# P statistics per sample

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from facetrain.device.capability import can_run_kernels
from facetrain.head.center_gradient import UnfinishedGradient
from facetrain.head.losses import Softmax
from facetrain.head.margins.base import Margin
from facetrain.head.products import product, product_with_transposed, transposed_product
from facetrain.head.target import TargetClass

if TYPE_CHECKING:
    from facetrain.head.kernels.margin_softmax import LogitFactors


class BackwardInputs(NamedTuple):
    """Inputs of the backward pass that are the same for all chunks."""

    weighted_GD: Tensor
    """Unit embeddings times the derivative of the step's loss by each sample's loss, times the scale; product dtype."""
    target_grad_GD: Tensor
    """Contribution of each sample to the gradient of its target center."""
    target_order: TargetOrder | None = None
    """For `Chunk.unfinished_gradients`."""


class TargetOrder(NamedTuple):
    """Samples in the order of their target centers, so that the samples of a center are neighbors."""

    center_G: Tensor
    """Target centers, ascending, counted over all centers of the step; negative for those on other ranks. int64."""
    sample_G: Tensor
    """The samples that have them. int64."""


def order_targets(target: TargetClass, sub_centers: int) -> TargetOrder:
    """Return the samples in the order of their target centers."""
    # Stable, so that samples of one center are always added in the same order.
    center_G, sample_G = (target.position_G * sub_centers + target.nearest_G).sort(stable=True)
    return TargetOrder(center_G, sample_G)


class Chunk:
    """Logits (G, C) of the gathered batch to one chunk of classes, recomputed in the backward pass.

    A class with sub-centers has the logit of the nearest one, and the gradient goes to that one alone (Deng et al.,
    "Sub-center ArcFace", ECCV 2020, equation 3).
    """

    def __init__(
        self,
        unit_GD: Tensor,
        weight_CX: Tensor,
        target: TargetClass,
        margin: Margin,
        start: int,
        inverse_norm_R: Tensor | None = None,
    ) -> None:
        """Take unit embeddings in the product dtype, and centers (C, N·D); `start` is the chunk's first position.

        `inverse_norm_R` is 1 / |w| of an earlier chunk of the same centers; None: it is computed.
        """
        self._start = start
        self._target, self._margin, self._unit_GD = target, margin, unit_GD
        self._num_classes = len(weight_CX)
        self._weight_RD = weight_CX.reshape(-1, unit_GD.shape[1])
        self._factor_RD = self._weight_RD.to(unit_GD.dtype)
        if inverse_norm_R is None:
            # In the embeddings' precision for bfloat16 centers, too: a norm that is rounded to 8 bits would change all
            # logits of a class by up to 0.2 %. A center of zeros gets the cosine 0, not NaN.
            norm_R = torch.linalg.vector_norm(self._weight_RD, dim=1, dtype=target.cos_G.dtype)
            inverse_norm_R = norm_R.clamp_min_(1e-12).reciprocal_()
        self.inverse_norm_R = inverse_norm_R
        """1 / |w| of each center."""
        self._inside_G, self._column_G = target.columns(start, start + self._num_classes)

    def store_inverse_norms(self, into_R: Tensor) -> None:
        """Write 1 / |w| of each center to its place in a tensor for all chunks of a step.

        One small tensor per chunk, kept until the backward pass, would lie between the large ones of the chunks: the
        C library could then not use their memory again, and the peak of a step grew by up to a quarter of the tables.
        """
        first = self._start * (len(self.inverse_norm_R) // self._num_classes)
        into_R[first : first + len(self.inverse_norm_R)] = self.inverse_norm_R

    def add_to(self, statistics_PG: Tensor, loss: Softmax) -> Tensor:
        """Return the loss's statistics with this chunk's negatives added."""
        return loss.add_chunk(statistics_PG, self._logits()[0])

    def slopes(self, loss: Softmax, joined_G: Tensor) -> Tensor:
        """Return the derivative of each sample's loss by its negatives' logits, over the center's norm.

        (G, R) in the product dtype: the factor of both products of the backward pass.
        """
        logit_GC, factor_GC, nearest_GC1 = self._logits()
        slope_GC = loss.negative_slope_(logit_GC, joined_G)
        if factor_GC is not None:
            slope_GC.mul_(factor_GC)
        # cos = e·w / |w|: both gradients have the factor 1 / |w|. It is multiplied in before the slopes are rounded to
        # 16 bits, so that each of them is rounded once.
        slope_GR = self._spread(slope_GC, nearest_GC1)
        return slope_GR.mul_(self.inverse_norm_R).to(self._unit_GD.dtype)

    def embedding_gradient(self, slope_GR: Tensor) -> Tensor:
        """Return this chunk's part of the embeddings' gradient (G, D), without a factor per sample."""
        return product(slope_GR, self._factor_RD)

    def gradients(self, slope_GR: Tensor, inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
        """Return this chunk's part of the embeddings' gradient (G, D), and the centers' gradient (C, N·D).

        The former still lacks a factor per sample, which is the same for all chunks.
        """
        grad_GD = self.embedding_gradient(slope_GR)
        grad_RD = transposed_product(slope_GR, inputs.weighted_GD).to(self.inverse_norm_R.dtype)
        # Samples whose target class is not in this chunk add 0 to an arbitrary row.
        row_G = self._column_G * (len(grad_RD) // self._num_classes) + self._target.nearest_G
        grad_RD.index_add_(0, row_G, torch.where(self._inside_G[:, None], inputs.target_grad_GD, 0))
        # cos = e·w/|w| does not depend on |w|: remove the gradient's component along w.
        weight_RD = self._weight_RD.to(grad_RD.dtype)
        along_R = torch.linalg.vecdot(grad_RD, weight_RD)
        grad_RD.addcmul_(weight_RD, (along_R * self.inverse_norm_R**2)[:, None], value=-1)
        return grad_GD, grad_RD.view(self._num_classes, -1)

    def unfinished_gradients(
        self, slope_GR: Tensor, inputs: BackwardInputs
    ) -> tuple[Tensor, UnfinishedGradient]:
        """Return the embeddings' gradient and the unprojected gradient of the centers; the fused update finishes it."""
        assert inputs.target_order is not None, "the update needs the samples in the order of their targets"
        grad_GD = self.embedding_gradient(slope_GR)
        product_RD = transposed_product(slope_GR, inputs.weighted_GD)
        # The samples are sorted by their target centers, so the samples of a center are between two neighbors of
        # `first_R1`: the kernel needs no atomic additions, whose order would change from run to run.
        first = self._start * (len(product_RD) // self._num_classes)
        centers_R1 = torch.arange(first, first + len(product_RD) + 1, device=product_RD.device)
        first_R1 = torch.searchsorted(inputs.target_order.center_G, centers_R1, out_int32=True)
        rest = inputs.target_grad_GD, inputs.target_order.sample_G, first_R1
        return grad_GD, UnfinishedGradient(product_RD, *rest)

    def _logits(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the negatives' logits (−∞ for targets), the margin's factor on their derivatives, and sub-centers."""
        logit_GR = product_with_transposed(self._unit_GD, self._factor_RD).to(self.inverse_norm_R.dtype)
        # Scaled by columns after the product: unit centers would be a second table of the size of the chunk.
        logit_GC, nearest_GC1 = self._nearest(logit_GR.mul_(self.inverse_norm_R * self._margin.scale))
        # Before the targets are taken out: a margin may compare negatives with the target, and −∞ passes through no
        # formula.
        factor_GC = self._margin.change_negatives_(logit_GC, self._target.cos_G)
        # Write one column of every sample, with the value it has if the target is not here. To select only the samples
        # whose target is here, the host would have to wait for the GPU to count them.
        column_G1, inside_G1 = self._column_G[:, None], self._inside_G[:, None]
        present_G1 = logit_GC.gather(1, column_G1)
        logit_GC.scatter_(1, column_G1, torch.where(inside_G1, -torch.inf, present_G1))
        return logit_GC, factor_GC, nearest_GC1

    def _nearest(self, logit_GR: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logit of each class, and the sub-center that it comes from; None: one center per class."""
        logit_GCN = logit_GR.unflatten(1, (self._num_classes, -1))
        if logit_GCN.shape[2] == 1:
            return logit_GR, None
        # Also in the backward pass, from the same logits: the sub-center that gave the logit gets the gradient.
        nearest_GC1 = logit_GCN.argmax(2, keepdim=True)
        return logit_GCN.gather(2, nearest_GC1)[..., 0], nearest_GC1

    def _spread(self, slope_GC: Tensor, nearest_GC1: Tensor | None) -> Tensor:
        """Return slopes (G, R): each class's slope at the sub-center of its logit, 0 at the others."""
        if nearest_GC1 is None:
            return slope_GC
        sub_centers = len(self._weight_RD) // self._num_classes
        slope_GCN = slope_GC.new_zeros(*slope_GC.shape, sub_centers)
        return slope_GCN.scatter_(2, nearest_GC1, slope_GC[..., None]).flatten(1)


class FusedChunk(Chunk):
    """The same chunk computed by Triton kernels that never write a logit to memory.

    For CUDA and one center per class; see `fused_chunks_available`.
    """

    # The kernels are imported inside the methods, because Triton may be absent on other devices.

    def add_to(self, statistics_PG: Tensor, loss: Softmax) -> Tensor:
        """Return the loss's statistics with this chunk's negatives added."""
        from facetrain.head.kernels.margin_softmax import add_statistics

        return add_statistics(statistics_PG, self._logit_factors())

    def slopes(self, loss: Softmax, joined_G: Tensor) -> Tensor:
        """Return the derivative of each sample's loss by its negatives' logits, over the center's norm; (G, C)."""
        from facetrain.head.kernels.margin_softmax import slopes

        return slopes(joined_G, self._logit_factors())

    def _logit_factors(self) -> LogitFactors:
        from facetrain.head.kernels.margin_softmax import LogitFactors

        return LogitFactors(
            self._unit_GD,
            self._factor_RD,
            self.inverse_norm_R,
            # A column of −1 is no class of this chunk: the kernel masks no logit of the sample.
            torch.where(self._inside_G, self._column_G, -1),
            self._margin.scale,
            self._margin.filter_threshold,
        )


def fused_chunks_available(
    device: torch.device,
    margin: Margin,
    sub_centers: int,
    product_dtype: torch.dtype | None,
) -> bool:
    """Return whether the Triton kernels can compute this head.

    They need products in 16 bits, a margin that leaves negatives alone (except for the filter), tensor cores (compute
    capability 8.0), and Triton. The matrix library is faster at float32 products.
    """
    plain = not margin.changes_negatives and sub_centers == 1
    has_factors_in_16_bits = product_dtype is not None and product_dtype.itemsize == 2
    return plain and has_factors_in_16_bits and can_run_kernels(device)


def default_chunk_size(logits_per_class: int, columns: int, device_type: str) -> int:
    """Return the classes per chunk: `logits_per_class` for the gathered batch, `columns` numbers per row.

    On CUDA a chunk has 2^26 logits, enough to occupy the device, but centers of 2^28 numbers at most: with a small
    batch, the centers and their gradient need the memory. On a CPU a chunk's logits (held twice), centers, momentum and
    gradient together have 2^22 numbers, which fit into the last-level cache.
    """
    if device_type == "cuda":
        return max(min((1 << 26) // logits_per_class, (1 << 28) // columns), 128)
    return max((1 << 22) // (2 * logits_per_class + 3 * columns), 128)
