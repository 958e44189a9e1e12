"""A synthetic photo: everything that differs between two images of one identity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.data.synthetic.random_fields import draw_fields, drawn, normal, sometimes, uniform


def _draw_light(rng: np.random.Generator) -> np.ndarray:
    """Draw an exposure, a color of the light, and a direction."""
    exposure, color, corners = rng.normal(-0.1, 0.2), rng.normal(0, 0.12, 3), rng.normal(0, 0.35, (2, 2, 1))
    return np.exp(exposure + color + corners).astype(np.float32)


@dataclass(frozen=True)
class Photo:
    """Pose, expression, light, occlusion and camera of one image.

    Angles are in radians, lengths in pixels of an aligned crop of 112 × 112. Expressions are relative: 0 is neutral, 1
    is strong.
    """

    yaw: float = normal(0, 0.2)
    pitch: float = normal(0, 0.1)
    roll: float = normal(0, 0.06)
    size: float = normal(1, 0.04)
    shift: np.ndarray = drawn(lambda rng: rng.normal(0, 2, 2))
    """Offset of the face from its aligned position: x, y."""
    smile: float = normal(0.2, 0.4)
    mouth_open: float = sometimes(0.4, 0.1, 1)
    eyes_closed: float = uniform(0, 0.4)
    brows_up: float = normal(0, 1)
    gaze: float = normal(0, 1)
    light: np.ndarray = drawn(_draw_light)
    """Gain of red, green and blue in the corners of the image, float32 (2, 2, 3)."""
    background: np.ndarray = drawn(lambda rng: rng.integers(20, 236, (2, 2, 3)).astype(np.uint8))
    """Colors of the corners, uint8 (2, 2, 3)."""
    clothes: np.ndarray = drawn(lambda rng: rng.uniform(10, 230, 3))
    glasses: float = sometimes(0.08, 10, 90)
    """Gray level of the frame; 0 for no glasses."""
    mask: bool = drawn(lambda rng: rng.random() < 0.01)
    blur: float = sometimes(0.15, 0.5, 1.2)
    """Standard deviation of the Gaussian blur."""
    noise: float = uniform(0, 7)
    """Standard deviation of the sensor noise, in gray levels."""
    gray: bool = drawn(lambda rng: rng.random() < 0.06)
    quality: int = drawn(lambda rng: int(rng.integers(55, 96)))
    """JPEG quality, 1 to 100."""
    noise_seed: int = drawn(lambda rng: int(rng.integers(2**31)))


def sample_photo(seed: int, identity: int, number: int) -> Photo:
    """Return photo `number` of an identity: a pure function of the seed and both numbers."""
    return draw_fields(Photo, np.random.default_rng([seed, identity, number, 2]))
