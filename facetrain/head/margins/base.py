"""Base class of the margins, and their construction from the settings.

With θ the angle between an embedding and the center of its identity, most margins replace the target's cosine by

    cos(m1·θ + m2) − m3

SphereFace (arXiv 1704.08063) introduced m1, ArcFace (arXiv 1801.07698, equation 3) m2, CosFace
(arXiv 1801.09414, equation 4) m3; the combination is equation 4 of ArcFace. The cosines of all other classes,
the negatives, stay unless a margin's docstring describes a change.
"""

# G gathered batch   C classes of a chunk

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from facetrain.head.margins.registry import MARGINS
from facetrain.head.settings import MarginSettings
from facetrain.settings import imported


class TargetCosine(NamedTuple):
    """Target cosine of each sample after the margin, and its derivatives; (G,) each."""

    value_G: Tensor
    by_cos_G: Tensor
    """Derivative by the cosine before the margin."""
    by_norm_G: Tensor | None = None
    """Derivative by the embedding's norm; None: zero."""


class Margin:
    """Base class of the margins: the softmax with a scale s, and no margin."""

    needs_norms: ClassVar[bool] = False
    """The formula contains the norms of the embeddings, so each rank sends them along with its embeddings."""
    needs_all_target_cosines: ClassVar[bool] = False
    """The formula contains the target cosines of the whole batch, so all ranks exchange them."""

    def __init__(self, settings: MarginSettings, seed: int = 0) -> None:
        """Take the settings; a margin ignores those that its formula does not have."""
        self.scale, self.filter_threshold = settings.scale, settings.filter_threshold

    @property
    def changes_negatives(self) -> bool:
        """Whether the formula changes the negatives' cosines; the filter does not count."""
        return type(self).change_negatives_ is not Margin.change_negatives_

    def apply(self, cos_G: Tensor, norm_G: Tensor | None) -> TargetCosine:
        """Return the target cosines with the margin.

        `cos_G` holds the target cosines in [−1, 1], `norm_G` the norms of the embeddings if `needs_norms`.
        """
        return TargetCosine(cos_G, torch.ones_like(cos_G))

    def change_negatives_(self, logit_GC: Tensor, target_cos_G: Tensor) -> Tensor | None:
        """Change the negatives' logits in place; return the factor (G, C) on their derivatives, or None for 1.

        `target_cos_G` holds the target cosines before the margin. For samples whose class is on another rank
        it is valid only if `needs_all_target_cosines`.
        """
        if not self.filter_threshold:
            return None
        trusted_GC = logit_GC <= self.filter_threshold * self.scale
        # To 0 and not to −∞, as in arcface_torch: a filtered negative counts like a class at a right angle.
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


def build_margin(settings: MarginSettings, *, seed: int = 0) -> Margin:
    """Build the margin that `settings.type` names; `seed` is for margins that draw random numbers."""
    margin: Margin = imported(MARGINS[settings.type])(settings, seed)
    return margin


def published(value: float | None, default: float) -> float:
    """Return the value of a setting, or where it is null the published value."""
    return default if value is None else value


def sine(cos: Tensor) -> Tensor:
    """Return the sine of an angle in [0, π] from its cosine, at least √ε of the dtype.

    The derivative of an angle by its cosine, −1/sin, is infinite at cos = ±1; the bound keeps it finite.
    """
    return (1 - cos * cos).clamp_min(torch.finfo(cos.dtype).eps).sqrt()


class RunningAverages:
    """Exponential moving averages of statistics of the global batch.

    Every rank sees the same global batch, so the averages are equal on all ranks without communication.
    """

    def __init__(self, **start: float) -> None:
        # float64: with a weight of 0.01, a change below 6e-6 of a float32 average would be lost in its rounding.
        self.values = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}

    def update(self, weight: float, **batch: Tensor) -> None:
        """Move each average by `weight` toward the batch's value; ignore values that are not finite."""
        for name, value in batch.items():
            old = self.values[name] = self.values[name].to(value.device)
            new = old + weight * (value.double() - old)
            # Selected on the device: to test the value, the host would have to wait for it.
            old.copy_(torch.where(torch.isfinite(new), new, old))
