"""Synthetic identities: the shapes and colors that all images of one face share.

Lengths are in pixels of an aligned 112 × 112 crop. The origin is the tip of the nose; x grows to the right and y
grows downward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Color = tuple[float, float, float]

# RGB, dark to light. Colors are interpolated between two neighbors: with a few fixed tones, the color alone
# would identify the face.
_SKIN = np.array([[92, 58, 42], [141, 92, 66], [188, 134, 100], [222, 174, 142], [240, 204, 180]], float)
_HAIR = np.array(
    [[22, 18, 16], [52, 36, 26], [104, 66, 36], [178, 134, 74], [150, 66, 34], [150, 146, 142]], float
)
_IRIS = np.array([[62, 38, 22], [104, 72, 36], [82, 104, 66], [78, 114, 142]], float)


@dataclass(frozen=True)
class Identity:
    """Shape and color parameters of one face."""

    skin: Color
    hair: Color
    iris: Color
    lips: Color
    cheek_width: float
    jaw_width: float
    jaw_height: float
    chin_width: float
    forehead_width: float
    eye_distance: float
    eye_height: float
    eye_width: float
    eye_opening: float
    eye_tilt: float
    lid: float
    brow_height: float
    brow_width: float
    brow_thickness: float
    brow_arch: float
    brow_tilt: float
    nose_length: float
    nose_width: float
    bridge_width: float
    nose_round: float
    mouth_height: float
    mouth_width: float
    upper_lip: float
    lower_lip: float
    cupid_bow: float
    hairline: float
    hair_volume: float
    hair_length: float
    parting: float
    fringe: float
    ear_size: float
    moustache: float
    beard: float
    folds: float
    freckles: float
    moles: tuple[tuple[float, float, float], ...]
    """Position (x, y) and radius of each mole."""


@lru_cache(maxsize=1024)
def sample_identity(seed: int, number: int) -> Identity:
    """Sample identity `number`: a pure function of the seed and the number."""
    # The order of the draws from `rng` defines the faces: a draw that is added in between changes all of them.
    rng = np.random.default_rng([seed, number, 1])

    def normal(mean: float, spread: float) -> float:
        # Clipped: a face with several extreme values at once would not look like a face.
        return float(mean + 1.7 * spread * np.clip(rng.normal(), -1.8, 1.8))

    def optional(probability: float, low: float, high: float) -> float:
        value = rng.uniform(low, high)
        return float(value) if rng.random() < probability else 0.0

    skin = _interpolate(_SKIN, rng)
    return Identity(
        skin=_color(skin),
        hair=_color(_interpolate(_HAIR, rng)),
        iris=_color(_interpolate(_IRIS, rng)),
        lips=_color(skin * np.array([0.92, 0.66, 0.68]) + rng.normal(0, 7, 3)),
        cheek_width=normal(38.5, 2.4),
        jaw_width=normal(29.5, 3.4),
        jaw_height=normal(25, 2.6),
        chin_width=normal(12.5, 3.0),
        forehead_width=normal(34.5, 2.4),
        eye_distance=normal(17.6, 1.5),
        eye_height=normal(-20, 1.6),
        eye_width=normal(7.6, 0.9),
        eye_opening=normal(3.5, 0.7),
        eye_tilt=normal(0.04, 0.09),
        lid=normal(1.6, 0.8),
        brow_height=normal(-31, 2.0),
        brow_width=normal(10.5, 1.4),
        brow_thickness=normal(2.6, 0.9),
        brow_arch=normal(2.4, 1.4),
        brow_tilt=normal(0.0, 0.1),
        nose_length=normal(5.0, 2.0),
        nose_width=normal(8.4, 1.5),
        bridge_width=normal(3.4, 0.9),
        nose_round=normal(1.0, 0.3),
        mouth_height=normal(20.5, 1.8),
        mouth_width=normal(14.0, 1.9),
        upper_lip=normal(3.0, 0.9),
        lower_lip=normal(4.0, 1.1),
        cupid_bow=normal(1.0, 0.5),
        hairline=normal(-51, 4.5),
        hair_volume=normal(7, 3.0),
        hair_length=normal(10, 24),
        parting=normal(0, 13),
        fringe=optional(0.35, 3, 15),
        ear_size=normal(8, 1.5),
        moustache=optional(0.18, 0.4, 0.9),
        beard=optional(0.2, 0.25, 0.75),
        folds=optional(0.4, 0.15, 0.5),
        freckles=optional(0.2, 0.3, 1.0),
        moles=tuple(
            (float(rng.uniform(-28, 28)), float(rng.uniform(-14, 34)), float(rng.uniform(0.9, 1.8)))
            for _ in range(rng.poisson(0.8))
        ),
    )


def _interpolate(palette: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a color between two neighbors of a palette, with a little noise: float64 (3,)."""
    first = rng.integers(len(palette) - 1)
    share = rng.random()
    return palette[first] * (1 - share) + palette[first + 1] * share + rng.normal(0, 5, 3)


def _color(values: np.ndarray) -> Color:
    red, green, blue = np.clip(values, 5, 250).tolist()
    return red, green, blue
