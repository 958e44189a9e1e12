"""Options of an evaluation by the published protocols, which the command line and the Python interface share."""

from __future__ import annotations

from dataclasses import dataclass

from facetrain.errors import UsageError
from facetrain.verify.metrics.draws import DRAWS, LEAST_DRAWS, Draws


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of the protocols."""

    slice_fmr: float | None = None
    """FMR over all impostor pairs that defines the threshold of the slices; None for the mean of the folds."""
    bootstrap: int = DRAWS.number
    """Bootstrap draws of subjects: `LEAST_DRAWS` or more, or 0 for no intervals."""
    seed: int = DRAWS.seed
    """Seed of the draws."""
    flip: bool = True
    """Add the embedding of the mirror image. Sets of pairs always use both, as their protocol prescribes."""

    def __post_init__(self) -> None:
        if 0 < self.bootstrap < LEAST_DRAWS:
            raise UsageError(
                f"bootstrap {self.bootstrap}: a 95 % interval needs at least {LEAST_DRAWS} draws; give 0 for none"
            )

    @property
    def draws(self) -> Draws:
        """Draws of the bootstrap."""
        return Draws(self.bootstrap, self.seed)
