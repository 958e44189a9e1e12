"""A synthetic identity: the shapes and colors that all images of one face share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from facetrain.data.synthetic.random_fields import Draw, draw_fields, drawn, normal, sometimes, uniform

# RGB, dark to light.
_SKIN = np.array([[92, 58, 42], [141, 92, 66], [188, 134, 100], [222, 174, 142], [240, 204, 180]], float)
_HAIR = np.array(
    [[22, 18, 16], [52, 36, 26], [104, 66, 36], [178, 134, 74], [150, 66, 34], [150, 146, 142]], float
)
_IRIS = np.array([[62, 38, 22], [104, 72, 36], [82, 104, 66], [78, 114, 142]], float)


def _between(palette: np.ndarray) -> Draw:
    """Draw a color between two neighbors: with a few fixed ones, the color alone would identify a face."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        first, share = rng.integers(len(palette) - 1), rng.random()
        return palette[first] * (1 - share) + palette[first + 1] * share + rng.normal(0, 5, 3)

    return draw


@dataclass(frozen=True)
class Identity:
    """Shapes and colors of one face.

    Lengths are in pixels of an aligned crop of 112 × 112; the origin is the tip of the nose, x grows to the right and y
    downward. Colors are float64 (3,), RGB from 0 to 255.
    """

    skin: np.ndarray = drawn(_between(_SKIN))
    hair: np.ndarray = drawn(_between(_HAIR))
    iris: np.ndarray = drawn(_between(_IRIS))
    lip_tint: np.ndarray = drawn(lambda rng: rng.normal((0.92, 0.66, 0.68), 0.05))
    """Color of the lips as a fraction of that of the skin."""
    forehead_width: float = normal(34.5, 4.0)
    cheek_width: float = normal(38.5, 4.0)
    jaw_width: float = normal(29.5, 5.8)
    jaw_height: float = normal(25, 4.4)
    chin_width: float = normal(12.5, 5.0)
    ear_size: float = normal(8, 2.5)
    eye_distance: float = normal(17.6, 2.5)
    eye_height: float = normal(-20, 2.7)
    eye_width: float = normal(7.6, 1.5)
    eye_opening: float = normal(3.5, 1.2)
    eye_tilt: float = normal(0.04, 0.15)
    brow_height: float = normal(-31, 3.4)
    brow_width: float = normal(10.5, 2.4)
    brow_thickness: float = normal(2.6, 1.5)
    brow_arch: float = normal(2.4, 2.4)
    brow_tilt: float = normal(0, 0.17)
    nose_length: float = normal(5.0, 3.4)
    nose_width: float = normal(8.4, 2.5)
    bridge_width: float = normal(3.4, 1.5)
    mouth_height: float = normal(20.5, 3.0)
    mouth_width: float = normal(14, 3.2)
    upper_lip: float = normal(3, 1.5)
    lower_lip: float = normal(4, 1.9)
    hairline: float = normal(-47, 7)
    hair_volume: float = normal(7, 5)
    hair_length: float = uniform(-15, 60)
    parting: float = normal(0, 9)
    moustache: float = sometimes(0.2, 0.4, 0.9)
    """Opacity, as that of the beard."""
    beard: float = sometimes(0.25, 0.3, 0.8)
    moles: np.ndarray = drawn(lambda rng: rng.uniform((-28, -14, 0.9), (28, 34, 2.0), (rng.poisson(0.8), 3)))
    """Position (x, y) and radius of each mole, (N, 3)."""


@lru_cache(maxsize=1024)
def sample_identity(seed: int, number: int) -> Identity:
    """Return identity `number`: a pure function of the seed and the number."""
    return draw_fields(Identity, np.random.default_rng([seed, number, 1]))
