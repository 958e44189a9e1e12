"""Capture conditions: everything that differs between two images of one synthetic identity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CaptureConditions:
    """Pose, expression, light, occlusion and camera of one image.

    Angles are in radians. Lengths are in pixels of an aligned 112 × 112 crop. Colors are RGB from 0 to 255.
    Expressions are relative: 0 is neutral, 1 is strong.
    """

    yaw: float
    pitch: float
    roll: float
    scale: float
    shift: tuple[float, float]
    """Offset of the face from its aligned position: x, y."""
    smile: float
    mouth_open: float
    eyes_closed: float
    brows_up: float
    gaze: tuple[float, float]
    light: tuple[float, float, float]
    """Direction from the face to the light: right, down, toward the camera."""
    ambient: float
    """Fraction of the light that comes from all directions."""
    gains: tuple[float, float, float]
    """Factors on red, green and blue: exposure and color of the light."""
    gamma: float
    background: tuple[tuple[float, float, float], tuple[float, float, float], float]
    """Two colors, and the angle of the gradient between them."""
    clothes: tuple[float, float, float]
    glasses: int
    """0 none, 1 round, 2 rectangular, 3 sunglasses."""
    glasses_color: float
    """Gray level of the frame."""
    mask: bool
    hat: tuple[float, float, float] | None
    hand: tuple[float, float, float] | None
    """Position (x, y) and radius of a hand in front of the face."""
    blur: float
    """Standard deviation of the Gaussian blur."""
    noise: float
    """Standard deviation of the sensor noise, in gray levels."""
    resolution: float
    """Side of the captured image as a fraction of the output side."""
    gray: bool
    quality: int
    """JPEG quality, 1 to 100."""
    seed: int
    """Seed of the sensor noise."""


def sample_conditions(seed: int, identity: int, image: int) -> CaptureConditions:
    """Sample the conditions of one image: a pure function of the seed, the identity and the image number."""
    # The order of the draws from `rng` defines the images: a draw that is added in between changes all of them.
    rng = np.random.default_rng([seed, identity, image, 2])

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    def color(low: float, high: float) -> tuple[float, float, float]:
        red, green, blue = rng.uniform(low, high, 3).tolist()
        return red, green, blue

    warmth, tint = rng.normal(0, 0.14), rng.normal(0, 0.06)
    exposure = np.exp(rng.normal(0, 0.2))
    side = rng.uniform(-1.0, 1.0)
    return CaptureConditions(
        yaw=float(np.clip(rng.normal(0, 0.16), -0.45, 0.45)),
        pitch=float(np.clip(rng.normal(0, 0.09), -0.25, 0.25)),
        roll=float(rng.normal(0, 0.05)),
        scale=float(np.exp(rng.normal(0, 0.035))),
        shift=(float(rng.normal(0, 1.2)), float(rng.normal(0, 1.2))),
        smile=float(np.clip(rng.normal(0.2, 0.4), -0.5, 1.0)),
        mouth_open=float(max(0.0, rng.normal(-0.2, 0.5))),
        eyes_closed=0.9 if chance(0.05) else float(rng.uniform(0, 0.35)),
        brows_up=float(rng.normal(0, 1.0)),
        gaze=(float(rng.normal(0, 0.3)), float(rng.normal(0, 0.15))),
        light=(float(side), float(rng.uniform(-0.9, 0.25)), float(rng.uniform(0.35, 1.0))),
        ambient=float(rng.uniform(0.4, 0.75)),
        gains=(
            float(exposure * np.exp(warmth)),
            float(exposure * np.exp(tint)),
            float(exposure * np.exp(-warmth)),
        ),
        gamma=float(np.exp(rng.normal(0, 0.14))),
        background=(color(20, 235), color(20, 235), float(rng.uniform(0, 2 * np.pi))),
        clothes=color(10, 230),
        glasses=int(rng.integers(1, 4)) if chance(0.07) else 0,
        glasses_color=float(rng.uniform(10, 90)),
        mask=chance(0.01),
        hat=color(10, 230) if chance(0.05) else None,
        hand=(float(rng.uniform(-40, 40)), float(rng.uniform(-5, 40)), float(rng.uniform(9, 15)))
        if chance(0.03)
        else None,
        blur=float(rng.uniform(0.5, 1.2)) if chance(0.12) else 0.0,
        noise=float(rng.uniform(0, 7)),
        resolution=float(rng.uniform(0.5, 0.8)) if chance(0.12) else 1.0,
        gray=chance(0.06),
        quality=int(rng.integers(55, 96)),
        seed=int(rng.integers(2**31)),
    )
