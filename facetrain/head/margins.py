"""Margins: the formulas that change a sample's target logit, and their registry.

With θ the angle between an embedding and the center of its identity, most margins replace the target's cosine by

    cos(m1·θ + m2) − m3

SphereFace (arXiv 1704.08063) introduced m1, ArcFace (arXiv 1801.07698, equation 3) m2, CosFace
(arXiv 1801.09414, equation 4) m3; the combination is equation 4 of ArcFace. The cosines of all other classes,
the negatives, stay unless a margin's docstring describes a change.

To add a margin: one subclass of `Margin` and one row in `MARGINS` (see CONTRIBUTING.md).
"""

# G gathered batch   C classes of a chunk

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from facetrain.counter_rng import key_of, normal
from facetrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MarginSettings:
    """Settings of a margin; a margin reads those that its formula has and ignores the others.

    Their meaning and their defaults are stated once, in the section `head.margin` of the config's schema.
    """

    type: str
    scale: float
    m1: float
    m2: float | None
    """None: the published value, stated in `MARGINS`. The same holds for `m3`."""
    m3: float | None
    h: float
    average: float
    sigma: float
    norms: tuple[float, float]
    margins: tuple[float, float]
    norm_weight: float
    gradient: str
    beyond_pi: str
    filter_threshold: float


class TargetCosine(NamedTuple):
    """Target cosine of each sample after the margin, and its derivatives; (G,) each."""

    value_G: Tensor
    by_cos_G: Tensor
    """Derivative by the cosine before the margin."""
    by_norm_G: Tensor | None = None
    """Derivative by the embedding's norm; None: zero."""


@dataclass(frozen=True)
class Margin:
    """Base class of the margins: the softmax with a scale s, and no margin."""

    scale: float
    filter_threshold: float = 0.0
    """Negatives with a cosine above this count as label noise: their logit becomes 0. 0 disables the filter."""

    needs_norms: ClassVar[bool] = False
    """The formula contains the norms of the embeddings, so each rank sends them along with its embeddings."""
    penalizes_norms: ClassVar[bool] = False
    """The loss contains a penalty on the norms (`norm_penalty`)."""
    needs_all_target_cosines: ClassVar[bool] = False
    """The formula contains the target cosines of the whole batch, so all ranks exchange them."""

    @property
    def changes_negatives(self) -> bool:
        """Whether the formula changes the negatives' cosines; the filter does not count."""
        return type(self).change_negatives_ is not Margin.change_negatives_

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        """Return the target cosines with the margin.

        `cos_G` holds the target cosines in [−1, 1], `norm_G` the norms of the embeddings if `needs_norms`.
        """
        return TargetCosine(cos_G, torch.ones_like(cos_G))

    def chance_cosine(self) -> float:
        """Return the mean target cosine after the margin of embeddings that are orthogonal to their center."""
        return 0.0

    def change_negatives_(self, logit_GC: Tensor, target_cos_G: Tensor) -> Tensor | None:
        """Change the negatives' logits in place; return the factor (G, C) on their derivatives, or None for 1.

        `target_cos_G` holds the target cosines before the margin. For samples whose class is on another rank
        it is valid only if `needs_all_target_cosines`.
        """
        if not self.filter_threshold:
            return None
        trusted_GC = logit_GC <= self.filter_threshold * self.scale
        logit_GC.mul_(trusted_GC)
        return trusted_GC

    def norm_penalty(self, norm_G: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the term added to each sample's loss, and its derivative by the norm, (G,) each; None: no term."""
        return None

    def begin_step(self, step: int) -> None:
        """Start a step. Margins that draw random numbers derive them from its number."""

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        """Update running averages from the global batch. Called before `apply`."""

    def state(self) -> dict[str, Tensor]:
        """Return the running averages for a checkpoint. To load them, copy into these tensors."""
        return {}


def sine(cos: Tensor) -> Tensor:
    """Return the sine of an angle in [0, π] from its cosine, at least √ε of the dtype.

    The derivative of an angle by its cosine, −1/sin, is infinite at cos = ±1; the bound keeps it finite.
    """
    return (1 - cos * cos).clamp_min(torch.finfo(cos.dtype).eps).sqrt()


@dataclass(frozen=True)
class CombinedMargin(Margin):
    """cos(m1·θ + m2) − m3 (ArcFace, arXiv 1801.07698, equation 4); ArcFace has m2 alone, CosFace m3 alone."""

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0
    linear_beyond_pi: bool = False
    """For θ + m2 > π, where cos(θ + m2) would rise again: use cos θ − m2·sin m2, as the paper's code does."""
    straight_through: bool = False
    """Replace the margin's derivative by 1, as arcface_torch does, which computes the margin under no_grad."""

    def chance_cosine(self) -> float:
        return math.cos(self.m1 * math.pi / 2 + self.m2) - self.m3

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        if self.m1 == 1 and self.m2 == 0:
            return TargetCosine(cos_G - self.m3, torch.ones_like(cos_G))
        angle_G = self.m1 * torch.arccos(cos_G) + self.m2
        value_G, slope_G = torch.cos(angle_G), self.m1 * torch.sin(angle_G) / sine(cos_G)
        if self.linear_beyond_pi and self.m1 == 1:
            beyond_G = angle_G > math.pi
            value_G = torch.where(beyond_G, cos_G - self.m2 * math.sin(self.m2), value_G)
            slope_G = torch.where(beyond_G, 1.0, slope_G)
        return TargetCosine(value_G - self.m3, torch.ones_like(cos_G) if self.straight_through else slope_G)


class RunningAverages:
    """Exponential moving averages of statistics of the global batch.

    Every rank sees the same global batch, so the averages are equal on all ranks without communication.
    """

    def __init__(self, **start: float) -> None:
        self.values = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}

    def update(self, weight: float, **batch: Tensor) -> None:
        """Move each average by `weight` toward the batch's value; ignore values that are not finite."""
        for name, value in batch.items():
            old = self.values[name] = self.values[name].to(value.device)
            new = old + weight * (value.double() - old)
            old.copy_(torch.where(torch.isfinite(new), new, old))


