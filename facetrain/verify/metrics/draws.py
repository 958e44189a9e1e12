"""Number and seed of the bootstrap draws, without NumPy: the options of the command line contain them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draws:
    """Bootstrap draws of subjects."""

    number: int = 1000
    """Number of draws; 0 gives no intervals."""
    seed: int = 0


LEAST_DRAWS = 39
"""Draws without which no tail of 2.5 % can be seen, that is 1 / (R + 1): an end of a 95 % interval would be a guess."""
DRAWS = Draws()
"""The draws by default."""
