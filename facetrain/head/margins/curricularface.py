"""CurricularFace: ArcFace's margin with a curriculum of hard negatives."""

# G gathered batch   C classes of a chunk

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from facetrain.errors import UsageError
from facetrain.head.margins.base import Margin, RunningAverages
from facetrain.head.margins.combined import arcface


class CurricularFace(Margin):
    """ArcFace's margin with a curriculum of hard negatives (Huang et al., "CurricularFace", arXiv 2004.00288).

    The target is cos(θ_y + m2), with ArcFace's linear part beyond π. A negative whose cosine exceeds it is
    hard, and its cosine becomes (equation 5)

        N(t, cos θ_j) = cos θ_j·(t + cos θ_j)

    with t the running average of the batch's target cosines (equation 7): hard negatives weigh little at the
    start of training, and more as t grows.
    """

    needs_all_target_cosines = True
    average: ClassVar[float] = 0.01
    """Weight of a batch in t."""

    def __init__(self, *, m2: float = 0.5, **common: Any) -> None:
        super().__init__(**common)
        if self.filter_threshold:
            raise UsageError("curricularface has no filter_threshold: both change the hard negatives")
        self.m2 = m2
        self._averages = RunningAverages(t=0.0)

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        return arcface(cos_G, m2=self.m2)

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        self._averages.update(self.average, t=cos_G.mean())

    def change_negatives_(self, logit_GC: Tensor, target_cos_G: Tensor) -> Tensor | None:
        t = self._averages.values["t"].to(logit_GC)
        # Without the linear part beyond π, as in the authors' code.
        threshold_G = self.scale * torch.cos(torch.arccos(target_cos_G) + self.m2)
        hard_GC = logit_GC > threshold_G[:, None]
        # The logits are s·cos, and the formula is of cosines: s·cos·(t + cos) is the logit times (t + cos), with the
        # derivative t + 2·cos.
        cos_GC = logit_GC / self.scale
        slope_GC = torch.where(hard_GC, t + 2 * cos_GC, 1.0)
        logit_GC.mul_(torch.where(hard_GC, t + cos_GC, 1.0))
        return slope_GC

    def snapshot(self) -> CurricularFace:
        kept = copy.copy(self)
        kept._averages = self._averages.clone()
        return kept

    def state(self) -> dict[str, Tensor]:
        return self._averages.values