@dataclass(frozen=True, kw_only=True)
class AdaFace(Margin):
    """Quality-adaptive margin (Kim et al., "AdaFace", arXiv 2204.00964, section 3.3).

    The embedding's norm ‖z‖ measures the image's quality. With μ and σ the running mean and deviation of
    the norms of a batch,

        ẑ = clip((‖z‖ − μ) / (σ / h), −1, 1)      target = cos(θ − m·ẑ) − (m·ẑ + m)

    No gradient passes through ẑ. The angle is clipped to [ε, π − ε], ε = 0.001, as in the authors' code.
    """

    m: float
    h: float
    average: float
    """Weight of a batch in the running averages; `t_alpha` in the authors' code."""
    averages: RunningAverages = field(
        default_factory=lambda: RunningAverages(mean=20.0, deviation=100.0), compare=False
    )

    needs_norms: ClassVar[bool] = True
    _EPSILON: ClassVar[float] = 1e-3

    def chance_cosine(self) -> float:
        return -self.m  # for an image of mean quality, ẑ = 0

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        assert norm_G is not None
        norm_G = norm_G.clamp(1e-3, 100)
        # A head per dataset can have a single image in a step, which has no deviation.
        spread = {"deviation": norm_G.std()} if len(norm_G) > 1 else {}
        self.averages.update(self.average, mean=norm_G.mean(), **spread)

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        assert norm_G is not None
        quality_G = self._quality(norm_G)
        angle_G = torch.arccos(cos_G) - self.m * quality_G
        clipped_G = angle_G.clamp(self._EPSILON, math.pi - self._EPSILON)
        slope_G = torch.where(clipped_G == angle_G, torch.sin(angle_G) / sine(cos_G), 0.0)
        return TargetCosine(torch.cos(clipped_G) - self.m * (quality_G + 1), slope_G)

    def state(self) -> dict[str, Tensor]:
        return self.averages.values

    def _quality(self, norm_G: Tensor) -> Tensor:
        """Return ẑ."""
        mean, deviation = (self.averages.values[name].to(norm_G) for name in ("mean", "deviation"))
        return ((norm_G.clamp(1e-3, 100) - mean) / (deviation + self._EPSILON) * self.h).clamp(-1, 1)


