"""Who somebody is: the shapes and colors that stay from image to image.

Lengths are in pixels of an aligned 112 × 112 crop, counted from the tip of the nose; x grows to the
right, y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Color = tuple[float, float, float]

# Dark to light, RGB; people are drawn between two neighbors, so that no tone belongs to one person.
_SKIN = np.array([[92, 58, 42], [141, 92, 66], [188, 134, 100], [222, 174, 142], [240, 204, 180]], float)
_HAIR = np.array(
    [[22, 18, 16], [52, 36, 26], [104, 66, 36], [178, 134, 74], [150, 66, 34], [150, 146, 142]], float
)
_IRIS = np.array([[62, 38, 22], [104, 72, 36], [82, 104, 66], [78, 114, 142]], float)


@dataclass(frozen=True)
class Identity:
    """One person."""

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


@lru_cache(maxsize=1024)
def draw_identity(seed: int, number: int) -> Identity:
    """Return person `number` of a seed."""
    rng = np.random.default_rng([seed, number, 1])

    def near(mean: float, spread: float) -> float:
        # Clipped: people differ, and nobody is a monster.
        return float(mean + 1.7 * spread * np.clip(rng.normal(), -1.8, 1.8))

    def some(probability: float, low: float, high: float) -> float:
        value = rng.uniform(low, high)
        return float(value) if rng.random() < probability else 0.0

    skin = _between(_SKIN, rng)
    return Identity(
        skin=_color(skin),
        hair=_color(_between(_HAIR, rng)),
        iris=_color(_between(_IRIS, rng)),
        lips=_color(skin * np.array([0.92, 0.66, 0.68]) + rng.normal(0, 7, 3)),
        cheek_width=near(38.5, 2.4),
        jaw_width=near(29.5, 3.4),
        jaw_height=near(25, 2.6),
        chin_width=near(12.5, 3.0),
        forehead_width=near(34.5, 2.4),
        eye_distance=near(17.6, 1.5),
        eye_height=near(-20, 1.6),
        eye_width=near(7.6, 0.9),
        eye_opening=near(3.5, 0.7),
        eye_tilt=near(0.04, 0.09),
        lid=near(1.6, 0.8),
        brow_height=near(-31, 2.0),
        brow_width=near(10.5, 1.4),
        brow_thickness=near(2.6, 0.9),
        brow_arch=near(2.4, 1.4),
        brow_tilt=near(0.0, 0.1),
        nose_length=near(5.0, 2.0),
        nose_width=near(8.4, 1.5),
        bridge_width=near(3.4, 0.9),
        nose_round=near(1.0, 0.3),
        mouth_height=near(20.5, 1.8),
        mouth_width=near(14.0, 1.9),
        upper_lip=near(3.0, 0.9),
        lower_lip=near(4.0, 1.1),
        cupid_bow=near(1.0, 0.5),
        hairline=near(-51, 4.5),
        hair_volume=near(7, 3.0),
        hair_length=near(10, 24),
        parting=near(0, 13),
        fringe=some(0.35, 3, 15),
        ear_size=near(8, 1.5),
        moustache=some(0.18, 0.4, 0.9),
        beard=some(0.2, 0.25, 0.75),
        folds=some(0.4, 0.15, 0.5),
        freckles=some(0.2, 0.3, 1.0),
        moles=tuple(
            (float(rng.uniform(-28, 28)), float(rng.uniform(-14, 34)), float(rng.uniform(0.9, 1.8)))
            for _ in range(rng.poisson(0.8))
        ),
    )


def _between(palette: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    first = rng.integers(len(palette) - 1)
    share = rng.random()
    return palette[first] * (1 - share) + palette[first + 1] * share + rng.normal(0, 5, 3)


def _color(values: np.ndarray) -> Color:
    red, green, blue = np.clip(values, 5, 250).tolist()
    return red, green, blue
