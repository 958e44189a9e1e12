"""Margins on the angle and on the cosine: ArcFace, CosFace and their combination with SphereFace."""

# G gathered batch

from __future__ import annotations

import math

import torch
from torch import Tensor

from facetrain.head.margins.base import Margin, TargetCosine, published, sine
from facetrain.head.settings import MarginSettings


class CombinedMargin(Margin):
    """cos(m1·θ + m2) − m3 (ArcFace, arXiv 1801.07698, equation 4); ArcFace has m2 alone, CosFace m3 alone.

    With m1 = 1, for θ + m2 > π, where cos(θ + m2) would rise again, the target is cos θ − m2·sin m2, as in the paper's
    code. With `gradient: straight_through`, it rises there, and the margin's derivative is replaced by 1, as in
    arcface_torch, which computes the margin under no_grad.
    """

    def __init__(
        self, settings: MarginSettings, *, m1: float = 1.0, m2: float = 0.0, m3: float = 0.0
    ) -> None:
        """Take the margins that the formula has; the settings give the rest."""
        super().__init__(settings)
        self.m1, self.m2, self.m3 = m1, m2, m3
        self.straight_through = settings.gradient == "straight_through"

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        if self.m1 == 1 and self.m2 == 0:
            # Not by way of the angle: arccos loses half of the digits near cos = 1.
            return TargetCosine(cos_G - self.m3, torch.ones_like(cos_G))
        angle_G = self.m1 * torch.arccos(cos_G) + self.m2
        # d cos(m1·θ + m2) / d cos θ = m1 · sin(m1·θ + m2) / sin θ.
        value_G, slope_G = torch.cos(angle_G), self.m1 * torch.sin(angle_G) / sine(cos_G)
        if self.straight_through:
            return TargetCosine(value_G - self.m3, torch.ones_like(cos_G))
        if self.m1 == 1:
            beyond_G = angle_G > math.pi
            value_G = torch.where(beyond_G, cos_G - self.m2 * math.sin(self.m2), value_G)
            slope_G = torch.where(beyond_G, 1.0, slope_G)
        return TargetCosine(value_G - self.m3, slope_G)


def arcface(settings: MarginSettings, seed: int) -> Margin:
    """Build cos(θ + m2)."""
    return CombinedMargin(settings, m2=published(settings.m2, 0.5))


def cosface(settings: MarginSettings, seed: int) -> Margin:
    """Build cos θ − m3."""
    return CombinedMargin(settings, m3=published(settings.m3, 0.4))


def combined(settings: MarginSettings, seed: int) -> Margin:
    """Build cos(m1·θ + m2) − m3."""
    m2, m3 = published(settings.m2, 0.5), published(settings.m3, 0.0)
    return CombinedMargin(settings, m1=settings.m1, m2=m2, m3=m3)
