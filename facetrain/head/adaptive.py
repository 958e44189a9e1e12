"""Margins that differ from sample to sample: by the embedding's norm, by the batch, by chance."""

# G gathered batch   C a chunk of classes

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from facetrain.counter import key_of, normal
from facetrain.head.combined import Margin, Target, sine


class Averages:
    """Running averages of whole batches: the same numbers on every rank, since all see the same batch."""

    def __init__(self, **start: float) -> None:
        self.values = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}

    def update(self, share: float, **now: Tensor) -> None:
        """Let each average move by `share` towards what this batch has; a batch that is not finite is left out."""
        for name, value in now.items():
            old = self.values[name] = self.values[name].to(value.device)
            new = old + share * (value.double() - old)
            old.copy_(torch.where(torch.isfinite(new), new, old))


@dataclass(frozen=True)
class AdaFace(Margin):
    """Quality-adaptive margin (Kim et al., "AdaFace", arXiv 2204.00964, section 3.3).

    With the embedding's norm ‖z‖ taken as the image's quality, and its mean μ and deviation σ as running
    averages over batches,

        ẑ = clip((‖z‖ − μ) / (σ / h), −1, 1)      target = cos(θ − m·ẑ) − (m·ẑ + m)

    No gradient passes through ẑ. The angle is kept within [ε, π − ε], ε = 0.001, as in the authors' code.
    """

    m2: float = 0.4
    h: float = 0.333
    average: float = 0.01
    """How far the averages move towards each batch; the authors' t_alpha."""
    seen: Averages = field(default_factory=lambda: Averages(mean=20.0, deviation=100.0), compare=False)

    sees_norms: ClassVar[bool] = True
    _EPSILON: ClassVar[float] = 1e-3

    def observe(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        assert norm_G is not None
        norm_G = norm_G.clamp(1e-3, 100)
        self.seen.update(self.average, mean=norm_G.mean(), deviation=norm_G.std())

    def own(self, cos_G: Tensor, norm_G: Tensor | None) -> Target:
        assert norm_G is not None
        quality_G = self._quality(norm_G)
        angle_G = torch.arccos(cos_G) - self.m2 * quality_G
        kept_G = angle_G.clamp(self._EPSILON, math.pi - self._EPSILON)
        slope_G = torch.where(kept_G == angle_G, torch.sin(angle_G) / sine(cos_G), 0.0)
        return Target(torch.cos(kept_G) - self.m2 * (quality_G + 1), slope_G)

    def state(self) -> dict[str, Tensor]:
        return self.seen.values

    def _quality(self, norm_G: Tensor) -> Tensor:
        mean, deviation = (self.seen.values[name].to(norm_G) for name in ("mean", "deviation"))
        return ((norm_G.clamp(1e-3, 100) - mean) / (deviation + self._EPSILON) * self.h).clamp(-1, 1)


@dataclass(frozen=True)
class MagFace(Margin):
    """Magnitude-aware margin (Meng et al., "MagFace", arXiv 2103.06627, equations 4 to 6).

    With a = ‖z‖ kept within `norms` = [l_a, u_a], the margin m(a) rises linearly from the first to the second
    of `margins`, and a regulariser rewards long embeddings:

        target = cos(θ + m(a))      loss + λ·g(a),  g(a) = a/u_a² + 1/a

    Gradient passes through a. Where cos θ ≤ 0 the target keeps its cosine, as in the authors' code.
    """

    norms: tuple[float, float] = (10.0, 110.0)
    margins: tuple[float, float] = (0.45, 0.8)
    norm_weight: float = 35.0
    """λ."""

    sees_norms: ClassVar[bool] = True

    def own(self, cos_G: Tensor, norm_G: Tensor | None) -> Target:
        assert norm_G is not None
        (low, high), (least, most) = self.norms, self.margins
        rise = (most - least) / (high - low)
        length_G = norm_G.clamp(low, high)
        angle_G = torch.arccos(cos_G) + (length_G - low) * rise + least
        easy_G, inside_G = cos_G > 0, length_G == norm_G
        return Target(
            torch.where(easy_G, torch.cos(angle_G), cos_G),
            torch.where(easy_G, torch.sin(angle_G) / sine(cos_G), 1.0),
            torch.where(easy_G & inside_G, -torch.sin(angle_G) * rise, 0.0),
        )

    def penalty(self, norm_G: Tensor) -> tuple[Tensor, Tensor] | None:
        low, high = self.norms
        length_G = norm_G.clamp(low, high)
        slope_G = torch.where(length_G == norm_G, 1 / high**2 - length_G**-2, 0.0)
        return self.norm_weight * (length_G / high**2 + 1 / length_G), self.norm_weight * slope_G


@dataclass(frozen=True)
class CurricularFace(Margin):
    """Margin with a curriculum of hard negatives (Huang et al., "CurricularFace", arXiv 2004.00288).

    The target is ArcFace's; a negative whose cosine exceeds cos(θ_y + m) is a hard one and weighs (equation 5)

        N(t, cos θ_j) = cos θ_j·(t + cos θ_j)

    where t is the running average of the batch's cosines to their own class (equation 7): hard negatives
    count little at first and more and more as training goes on.
    """

    m2: float = 0.5
    average: float = 0.01
    linear_beyond_pi: bool = True
    seen: Averages = field(default_factory=lambda: Averages(t=0.0), compare=False)

    sees_batch: ClassVar[bool] = True

    def observe(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        self.seen.update(self.average, t=cos_G.mean())

    def others_(self, logit_GC: Tensor, own_cos_G: Tensor) -> Tensor | None:
        t = self.seen.values["t"].to(logit_GC)
        easiest_G = self.scale * torch.cos(torch.arccos(own_cos_G) + self.m2)
        hard_GC = logit_GC > easiest_G[:, None]
        cos_GC = logit_GC / self.scale
        slope_GC = torch.where(hard_GC, t + 2 * cos_GC, 1.0)
        logit_GC.mul_(torch.where(hard_GC, t + cos_GC, 1.0))
        return slope_GC

    def state(self) -> dict[str, Tensor]:
        return self.seen.values


@dataclass(frozen=True)
class ElasticFace(Margin):
    """Margin drawn anew for every sample and step (Boutros et al., "ElasticFace", arXiv 2109.09416).

        target = cos(θ + E(m2, σ))   (equation 6)    or    cos θ − E(m3, σ)   (equation 7),    E normal

    whichever of m2 and m3 is not 0. A draw depends on (seed, step, micro-batch, row of the global batch) alone.
    """

    sigma: float = 0.0125
    seed: int = 0
    position: list[int] = field(default_factory=lambda: [0, 0], compare=False)
    """The step, and how many batches it has had."""

    def begin_step(self, step: int) -> None:
        self.position[:] = step, 0

    def own(self, cos_G: Tensor, norm_G: Tensor | None) -> Target:
        key = key_of(self.seed, *self.position)
        self.position[1] += 1
        row_G = torch.arange(len(cos_G), device=cos_G.device)
        drawn_G = (normal(row_G, key) * self.sigma).to(cos_G.dtype)
        if self.m3:
            return Target(cos_G - self.m3 - drawn_G, torch.ones_like(cos_G))
        angle_G = torch.arccos(cos_G) + self.m2 + drawn_G
        return Target(torch.cos(angle_G), torch.sin(angle_G) / sine(cos_G))
