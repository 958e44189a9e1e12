"""Limits of a run on given memory: the largest batch, and the most identities."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from facetrain.config.schema import Config
from facetrain.plan.forecast import forecast_stages

USABLE = 0.95
"""Share of a device's memory that a plan may fill. The rest is for what is lost between the allocator's blocks."""
_LARGEST_ANSWER = 1 << 34
"""The search for a limit ends here: no dataset has so many identities."""


class MemoryBudget(NamedTuple):
    """Ranks of a run, and the memory that each may fill."""

    gpus: int
    """Ranks of the whole run; processes if `cuda` is false."""
    memory: int
    """Bytes of one GPU, or of one process."""
    cuda: bool = True
    """Whether the run is on GPUs; else it is on a CPU."""

    def fits(self, config: Config, num_classes: int, *, batch: int | None = None) -> bool:
        """Return whether the rank that needs most fits in all stages. For `batch`, see `forecast_stages`."""
        largest = forecast_stages(config, num_classes, self.gpus, batch=batch, cuda=self.cuda)
        return largest.needed.total <= USABLE * self.memory

    def largest_batch(self, config: Config, num_classes: int) -> int:
        """Return the most images per rank and micro-batch that fit; 0 if not even two fit."""
        return _largest_that(lambda batch: self.fits(config, num_classes, batch=batch))

    def most_identities(self, config: Config) -> int:
        """Return the most classes that fit with the config's batch; 0 if the backbone alone does not fit."""
        if config.head.placement == "disk":
            return _LARGEST_ANSWER
        return _largest_that(lambda classes: self.fits(config, classes), smallest=self.gpus)


def _largest_that(fits_with: Callable[[int], bool], smallest: int = 2) -> int:
    """Return the largest number that fits, by doubling and bisection; 0 if `smallest` does not fit."""
    if not fits_with(smallest):
        return 0
    low, high = smallest, 2 * smallest
    while high < _LARGEST_ANSWER and fits_with(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_with(middle) else (low, middle)
    return low
