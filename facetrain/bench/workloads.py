"""Workload of the benchmark of whole steps, and the turns that the variants of a benchmark take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from facetrain.config.schema import Config

DEFAULT_CONFIG = {"data": {"train": "generated"}, "model": {"backbone": "r18"}, "train": {"batch_size": 64}}
"""Config of `facetrain bench train`."""
_IDENTITIES = 10_000


@dataclass(frozen=True)
class Turns:
    """Rounds in which the variants take turns."""

    steps: int = 5
    """Timed steps of each variant in each round."""
    rounds: int = 3
    """Repetitions; the report has the medians."""


@dataclass(frozen=True)
class RunWorkload:
    """Data and head of whole steps of a run."""

    data: Path | None = None
    """Dataset for the input `records`; None: generated images."""
    identities: int | None = None
    """Classes of the head, unless the dataset has more; None: `data.num_classes` of the config, or 10,000."""

    def num_classes(self, config: Config, in_dataset: int) -> int:
        """Return the classes of the head: each label of the dataset needs a center."""
        return max(self.identities or config.data.num_classes or _IDENTITIES, in_dataset)


def in_turn(
    variants: Mapping[str, Callable[[], float]],
    rounds: int,
    report: Callable[[str, float], None] = lambda name, result: None,
) -> dict[str, list[float]]:
    """Return what the function of each variant returns in each round; each result is also reported at once.

    The variants take turns, so that a busy machine slows all of them down by the same share.
    """
    results: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            results[name].append(result := measure())
            report(name, result)
    return results
