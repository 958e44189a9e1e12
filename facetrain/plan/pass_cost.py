"""Operations and bytes of a pass through a network, and the memory of earlier counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Linear:
    """Number of bytes that grows in proportion to the batch, beside a constant part."""

    batch: int
    """Batch with which the bytes were counted."""
    counted: int
    per_image: float

    def __call__(self, batch: int) -> int:
        """Return the bytes for a batch."""
        return round(self.counted + self.per_image * (batch - self.batch))


@dataclass(frozen=True)
class PassCost:
    """Operations and bytes of a pass through a network: forward, or forward and backward."""

    flops_per_image: int
    """Operations without recomputation; a multiply-add counts as two."""
    launches: int
    """Kernels that the host launches."""
    moved: Linear
    """Bytes that the kernels read and write. The constant part: casts of weights, and gradients that are added up."""
    kept: Linear
    """Bytes that exist after the forward pass: activations, and weights cast to 16 bits."""
    peak: Linear
    """Largest number of bytes that exist at a time."""


def count_twice(count: Callable[[int], tuple[int, int, int, int]], batch: int, flops: int) -> PassCost:
    """Return the cost of a pass from counts with `batch` images and with twice as many.

    `count` takes a number of images, and returns the launches and the bytes that are moved, kept and needed at the
    peak; `flops` are the operations for one image.
    """
    low, high = count(batch), count(2 * batch)
    lines = [Linear(batch, low[place], (high[place] - low[place]) / batch) for place in (1, 2, 3)]
    return PassCost(flops, low[0], *lines)


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Remember the results of a function by the text of its arguments: settings with a dict have no hash.

    A search for the largest batch or for a change that makes a run fit counts the same network again and again.
    """
    results: dict[str, T] = {}

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        key = repr((args, options))
        if key not in results:
            results[key] = function(*args, **options)
        return results[key]

    return call
