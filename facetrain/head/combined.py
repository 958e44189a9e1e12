"""Margins on the angle and on the cosine, and what every margin is to the head.

With θ the angle between an embedding and the centre of its identity, the target's cosine becomes

    cos(m1·θ + m2) − m3

SphereFace (arXiv 1704.08063) has m1, ArcFace (arXiv 1801.07698, equation 3) m2, CosFace
(arXiv 1801.09414, equation 4) m3; the combination is equation 4 of ArcFace. All other cosines stay.
"""

# G gathered batch   C a chunk of classes

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Target(NamedTuple):
    """What a margin makes of the cosine to the own class, and its derivatives; (G,) each."""

    value_G: Tensor
    by_cos_G: Tensor
    by_norm_G: Tensor | None = None


@dataclass(frozen=True)
class Margin:
    """A margin and the scale of the softmax behind it; the base of the others."""

    scale: float = 64.0
    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0
    linear_beyond_pi: bool = False
    straight_through: bool = False
    filter_threshold: float = 0.0

    sees_norms: ClassVar[bool] = False
    """It depends on the lengths of the embeddings, which then travel with them."""
    sees_batch: ClassVar[bool] = False
    """It depends on every sample's cosine to its own class, which then all ranks are told."""

    def target(self, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's cosine with the margin, and its derivative by the cosine, shaped like it.

        Past π, where cos(θ + m2) would rise again, `linear_beyond_pi` goes on with cos θ − m2·sin m2,
        as the paper's code does. The derivative of an angle is infinite at cos = ±1; it is bounded
        there by the precision of the numbers.
        """
        if self.m1 == 1 and self.m2 == 0:
            return cos - self.m3, torch.ones_like(cos)
        angle = self.m1 * torch.arccos(cos) + self.m2
        value, slope = torch.cos(angle), self.m1 * torch.sin(angle) / sine(cos)
        if self.linear_beyond_pi and self.m1 == 1:
            beyond = angle > math.pi
            value = torch.where(beyond, cos - self.m2 * math.sin(self.m2), value)
            slope = torch.where(beyond, 1.0, slope)
        return value - self.m3, torch.ones_like(cos) if self.straight_through else slope

    def own(self, cos_G: Tensor, norm_G: Tensor | None) -> Target:
        """Return the target of each sample. `norm_G`: lengths of the embeddings, where the margin sees them."""
        return Target(*self.target(cos_G))

    def others_(self, logit_GC: Tensor, own_cos_G: Tensor) -> Tensor | None:
        """Change the logits of other classes in place; return the factor (G, C) on their derivative, or None.

        `own_cos_G` is each sample's cosine to its own class before the margin; of the samples whose class
        lies on another rank only where the margin sees the batch.
        """
        if not self.filter_threshold:
            return None
        trusted_GC = logit_GC <= self.filter_threshold * self.scale
        logit_GC.mul_(trusted_GC)
        return trusted_GC

    def penalty(self, norm_G: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what is added to each sample's loss, and its derivative by the norm; None: nothing."""
        return None

    def begin_step(self, step: int) -> None:
        """Start a step, for margins that draw random numbers."""

    def observe(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        """See the global batch before its targets are computed, for margins that keep averages."""

    def state(self) -> dict[str, Tensor]:
        """Return the averages, for a checkpoint; load them by copying into these tensors."""
        return {}


def sine(cos: Tensor) -> Tensor:
    """Return the sine of an angle in [0, π] from its cosine, kept from 0."""
    return (1 - cos * cos).clamp_min(torch.finfo(cos.dtype).eps).sqrt()
