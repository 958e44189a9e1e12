"""Dataclasses whose fields state the distribution that they are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar

import numpy as np

Draw = Callable[[np.random.Generator], Any]
T = TypeVar("T")


def drawn(draw: Draw) -> Any:
    """Declare a field that is drawn by a function of a generator."""
    return field(metadata={"draw": draw})


def normal(mean: float, spread: float) -> Any:
    """Declare a normally distributed field, at most 1.8 standard deviations from its mean.

    A face with several extreme values at once would not look like a face.
    """
    return drawn(lambda rng: mean + spread * min(max(rng.standard_normal(), -1.8), 1.8))


def uniform(low: float, high: float) -> Any:
    """Declare a uniformly distributed field."""
    return drawn(lambda rng: rng.uniform(low, high))


def sometimes(probability: float, low: float, high: float) -> Any:
    """Declare a field that is uniform with a probability, and 0 otherwise."""
    return drawn(lambda rng: rng.uniform(low, high) if rng.random() < probability else 0.0)


def draw_fields(kind: type[T], rng: np.random.Generator) -> T:
    """Return an instance of a dataclass with drawn fields.

    The order of the fields is the order of the draws: a new field in between changes those after it.
    """
    return kind(**{each.name: each.metadata["draw"](rng) for each in fields(kind)})  # type: ignore[arg-type]
