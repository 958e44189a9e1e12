"""AdaFace: a margin that adapts to the quality of the image."""

# G gathered batch

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from facetrain.head.margins.base import Margin, RunningAverages, angle

_EPSILON = 1e-3
"""Bound of the angle, and term added to the deviation, as in the authors' code."""


class AdaFace(Margin):
    """Quality-adaptive margin (Kim et al., "AdaFace", arXiv 2204.00964, section 3.3).

    The embedding's norm ‖z‖ measures the image's quality. With μ and σ the running mean and deviation of
    the norms of a batch,

        ẑ = clip((‖z‖ − μ) / (σ / h), −1, 1)      target = cos(θ − m2·ẑ) − (m2·ẑ + m2)

    No gradient passes through ẑ. The angle is clipped to [ε, π − ε], ε = 0.001, as in the authors' code.
    """

    needs_norms = True
    h: ClassVar[float] = 0.333
    average: ClassVar[float] = 0.01
    """Weight of a batch in the running averages; `t_alpha` in the authors' code."""

    def __init__(self, *, m2: float = 0.4, **common: Any) -> None:
        super().__init__(**common)
        self.m2 = m2
        self._averages = RunningAverages(mean=20.0, deviation=100.0)

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        assert norm_G is not None
        norm_G = _clipped(norm_G)
        # A head per dataset can have a single image in a step, which has no deviation.
        spread = {"deviation": norm_G.std()} if len(norm_G) > 1 else {}
        self._averages.update(self.average, mean=norm_G.mean(), **spread)

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        assert norm_G is not None
        quality_G = self._quality(norm_G.detach())
        angle_G = (angle(cos_G) - self.m2 * quality_G).clamp(_EPSILON, math.pi - _EPSILON)
        return torch.cos(angle_G) - self.m2 * (quality_G + 1)

    def state(self) -> dict[str, Tensor]:
        return self._averages.values

    def _quality(self, norm_G: Tensor) -> Tensor:
        """Return ẑ."""
        mean, deviation = (self._averages.values[name].to(norm_G) for name in ("mean", "deviation"))
        standard_G = (_clipped(norm_G) - mean) / (deviation + _EPSILON)
        return (standard_G * self.h).clamp(-1, 1)


def _clipped(norm_G: Tensor) -> Tensor:
    # As in the authors' code: a single image with a huge norm must not move the averages for hundreds of steps.
    return norm_G.clamp(1e-3, 100)
