"""Margins on the angle and on the cosine: ArcFace, CosFace and their combination with SphereFace."""

# G gathered batch

from __future__ import annotations

import math

import torch
from torch import Tensor

from facetrain.head.margins.base import angle


def arcface(cos_G: Tensor, *, m2: float = 0.5, gradient: str = "exact") -> Tensor:
    """Return cos(θ + m2) (Deng et al., "ArcFace", arXiv 1801.07698, equation 3); see `combined`."""
    return combined(cos_G, m2=m2, gradient=gradient)


def cosface(cos_G: Tensor, *, m3: float = 0.4) -> Tensor:
    """Return cos θ − m3 (Wang et al., "CosFace", arXiv 1801.09414, equation 4)."""
    return cos_G - m3


def softmax(cos_G: Tensor) -> Tensor:
    """Return cos θ: no margin."""
    return cos_G


def combined(
    cos_G: Tensor, *, m1: float = 1.0, m2: float = 0.5, m3: float = 0.0, gradient: str = "exact"
) -> Tensor:
    """Return cos(m1·θ + m2) − m3 (ArcFace, equation 4).

    With m1 = 1, for θ + m2 > π, where cos(θ + m2) would rise again, the target is cos θ − m2·sin m2, as in the paper's
    code. With the gradient `straight_through`, it rises there, and the margin's derivative is replaced by 1, as in
    arcface_torch, which computes the margin under no_grad.
    """
    if m1 == 1 and m2 == 0:
        # Not by way of the angle: arccos loses half of the digits near cos = 1.
        return cos_G - m3
    angle_G = m1 * angle(cos_G) + m2
    target_G = torch.cos(angle_G)
    if gradient == "straight_through":
        target_G = cos_G + (target_G - cos_G).detach()
    elif m1 == 1:
        target_G = torch.where(angle_G > math.pi, cos_G - m2 * math.sin(m2), target_G)
    return target_G - m3
