"""Number and seed of the bootstrap draws, without NumPy: the options of the command line contain them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draws:
    """Bootstrap draws of subjects."""

    number: int = 1000
    """Number of draws; 0 gives no intervals."""
    seed: int = 0


DRAWS = Draws()
"""The draws by default."""
