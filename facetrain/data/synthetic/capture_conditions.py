"""How somebody is seen: everything that changes from image to image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Conditions:
    """One image's circumstances. Angles in radians, light as a direction from the face."""

    yaw: float
    pitch: float
    roll: float
    scale: float
    shift: tuple[float, float]
    smile: float
    mouth_open: float
    eyes_closed: float
    brows_up: float
    gaze: tuple[float, float]
    light: tuple[float, float, float]
    ambient: float
    gains: tuple[float, float, float]
    gamma: float
    background: tuple[tuple[float, float, float], tuple[float, float, float], float]
    clothes: tuple[float, float, float]
    glasses: int
    glasses_color: float
    mask: bool
    hat: tuple[float, float, float] | None
    hand: tuple[float, float, float] | None
    blur: float
    noise: float
    resolution: float
    gray: bool
    quality: int
    seed: int


def draw_conditions(seed: int, identity: int, image: int) -> Conditions:
    """Return the circumstances of one image of one person."""
    rng = np.random.default_rng([seed, identity, image, 2])

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    def color(low: float, high: float) -> tuple[float, float, float]:
        red, green, blue = rng.uniform(low, high, 3).tolist()
        return red, green, blue

    warmth, tint = rng.normal(0, 0.14), rng.normal(0, 0.06)
    exposure = np.exp(rng.normal(0, 0.2))
    side = rng.uniform(-1.0, 1.0)
    return Conditions(
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
