"""AdaFace: a margin that adapts to the quality of the image."""

# G gathered batch

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from facetrain.head.margins.base import Margin, RunningAverages, TargetCosine, published, sine
from facetrain.head.settings import MarginSettings

_EPSILON = 1e-3
"""Bound of the angle, and term added to the deviation, as in the authors' code."""


class AdaFace(Margin):
    """Quality-adaptive margin (Kim et al., "AdaFace", arXiv 2204.00964, section 3.3).

    The embedding's norm ‖z‖ measures the image's quality. With μ and σ the running mean and deviation of
    the norms of a batch,

        ẑ = clip((‖z‖ − μ) / (σ / h), −1, 1)      target = cos(θ − m2·ẑ) − (m2·ẑ + m2)

    No gradient passes through ẑ. The angle is clipped to [ε, π − ε], ε = 0.001, as in the authors' code.
    """

    needs_norms: ClassVar[bool] = True
    h: ClassVar[float] = 0.333
    average: ClassVar[float] = 0.01
    """Weight of a batch in the running averages; `t_alpha` in the authors' code."""

    def __init__(self, settings: MarginSettings, seed: int = 0) -> None:
        super().__init__(settings)
        self._m2 = published(settings.m2, 0.4)
        self._averages = RunningAverages(mean=20.0, deviation=100.0)

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        assert norm_G is not None
        # As in the authors' code: a single image with a huge norm must not move the averages for hundreds of steps.
        norm_G = norm_G.clamp(1e-3, 100)
        # A head per dataset can have a single image in a step, which has no deviation.
        spread = {"deviation": norm_G.std()} if len(norm_G) > 1 else {}
        self._averages.update(self.average, mean=norm_G.mean(), **spread)

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        assert norm_G is not None
        quality_G = self._quality(norm_G)
        angle_G = torch.arccos(cos_G) - self._m2 * quality_G
        clipped_G = angle_G.clamp(_EPSILON, math.pi - _EPSILON)
        # Where the angle is clipped, the target is constant: no gradient.
        slope_G = torch.where(clipped_G == angle_G, torch.sin(angle_G) / sine(cos_G), 0.0)
        return TargetCosine(torch.cos(clipped_G) - self._m2 * (quality_G + 1), slope_G)

    def state(self) -> dict[str, Tensor]:
        return self._averages.values

    def _quality(self, norm_G: Tensor) -> Tensor:
        """Return ẑ."""
        mean, deviation = (self._averages.values[name].to(norm_G) for name in ("mean", "deviation"))
        standard_G = (norm_G.clamp(1e-3, 100) - mean) / (deviation + _EPSILON)
        return (standard_G * self.h).clamp(-1, 1)
