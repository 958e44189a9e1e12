"""Synthetic identities: the shapes and colors that all images of one face share.

Lengths are in pixels of an aligned 112 × 112 crop. The origin is the tip of the nose; x grows to the right and y
grows downward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

# RGB, dark to light. Colors are interpolated between two neighbors: with a few fixed tones, the color alone
# would identify the face.
_SKIN = np.array([[92, 58, 42], [141, 92, 66], [188, 134, 100], [222, 174, 142], [240, 204, 180]], float)
_HAIR = np.array(
    [[22, 18, 16], [52, 36, 26], [104, 66, 36], [178, 134, 74], [150, 66, 34], [150, 146, 142]], float
)
_IRIS = np.array([[62, 38, 22], [104, 72, 36], [82, 104, 66], [78, 114, 142]], float)


def drawn(draw: Callable[[np.random.Generator], Any]) -> Any:
    """Declare a field that is drawn by a function of a generator."""
    return field(metadata={"draw": draw})


def draw_fields(kind: type[Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw the values of a dataclass's fields, in their order."""
    return {trait.name: trait.metadata["draw"](rng) for trait in fields(kind) if trait.metadata}


def _normal(mean: float, spread: float) -> Any:
    # Clipped: a face with several extreme values at once would not look like a face.
    return drawn(lambda rng: float(mean + 1.7 * spread * np.clip(rng.normal(), -1.8, 1.8)))


def _optional(probability: float, low: float, high: float) -> Any:
    def draw(rng: np.random.Generator) -> float:
        value = rng.uniform(low, high)
        return float(value) if rng.random() < probability else 0.0

    return drawn(draw)


def _sample_moles(rng: np.random.Generator) -> tuple[tuple[float, float, float], ...]:
    return tuple(
        (float(rng.uniform(-28, 28)), float(rng.uniform(-14, 34)), float(rng.uniform(0.9, 1.8)))
        for _ in range(rng.poisson(0.8))
    )


@dataclass(frozen=True)
class Identity:
    """Shape and color parameters of one face, and the distributions that they are drawn from.

    The order of the fields is the order of the draws and defines the faces: a field in between changes all of them.
    """

    skin: np.ndarray
    """RGB, 0 to 255, as the other colors."""
    hair: np.ndarray
    iris: np.ndarray
    lips: np.ndarray
    cheek_width: float = _normal(38.5, 2.4)
    jaw_width: float = _normal(29.5, 3.4)
    jaw_height: float = _normal(25, 2.6)
    chin_width: float = _normal(12.5, 3.0)
    forehead_width: float = _normal(34.5, 2.4)
    eye_distance: float = _normal(17.6, 1.5)
    eye_height: float = _normal(-20, 1.6)
    eye_width: float = _normal(7.6, 0.9)
    eye_opening: float = _normal(3.5, 0.7)
    eye_tilt: float = _normal(0.04, 0.09)
    lid: float = _normal(1.6, 0.8)
    brow_height: float = _normal(-31, 2.0)
    brow_width: float = _normal(10.5, 1.4)
    brow_thickness: float = _normal(2.6, 0.9)
    brow_arch: float = _normal(2.4, 1.4)
    brow_tilt: float = _normal(0.0, 0.1)
    nose_length: float = _normal(5.0, 2.0)
    nose_width: float = _normal(8.4, 1.5)
    bridge_width: float = _normal(3.4, 0.9)
    nose_round: float = _normal(1.0, 0.3)
    mouth_height: float = _normal(20.5, 1.8)
    mouth_width: float = _normal(14.0, 1.9)
    upper_lip: float = _normal(3.0, 0.9)
    lower_lip: float = _normal(4.0, 1.1)
    cupid_bow: float = _normal(1.0, 0.5)
    hairline: float = _normal(-51, 4.5)
    hair_volume: float = _normal(7, 3.0)
    hair_length: float = _normal(10, 24)
    parting: float = _normal(0, 13)
    fringe: float = _optional(0.35, 3, 15)
    ear_size: float = _normal(8, 1.5)
    moustache: float = _optional(0.18, 0.4, 0.9)
    beard: float = _optional(0.2, 0.25, 0.75)
    folds: float = _optional(0.4, 0.15, 0.5)
    freckles: float = _optional(0.2, 0.3, 1.0)
    moles: tuple[tuple[float, float, float], ...] = drawn(_sample_moles)
    """Position (x, y) and radius of each mole."""


@lru_cache(maxsize=1024)
def sample_identity(seed: int, number: int) -> Identity:
    """Sample identity `number`: a pure function of the seed and the number."""
    rng = np.random.default_rng([seed, number, 1])
    skin, hair, iris = (_interpolate(palette, rng) for palette in (_SKIN, _HAIR, _IRIS))
    lips = skin * np.array([0.92, 0.66, 0.68]) + rng.normal(0, 7, 3)
    colors = (np.clip(color, 5, 250) for color in (skin, hair, iris, lips))
    return Identity(*colors, **draw_fields(Identity, rng))


def _interpolate(palette: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a color between two neighbors of a palette, with a little noise: float64 (3,)."""
    first = rng.integers(len(palette) - 1)
    share = rng.random()
    return palette[first] * (1 - share) + palette[first + 1] * share + rng.normal(0, 5, 3)
