"""Margins, as pure functions of the cosine to the own class centre.

With θ the angle between an embedding and the centre of its identity, the target's cosine becomes

    cos(m1·θ + m2) − m3

SphereFace (arXiv 1704.08063) has m1, ArcFace (arXiv 1801.07698, equation 3) m2, CosFace
(arXiv 1801.09414, equation 4) m3; the combination is equation 4 of ArcFace. All other cosines stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from facetrain.errors import ConfigError


@dataclass(frozen=True)
class Margin:
    """A margin and the scale of the softmax behind it."""

    scale: float = 64.0
    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0
    linear_beyond_pi: bool = False
    straight_through: bool = False
    filter_threshold: float = 0.0

    def target(self, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's cosine with the margin, and its derivative by the cosine, shaped like it.

        Past π, where cos(θ + m2) would rise again, `linear_beyond_pi` goes on with cos θ − m2·sin m2,
        as the paper's code does. The derivative of an angle is infinite at cos = ±1; it is bounded
        there by the precision of the numbers.
        """
        if self.m1 == 1 and self.m2 == 0:
            return cos - self.m3, torch.ones_like(cos)
        angle = self.m1 * torch.arccos(cos) + self.m2
        sine = (1 - cos * cos).clamp_min(torch.finfo(cos.dtype).eps).sqrt()
        value, slope = torch.cos(angle), self.m1 * torch.sin(angle) / sine
        if self.linear_beyond_pi and self.m1 == 1:
            beyond = angle > math.pi
            value = torch.where(beyond, cos - self.m2 * math.sin(self.m2), value)
            slope = torch.where(beyond, 1.0, slope)
        return value - self.m3, torch.ones_like(cos) if self.straight_through else slope


def build_margin(
    type: str,
    *,
    scale: float = 64.0,
    m1: float = 1.0,
    m2: float = 0.5,
    m3: float = 0.0,
    gradient: str = "exact",
    beyond_pi: str = "none",
    filter_threshold: float = 0.0,
) -> Margin:
    """Build the margin of a name; a name takes only the numbers that are its own.

    Raises:
        ConfigError: there is no margin of that name.
    """
    own = {
        "arcface": (1.0, m2, 0.0),
        "cosface": (1.0, 0.0, m3),
        "combined": (m1, m2, m3),
        "softmax": (1.0, 0.0, 0.0),
    }
    if type not in own:
        raise ConfigError(f"head.margin.type: {type!r} does not exist; there are {', '.join(own)}")
    return Margin(
        scale,
        *own[type],
        linear_beyond_pi=beyond_pi == "linear",
        straight_through=gradient == "straight_through",
        filter_threshold=filter_threshold,
    )
