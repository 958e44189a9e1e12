"""Capture conditions: everything that differs between two images of one synthetic identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from facetrain.data.synthetic.identity import draw_fields, drawn

Color = tuple[float, float, float]
"""RGB, 0 to 255."""


def _normal(mean: float, spread: float, low: float = -np.inf, high: float = np.inf) -> Any:
    return drawn(lambda rng: float(np.clip(rng.normal(mean, spread), low, high)))


def _factor(spread: float) -> Any:
    return drawn(lambda rng: float(np.exp(rng.normal(0, spread))))


def _uniform(low: float, high: float) -> Any:
    return drawn(lambda rng: float(rng.uniform(low, high)))


def _point(spread: float, spread_down: float) -> Any:
    return drawn(lambda rng: (float(rng.normal(0, spread)), float(rng.normal(0, spread_down))))


def _maybe(probability: float, draw: Callable[[np.random.Generator], Any], otherwise: Any) -> Any:
    """Declare a field that is drawn with a probability, and has another value otherwise."""
    return drawn(lambda rng: draw(rng) if rng.random() < probability else otherwise)


def _color(rng: np.random.Generator, low: float, high: float) -> Color:
    red, green, blue = rng.uniform(low, high, 3).tolist()
    return red, green, blue


@dataclass(frozen=True)
class CaptureConditions:
    """Pose, expression, light, occlusion and camera of one image, and the distributions that they are drawn from.

    Angles are in radians. Lengths are in pixels of an aligned 112 × 112 crop. Colors are RGB from 0 to 255.
    Expressions are relative: 0 is neutral, 1 is strong. The order of the fields is the order of the draws and defines
    the images: a field in between changes all of them.
    """

    warmth: float = _normal(0, 0.14)
    """Logarithm of the gain of red, and of the loss of blue."""
    tint: float = _normal(0, 0.06)
    """Logarithm of the gain of green."""
    exposure: float = _factor(0.2)
    light_right: float = _uniform(-1.0, 1.0)
    yaw: float = _normal(0, 0.16, -0.45, 0.45)
    pitch: float = _normal(0, 0.09, -0.25, 0.25)
    roll: float = _normal(0, 0.05)
    scale: float = _factor(0.035)
    shift: tuple[float, float] = _point(1.2, 1.2)
    """Offset of the face from its aligned position: x, y."""
    smile: float = _normal(0.2, 0.4, -0.5, 1.0)
    mouth_open: float = _normal(-0.2, 0.5, 0.0)
    eyes_closed: float = drawn(lambda rng: 0.9 if rng.random() < 0.05 else float(rng.uniform(0, 0.35)))
    brows_up: float = _normal(0, 1.0)
    gaze: tuple[float, float] = _point(0.3, 0.15)
    light_down: float = _uniform(-0.9, 0.25)
    light_toward: float = _uniform(0.35, 1.0)
    """Direction from the face to the light, with `light_right` and `light_down`: toward the camera."""
    ambient: float = _uniform(0.4, 0.75)
    """Fraction of the light that comes from all directions."""
    gamma: float = _factor(0.14)
    background: tuple[Color, Color, float] = drawn(
        lambda rng: (_color(rng, 20, 235), _color(rng, 20, 235), float(rng.uniform(0, 2 * np.pi)))
    )
    """Two colors, and the angle of the gradient between them."""
    clothes: tuple[float, float, float] = drawn(lambda rng: _color(rng, 10, 230))
    glasses: int = _maybe(0.07, lambda rng: int(rng.integers(1, 4)), 0)
    """0 none, 1 round, 2 rectangular, 3 sunglasses."""
    glasses_color: float = _uniform(10, 90)
    """Gray level of the frame."""
    mask: bool = _maybe(0.01, lambda _: True, False)
    hat: tuple[float, float, float] | None = _maybe(0.05, lambda rng: _color(rng, 10, 230), None)
    hand: tuple[float, float, float] | None = _maybe(
        0.03, lambda rng: tuple(rng.uniform((-40, -5, 9), (40, 40, 15)).tolist()), None
    )
    """Position (x, y) and radius of a hand in front of the face."""
    blur: float = _maybe(0.12, lambda rng: float(rng.uniform(0.5, 1.2)), 0.0)
    """Standard deviation of the Gaussian blur."""
    noise: float = _uniform(0, 7)
    """Standard deviation of the sensor noise, in gray levels."""
    resolution: float = _maybe(0.12, lambda rng: float(rng.uniform(0.5, 0.8)), 1.0)
    """Side of the captured image as a fraction of the output side."""
    gray: bool = _maybe(0.06, lambda _: True, False)
    quality: int = drawn(lambda rng: int(rng.integers(55, 96)))
    """JPEG quality, 1 to 100."""
    seed: int = drawn(lambda rng: int(rng.integers(2**31)))
    """Seed of the sensor noise."""


def sample_conditions(seed: int, identity: int, image: int) -> CaptureConditions:
    """Sample the conditions of one image: a pure function of the seed, the identity and the image number."""
    rng = np.random.default_rng([seed, identity, image, 2])
    return CaptureConditions(**draw_fields(CaptureConditions, rng))
