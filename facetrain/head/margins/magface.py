"""MagFace: a margin that grows with the norm of the embedding."""

# G gathered batch

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from facetrain.head.margins.base import Margin, angle


class MagFace(Margin):
    """Magnitude-aware margin (Meng et al., "MagFace", arXiv 2103.06627, equations 4 to 6).

    With a = ‖z‖ clipped to [l_a, u_a], the margin m(a) rises linearly from l_m to u_m, and a regularizer with the
    weight λ rewards long embeddings:

        target = cos(θ + m(a))      loss + λ·g(a),  g(a) = a/u_a² + 1/a

    Gradient passes through a. If cos θ ≤ 0, the target keeps its cosine, as in the authors' code.
    """

    needs_norms = True
    norms: ClassVar[tuple[float, float]] = 10.0, 110.0
    """l_a and u_a."""
    margins: ClassVar[tuple[float, float]] = 0.45, 0.8
    """l_m and u_m, in radians."""
    norm_weight: ClassVar[float] = 35.0
    """λ."""

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        assert norm_G is not None
        (low, high), (least, most) = self.norms, self.margins
        # No gradient passes a clipped norm: an embedding outside of the range is neither shortened nor lengthened by
        # the margin.
        margin_G = (norm_G.clamp(low, high) - low) * ((most - least) / (high - low))
        return torch.where(cos_G > 0, torch.cos(angle(cos_G) + margin_G + least), cos_G)

    def penalty(self, norm_G: Tensor) -> Tensor:
        clipped_G, high = norm_G.clamp(*self.norms), self.norms[1]
        return self.norm_weight * (clipped_G / high**2 + 1 / clipped_G)
