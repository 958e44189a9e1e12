"""ElasticFace: a margin drawn at random for each sample and step."""

# G gathered batch

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from facetrain.counter_rng import key_of, normal
from facetrain.head.margins.base import Margin, TargetCosine, published, sine
from facetrain.head.settings import MarginSettings


class ElasticFace(Margin):
    """Margin drawn at random for each sample and step (Boutros et al., "ElasticFace", arXiv 2109.09416).

        target = cos(θ + E(m, σ))   (equation 6)    or    cos θ − E(m, σ)   (equation 7),    E normal

    A draw depends only on (seed, step, micro-batch, row of the global batch), so all ranks draw the same margins.
    """

    sigma: ClassVar[float] = 0.0125

    def __init__(self, settings: MarginSettings, seed: int, mean: float, *, of_angle: bool) -> None:
        """Take the mean m; `of_angle`: add the margin to the angle, and do not subtract it from the cosine."""
        super().__init__(settings)
        self._mean, self._of_angle, self._seed = mean, of_angle, seed
        self._step, self._micro_batch = 0, 0

    def begin_step(self, step: int) -> None:
        self._step, self._micro_batch = step, 0

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        key = key_of(self._seed, self._step, self._micro_batch)
        # `apply` is called once for each micro-batch of a step.
        self._micro_batch += 1
        # By row and not by identity: all ranks gather the same rows in the same order, and two images of a person
        # differ.
        row_G = torch.arange(len(cos_G), device=cos_G.device)
        drawn_G = (normal(row_G, key) * self.sigma).to(cos_G.dtype)
        if not self._of_angle:
            return TargetCosine(cos_G - self._mean - drawn_G, torch.ones_like(cos_G))
        angle_G = torch.arccos(cos_G) + self._mean + drawn_G
        return TargetCosine(torch.cos(angle_G), torch.sin(angle_G) / sine(cos_G))


def elastic_arcface(settings: MarginSettings, seed: int) -> Margin:
    """Build the margin of the angle."""
    return ElasticFace(settings, seed, published(settings.m2, 0.5), of_angle=True)


def elastic_cosface(settings: MarginSettings, seed: int) -> Margin:
    """Build the margin of the cosine."""
    return ElasticFace(settings, seed, published(settings.m3, 0.35), of_angle=False)