@dataclass(frozen=True, kw_only=True)
class MagFace(Margin):
    """Magnitude-aware margin (Meng et al., "MagFace", arXiv 2103.06627, equations 4 to 6).

    With a = ‖z‖ clipped to `norms` = [l_a, u_a], the margin m(a) rises linearly from the first to the second
    of `margins`, and a regularizer rewards long embeddings:

        target = cos(θ + m(a))      loss + λ·g(a),  g(a) = a/u_a² + 1/a

    Gradient passes through a. If cos θ ≤ 0, the target keeps its cosine, as in the authors' code.
    """

    norms: tuple[float, float]
    margins: tuple[float, float]
    norm_weight: float
    """λ."""

    needs_norms: ClassVar[bool] = True
    penalizes_norms: ClassVar[bool] = True

    def chance_cosine(self) -> float:
        return -math.sin(self.margins[0]) / 2  # half of the cosines are below 0 and keep their value

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        assert norm_G is not None
        (low, high), (least, most) = self.norms, self.margins
        rise = (most - least) / (high - low)
        clipped_G = norm_G.clamp(low, high)
        angle_G = torch.arccos(cos_G) + (clipped_G - low) * rise + least
        easy_G, inside_G = cos_G > 0, clipped_G == norm_G
        return TargetCosine(
            torch.where(easy_G, torch.cos(angle_G), cos_G),
            torch.where(easy_G, torch.sin(angle_G) / sine(cos_G), 1.0),
            torch.where(easy_G & inside_G, -torch.sin(angle_G) * rise, 0.0),
        )

    def norm_penalty(self, norm_G: Tensor) -> tuple[Tensor, Tensor] | None:
        low, high = self.norms
        clipped_G = norm_G.clamp(low, high)
        slope_G = torch.where(clipped_G == norm_G, 1 / high**2 - clipped_G**-2, 0.0)
        return self.norm_weight * (clipped_G / high**2 + 1 / clipped_G), self.norm_weight * slope_G


@dataclass(frozen=True, kw_only=True)
class CurricularFace(CombinedMargin):
    """ArcFace's margin with a curriculum of hard negatives (Huang et al., "CurricularFace", arXiv 2004.00288).

    The target is cos(θ_y + m2), with ArcFace's linear part beyond π. A negative whose cosine exceeds it is
    hard, and its cosine becomes (equation 5)

        N(t, cos θ_j) = cos θ_j·(t + cos θ_j)

    with t the running average of the batch's target cosines (equation 7): hard negatives weigh little at the
    start of training, and more as t grows.
    """

    average: float
    """Weight of a batch in the running average."""
    averages: RunningAverages = field(default_factory=lambda: RunningAverages(t=0.0), compare=False)

    needs_all_target_cosines: ClassVar[bool] = True

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        self.averages.update(self.average, t=cos_G.mean())

    def change_negatives_(self, logit_GC: Tensor, target_cos_G: Tensor) -> Tensor | None:
        t = self.averages.values["t"].to(logit_GC)
        threshold_G = self.scale * torch.cos(torch.arccos(target_cos_G) + self.m2)
        hard_GC = logit_GC > threshold_G[:, None]
        cos_GC = logit_GC / self.scale
        slope_GC = torch.where(hard_GC, t + 2 * cos_GC, 1.0)
        logit_GC.mul_(torch.where(hard_GC, t + cos_GC, 1.0))
        return slope_GC

    def state(self) -> dict[str, Tensor]:
        return self.averages.values


