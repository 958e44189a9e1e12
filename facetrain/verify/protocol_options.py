"""Options of an evaluation by the published protocols, which the command line and the Python interface share."""

from __future__ import annotations

from dataclasses import dataclass

from facetrain.verify.metrics.draws import DRAWS, Draws


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of the protocols."""

    slice_fmr: float | None = None
    """FMR over all impostor pairs that defines the threshold of the slices; None for the mean of the folds."""
    bootstrap: int = DRAWS.number
    """Bootstrap draws of subjects; 0 gives no intervals."""
    seed: int = DRAWS.seed
    """Seed of the draws."""
    flip: bool = True
    """Add the embedding of the mirror image. Sets of pairs always use both, as their protocol prescribes."""

    @property
    def draws(self) -> Draws:
        """Draws of the bootstrap."""
        return Draws(self.bootstrap, self.seed)
