"""MagFace: a margin that grows with the norm of the embedding."""

# G gathered batch

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from facetrain.head.margins.base import Margin, TargetCosine, sine


class MagFace(Margin):
    """Magnitude-aware margin (Meng et al., "MagFace", arXiv 2103.06627, equations 4 to 6).

    With a = ‖z‖ clipped to [l_a, u_a], the margin m(a) rises linearly from l_m to u_m, and a regularizer with the
    weight λ rewards long embeddings:

        target = cos(θ + m(a))      loss + λ·g(a),  g(a) = a/u_a² + 1/a

    Gradient passes through a. If cos θ ≤ 0, the target keeps its cosine, as in the authors' code.
    """

    needs_norms: ClassVar[bool] = True
    norms: ClassVar[tuple[float, float]] = 10.0, 110.0
    """l_a and u_a."""
    margins: ClassVar[tuple[float, float]] = 0.45, 0.8
    """l_m and u_m, in radians."""
    norm_weight: ClassVar[float] = 35.0
    """λ."""

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        assert norm_G is not None
        (low, high), (least, most) = self.norms, self.margins
        rise = (most - least) / (high - low)
        clipped_G = norm_G.clamp(low, high)
        angle_G = torch.arccos(cos_G) + (clipped_G - low) * rise + least
        # No gradient passes a clipped norm: an embedding outside of the range is neither shortened nor lengthened by
        # the margin.
        easy_G, inside_G = cos_G > 0, clipped_G == norm_G
        return TargetCosine(
            torch.where(easy_G, torch.cos(angle_G), cos_G),
            torch.where(easy_G, torch.sin(angle_G) / sine(cos_G), 1.0),
            torch.where(easy_G & inside_G, -torch.sin(angle_G) * rise, 0.0),
        )

    def norm_penalty(self, norm_G: Tensor) -> tuple[Tensor, Tensor] | None:
        (low, high), weight = self.norms, self.norm_weight
        clipped_G = norm_G.clamp(low, high)
        slope_G = torch.where(clipped_G == norm_G, 1 / high**2 - clipped_G**-2, 0.0)
        return weight * (clipped_G / high**2 + 1 / clipped_G), weight * slope_G