@dataclass(frozen=True, kw_only=True)
class ElasticFace(Margin):
    """Margin drawn at random for each sample and step (Boutros et al., "ElasticFace", arXiv 2109.09416).

        target = cos(θ + E(m, σ))   (equation 6)    or    cos θ − E(m, σ)   (equation 7),    E normal

    A draw depends only on (seed, step, micro-batch, row of the global batch), so all ranks draw the same margins.
    """

    m: float
    of_angle: bool
    """Add the margin to the angle (equation 6), or subtract it from the cosine."""
    sigma: float
    seed: int
    position: list[int] = field(default_factory=lambda: [0, 0], compare=False)
    """Step, and number of the next micro-batch in it."""

    def chance_cosine(self) -> float:
        return -math.sin(self.m) if self.of_angle else -self.m

    def begin_step(self, step: int) -> None:
        self.position[:] = step, 0

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        key = key_of(self.seed, *self.position)
        self.position[1] += 1
        row_G = torch.arange(len(cos_G), device=cos_G.device)
        drawn_G = (normal(row_G, key) * self.sigma).to(cos_G.dtype)
        if not self.of_angle:
            return TargetCosine(cos_G - self.m - drawn_G, torch.ones_like(cos_G))
        angle_G = torch.arccos(cos_G) + self.m + drawn_G
        return TargetCosine(torch.cos(angle_G), torch.sin(angle_G) / sine(cos_G))


def _combined(s: MarginSettings, *, m1: float = 1.0, m2: float = 0.0, m3: float = 0.0) -> Margin:
    return CombinedMargin(
        s.scale,
        s.filter_threshold,
        m1,
        m2,
        m3,
        linear_beyond_pi=s.beyond_pi == "linear",
        straight_through=s.gradient == "straight_through",
    )


def _elastic(s: MarginSettings, seed: int, m: float, *, of_angle: bool) -> Margin:
    return ElasticFace(
        scale=s.scale, filter_threshold=s.filter_threshold, m=m, of_angle=of_angle, sigma=s.sigma, seed=seed
    )


def _or(value: float | None, published: float) -> float:
    return published if value is None else value


MARGINS: dict[str, Callable[[MarginSettings, int], Margin]] = {
    "arcface": lambda s, seed: _combined(s, m2=_or(s.m2, 0.5)),
    "cosface": lambda s, seed: _combined(s, m3=_or(s.m3, 0.4)),
    "combined": lambda s, seed: _combined(s, m1=s.m1, m2=_or(s.m2, 0.5), m3=_or(s.m3, 0.0)),
    "softmax": lambda s, seed: Margin(s.scale, s.filter_threshold),
    "adaface": lambda s, seed: AdaFace(
        scale=s.scale, filter_threshold=s.filter_threshold, m=_or(s.m2, 0.4), h=s.h, average=s.average
    ),
    "magface": lambda s, seed: MagFace(
        scale=s.scale,
        filter_threshold=s.filter_threshold,
        norms=s.norms,
        margins=s.margins,
        norm_weight=s.norm_weight,
    ),
    "curricularface": lambda s, seed: CurricularFace(
        scale=s.scale, m2=_or(s.m2, 0.5), linear_beyond_pi=True, average=s.average
    ),
    "elastic_arcface": lambda s, seed: _elastic(s, seed, _or(s.m2, 0.5), of_angle=True),
    "elastic_cosface": lambda s, seed: _elastic(s, seed, _or(s.m3, 0.35), of_angle=False),
}
"""Registry: name in the config -> function that builds the margin from its settings and a seed."""


def build_margin(settings: MarginSettings, *, seed: int = 0) -> Margin:
    """Build the margin that `settings.type` names. `seed` is for margins that draw random numbers.

    Raises:
        ConfigError: no margin has that name.
    """
    if settings.type not in MARGINS:
        raise ConfigError(
            f"head.margin.type: {settings.type!r} is not a margin; choose one of {', '.join(MARGINS)}"
        )
    return MARGINS[settings.type](settings, seed)
