"""ElasticFace: a margin drawn at random for each sample and step."""

# G gathered batch

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from facetrain.counter_rng import key_of, normal
from facetrain.head.margins.base import Margin, angle


class ElasticFace(Margin):
    """Margin drawn at random for each sample and step (Boutros et al., "ElasticFace", arXiv 2109.09416).

        target = cos(θ + E(m, σ))   (equation 6)    or    cos θ − E(m, σ)   (equation 7),    E normal

    A draw depends only on (seed, step, row of the step's images), so all ranks draw the same margins, and a step in
    several micro-batches the same as a step in one.
    """

    sigma: ClassVar[float] = 0.05
    """Deviation σ of the margin. The authors train both types with it (fdbtrs/ElasticFace, config/config.py, commit
    5496ec0); the 0.0125 in the signatures of their losses is used by none of their configs."""

    def __init__(self, *, mean: float, **common: Any) -> None:
        """Take the mean m of the margin."""
        super().__init__(**common)
        self.mean = mean
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self._step, self._first, self._stop = step, 0, 0

    def update_averages(self, norm_G: Tensor | None, cos_G: Tensor) -> None:
        # Not in `_draw`: an evaluation between two micro-batches would count, too.
        self._first, self._stop = self._stop, self._stop + len(cos_G)

    def _draw(self, cos_G: Tensor) -> Tensor:
        """Return E(0, σ) of each sample of a micro-batch, (G,)."""
        # By row and not by identity: all ranks gather the same rows in the same order, and two images of a person
        # differ.
        row_G = torch.arange(self._first, self._first + len(cos_G), device=cos_G.device)
        return (normal(row_G, key_of(self.seed, self._step, 0)) * self.sigma).to(cos_G.dtype)


class ElasticArcFace(ElasticFace):
    """Random margin of the angle."""

    def __init__(self, *, m2: float = 0.5, **common: Any) -> None:
        super().__init__(mean=m2, **common)

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        return torch.cos(angle(cos_G) + self.mean + self._draw(cos_G))


class ElasticCosFace(ElasticFace):
    """Random margin of the cosine."""

    def __init__(self, *, m3: float = 0.35, **common: Any) -> None:
        super().__init__(mean=m3, **common)

    def target(self, cos_G: Tensor, norm_G: Tensor | None) -> Tensor:
        return cos_G - self.mean - self._draw(cos_G)
