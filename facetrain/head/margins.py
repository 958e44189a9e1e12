"""Margins on the angle and on the cosine, and what every margin is to the head.

With θ the angle between an embedding and the center of its identity, the target's cosine becomes

    cos(m1·θ + m2) − m3

SphereFace (arXiv 1704.08063) has m1, ArcFace (arXiv 1801.07698, equation 3) m2, CosFace
(arXiv 1801.09414, equation 4) m3; the combination is equation 4 of ArcFace. All other cosines stay.
"""

# G gathered batch   C a chunk of classes

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from facetrain.counter_rng import key_of, normal
from facetrain.errors import ConfigError


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


class Averages:
    """Running averages of whole batches: the same numbers on every rank, since all see the same batch."""

    def __init__(self, **start: float) -> None:
        self.values = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}

    def update(self, share: float, **now: Tensor) -> None:
        """Let each average move by `share` toward what this batch has; a batch that is not finite is left out."""
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
    """How far the averages move toward each batch; the authors' t_alpha."""
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
    of `margins`, and a regularizer rewards long embeddings:

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


__all__ = ["Margin", "build_margin"]


def build_margin(
    type: str,
    *,
    scale: float = 64.0,
    m1: float = 1.0,
    m2: float | None = None,
    m3: float | None = None,
    gradient: str = "exact",
    beyond_pi: str = "none",
    filter_threshold: float = 0.0,
    h: float = 0.333,
    average: float = 0.01,
    sigma: float = 0.0125,
    norms: tuple[float, float] = (10.0, 110.0),
    margins: tuple[float, float] = (0.45, 0.8),
    norm_weight: float = 35.0,
    seed: int = 0,
) -> Margin:
    """Build the margin of a name; a name takes only the numbers that are its own.

    Where m2 or m3 is None, it is what the margin was published with.

    Raises:
        ConfigError: there is no margin of that name.
    """

    def or_(value: float | None, published: float) -> float:
        return published if value is None else value

    def combined(m1: float, m2: float, m3: float) -> Margin:
        return Margin(
            scale,
            m1,
            m2,
            m3,
            linear_beyond_pi=beyond_pi == "linear",
            straight_through=gradient == "straight_through",
            filter_threshold=filter_threshold,
        )

    own: dict[str, Callable[[], Margin]] = {
        "arcface": lambda: combined(1.0, or_(m2, 0.5), 0.0),
        "cosface": lambda: combined(1.0, 0.0, or_(m3, 0.4)),
        "combined": lambda: combined(m1, or_(m2, 0.5), or_(m3, 0.0)),
        "softmax": lambda: combined(1.0, 0.0, 0.0),
        "adaface": lambda: AdaFace(
            scale, m2=or_(m2, 0.4), h=h, average=average, filter_threshold=filter_threshold
        ),
        "magface": lambda: MagFace(
            scale, norms=norms, margins=margins, norm_weight=norm_weight, filter_threshold=filter_threshold
        ),
        "curricularface": lambda: CurricularFace(
            scale, m2=or_(m2, 0.5), average=average, linear_beyond_pi=True
        ),
        "elastic_arcface": lambda: ElasticFace(
            scale, m2=or_(m2, 0.5), sigma=sigma, seed=seed, filter_threshold=filter_threshold
        ),
        "elastic_cosface": lambda: ElasticFace(
            scale, m3=or_(m3, 0.35), sigma=sigma, seed=seed, filter_threshold=filter_threshold
        ),
    }
    if type not in own:
        raise ConfigError(f"head.margin.type: {type!r} does not exist; there are {', '.join(own)}")
    return own[type]()
