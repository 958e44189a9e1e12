"""The logits of all embeddings to the other classes of one chunk."""

# G gathered batch   D embedding   C classes of the chunk   N sub-centres of a class   R = C·N centres

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from facetrain.head.combined import Margin
from facetrain.head.own import OwnClass
from facetrain.head.products import times, times_transposed, transposed_times


class Backward(NamedTuple):
    """What the backward pass brings to every chunk."""

    factor_GD: Tensor
    """Embeddings times the derivative of the step's loss by each sample's, as factors of the products."""
    own_GD: Tensor
    """What each sample adds to the gradient of its own class's centre."""


class Chunk:
    """Logits (G, C), and the way back from their derivatives to embeddings and centres.

    A class with sub-centres has the logit of the nearest, and the gradient goes to it alone (Deng et al.,
    "Sub-center ArcFace", ECCV 2020, equation 3); once `dominant_C` says which of them to keep, of that one.
    """

    def __init__(
        self,
        factor_GD: Tensor,
        weight_CX: Tensor,
        own: OwnClass,
        margin: Margin,
        start: int,
        dominant_C: Tensor | None,
    ) -> None:
        self._own, self._factor_GD, self._num_classes = own, factor_GD, len(weight_CX)
        compute = own.cos_G.dtype
        self.weight_RD = weight_CX.reshape(-1, factor_GD.shape[1])
        self.factor_RD = self.weight_RD.to(factor_GD.dtype)
        norm_R = torch.linalg.vector_norm(self.weight_RD, dim=1, dtype=compute)
        self.inverse_R = norm_R.clamp_min_(1e-12).reciprocal_()
        logit_GR = times_transposed(factor_GD, self.factor_RD).to(compute)
        self.logit_GC = self._nearest(logit_GR.mul_(self.inverse_R * margin.scale), dominant_C)
        self.factor_GC = margin.others_(self.logit_GC, own.cos_G)
        self._inside_G, self._column_G = own.columns(start, start + self._num_classes)
        present_G1 = self.logit_GC.gather(1, self._column_G[:, None])
        # No question to the device which are here: a column is written everywhere, mostly with what it holds.
        self.logit_GC.scatter_(
            1, self._column_G[:, None], torch.where(self._inside_G[:, None], -torch.inf, present_G1)
        )

    def gradients(self, slope_GC: Tensor, back: Backward) -> tuple[Tensor, Tensor]:
        """Return what this chunk adds to the embeddings' gradient (G, D), and the centres' gradient (C, N·D).

        `slope_GC` holds the derivatives of the losses by logit, 0 for the own class, and is used up. The first
        result still lacks the factor per sample that is the same for all chunks.
        """
        if self.factor_GC is not None:
            slope_GC.mul_(self.factor_GC)
        slope_GR = self._spread(slope_GC).mul_(self.inverse_R).to(self._factor_GD.dtype)
        grad_GD = times(slope_GR, self.factor_RD)
        grad_RD = transposed_times(slope_GR, back.factor_GD).to(self.inverse_R.dtype)
        # An own class elsewhere adds 0 to some row.
        row_G = self._column_G * (len(grad_RD) // self._num_classes) + self._own.nearest_G
        grad_RD.index_add_(0, row_G, torch.where(self._inside_G[:, None], back.own_GD, 0))
        # cos = e·w/|w| does not change with |w|: what points along w is taken out of the gradient.
        weight_RD = self.weight_RD.to(grad_RD.dtype)
        along_R = torch.linalg.vecdot(grad_RD, weight_RD)
        grad_RD.addcmul_(weight_RD, (along_R * self.inverse_R**2)[:, None], value=-1)
        return grad_GD, grad_RD.view(self._num_classes, -1)

    def _nearest(self, logit_GR: Tensor, dominant_C: Tensor | None) -> Tensor:
        logit_GCN = logit_GR.unflatten(1, (self._num_classes, -1))
        self._which_GC1: Tensor | None = None
        if logit_GCN.shape[2] == 1:
            return logit_GR
        if dominant_C is None:
            self._which_GC1 = logit_GCN.argmax(2, keepdim=True)
        else:
            self._which_GC1 = dominant_C.expand(len(logit_GR), -1)[..., None]
        return logit_GCN.gather(2, self._which_GC1)[..., 0]

    def _spread(self, slope_GC: Tensor) -> Tensor:
        """Give each class's slope to the sub-centre that had the logit."""
        if self._which_GC1 is None:
            return slope_GC
        num_centres = len(self.weight_RD) // self._num_classes
        slope_GCN = slope_GC.new_zeros(*slope_GC.shape, num_centres)
        return slope_GCN.scatter_(2, self._which_GC1, slope_GC[..., None]).flatten(1)
