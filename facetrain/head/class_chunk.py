"""The logits of all embeddings to the other classes of one chunk."""

# G gathered batch   D embedding   C classes of the chunk   N sub-centers of a class   R = C·N centers

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from facetrain.head.losses import Loss, Softmax
from facetrain.head.margins import Margin
from facetrain.head.target import TargetClass


class Backward(NamedTuple):
    """What the backward pass brings to every chunk."""

    factor_GD: Tensor
    """Embeddings times the derivative of the step's loss by each sample's, as factors of the products."""
    own_GD: Tensor
    """What each sample adds to the gradient of its own class's center."""


class Chunk:
    """Logits (G, C), and the way back from their derivatives to embeddings and centers.

    A class with sub-centers has the logit of the nearest, and the gradient goes to it alone (Deng et al.,
    "Sub-center ArcFace", ECCV 2020, equation 3); once `dominant_C` says which of them to keep, of that one.
    """

    def __init__(
        self,
        factor_GD: Tensor,
        weight_CX: Tensor,
        own: TargetClass,
        margin: Margin,
        start: int,
        dominant_C: Tensor | None,
    ) -> None:
        self._own, self._margin, self._factor_GD = own, margin, factor_GD
        self._num_classes, self._dominant_C = len(weight_CX), dominant_C
        self._weight_RD = weight_CX.reshape(-1, factor_GD.shape[1])
        self._factor_RD = self._weight_RD.to(factor_GD.dtype)
        norm_R = torch.linalg.vector_norm(self._weight_RD, dim=1, dtype=own.cos_G.dtype)
        self._inverse_R = norm_R.clamp_min_(1e-12).reciprocal_()
        self._inside_G, self._column_G = own.columns(start, start + self._num_classes)

    def add_to(self, part_PG: Tensor, objective: Loss) -> Tensor:
        """Return the objective's numbers with this chunk's logits in them."""
        return objective.add(part_PG, self._logits()[0])

    def slopes(self, objective: Loss, joined_G: Tensor) -> Tensor:
        """Return the derivatives of the losses by cosine / scale, over each center's norm (G, R), as a factor."""
        logit_GC, factor_GC, which_GC1 = self._logits()
        slope_GC = objective.slope_(logit_GC, joined_G)
        if factor_GC is not None:
            slope_GC.mul_(factor_GC)
        slope_GR = self._spread(slope_GC, which_GC1)
        return slope_GR.mul_(self._inverse_R).to(self._factor_GD.dtype)

    def gradients(self, slope_GR: Tensor, back: Backward) -> tuple[Tensor, Tensor]:
        """Return what this chunk adds to the embeddings' gradient (G, D), and the centers' gradient (C, N·D).

        The first still lacks the factor per sample that is the same for all chunks.
        """
        grad_GD = slope_GR @ self._factor_RD
        grad_RD = (slope_GR.T @ back.factor_GD).to(self._inverse_R.dtype)
        # An own class elsewhere adds 0 to some row.
        row_G = self._column_G * (len(grad_RD) // self._num_classes) + self._own.nearest_G
        grad_RD.index_add_(0, row_G, torch.where(self._inside_G[:, None], back.own_GD, 0))
        # cos = e·w/|w| does not change with |w|: what points along w is taken out of the gradient.
        weight_RD = self._weight_RD.to(grad_RD.dtype)
        along_R = torch.linalg.vecdot(grad_RD, weight_RD)
        grad_RD.addcmul_(weight_RD, (along_R * self._inverse_R**2)[:, None], value=-1)
        return grad_GD, grad_RD.view(self._num_classes, -1)

    def _logits(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the logits, −∞ for own classes; the margin's factor on their derivatives; which center's they are."""
        logit_GR = (self._factor_GD @ self._factor_RD.T).to(self._inverse_R.dtype)
        logit_GC, which_GC1 = self._nearest(logit_GR.mul_(self._inverse_R * self._margin.scale))
        factor_GC = self._margin.change_negatives_(logit_GC, self._own.cos_G)
        # No question to the device which are here: a column is written everywhere, mostly with what it holds.
        column_G1, inside_G1 = self._column_G[:, None], self._inside_G[:, None]
        present_G1 = logit_GC.gather(1, column_G1)
        logit_GC.scatter_(1, column_G1, torch.where(inside_G1, -torch.inf, present_G1))
        return logit_GC, factor_GC, which_GC1

    def _nearest(self, logit_GR: Tensor) -> tuple[Tensor, Tensor | None]:
        logit_GCN = logit_GR.unflatten(1, (self._num_classes, -1))
        if logit_GCN.shape[2] == 1:
            return logit_GR, None
        if self._dominant_C is None:
            which_GC1 = logit_GCN.argmax(2, keepdim=True)
        else:
            which_GC1 = self._dominant_C.expand(len(logit_GR), -1)[..., None]
        return logit_GCN.gather(2, which_GC1)[..., 0], which_GC1

    def _spread(self, slope_GC: Tensor, which_GC1: Tensor | None) -> Tensor:
        """Give each class's slope to the sub-center that had the logit."""
        if which_GC1 is None:
            return slope_GC
        num_centers = len(self._weight_RD) // self._num_classes
        slope_GCN = slope_GC.new_zeros(*slope_GC.shape, num_centers)
        return slope_GCN.scatter_(2, which_GC1, slope_GC[..., None]).flatten(1)


class FusedChunk(Chunk):
    """The same by kernels that never write a logit to memory: on a GPU, for the softmax of one center a class."""

    def add_to(self, part_PG: Tensor, objective: Loss) -> Tensor:
        """Return the objective's numbers with this chunk's logits in them."""
        from facetrain.head.kernels.margin_softmax import add_statistics

        return add_statistics(part_PG, self._factor_GD, self._factor_RD, **self._logit_options())

    def slopes(self, objective: Loss, joined_G: Tensor) -> Tensor:
        """Return the derivatives of the losses by cosine / scale, over each center's norm (G, R), as a factor."""
        from facetrain.head.kernels.margin_softmax import slopes

        return slopes(joined_G, self._factor_GD, self._factor_RD, **self._logit_options())

    def _logit_options(self) -> dict[str, Any]:
        return {
            "inverse_C": self._inverse_R,
            "own_G": torch.where(self._inside_G, self._column_G, -1),
            "scale": self._margin.scale,
            "threshold": self._margin.filter_threshold,
        }


def fused_chunks_serve(
    device: torch.device,
    margin: Margin,
    objective: Loss,
    sub_centers: int,
    product_dtype: torch.dtype | None,
) -> bool:
    """Whether the kernels compute this head: products in 16 bits, and a margin that changes own classes alone.

    They want tensor cores (compute capability 8.0) and a Triton that can build them; float32 products are the matrix
    library's.
    """
    plain_negatives = type(margin).change_negatives_ is Margin.change_negatives_
    plain = plain_negatives and isinstance(objective, Softmax) and sub_centers == 1
    if device.type != "cuda" or not plain or product_dtype is None or product_dtype.itemsize != 2:
        return False
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    from facetrain.head.kernels.margin_softmax import can_launch

    return can_launch(device, product_dtype)
