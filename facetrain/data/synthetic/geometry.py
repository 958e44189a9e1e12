"""Outlines of a face in three dimensions, and their way onto the image."""

# N points

from __future__ import annotations

import numpy as np

from facetrain.data.synthetic.capture_conditions import Conditions

CENTER = (56.0, 71.5)
"""Where the tip of the nose stands in an aligned crop of 112 × 112."""
_PIVOT = 26.0
_T = np.linspace(0, 1, 6, endpoint=False)[None, :, None]
"""Where a smooth line has points between two knots."""


def depth(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return how far the surface of the head stands out at points of its front, in pixels."""
    return 44 * np.sqrt(np.maximum(0, 1 - (x / 46) ** 2 - ((y + 8) / 64) ** 2))


class Projection:
    """Turn a head as the image has it, and give the pixels of its points."""

    def __init__(self, conditions: Conditions, scale: float) -> None:
        yaw, pitch, roll = conditions.yaw, conditions.pitch, conditions.roll
        self._cos_yaw, self._sin_yaw = np.cos(yaw), np.sin(yaw)
        self._cos_pitch, self._sin_pitch = np.cos(pitch), np.sin(pitch)
        # Alignment brings eyes and mouth back to their places, so a turned head comes out a little larger.
        size = conditions.scale * scale / np.sqrt(max(self._cos_yaw, 0.5))
        self._cos_roll, self._sin_roll = np.cos(roll) * size, np.sin(roll) * size
        self._center_x = (CENTER[0] + conditions.shift[0]) * scale
        self._center_y = (CENTER[1] + conditions.shift[1]) * scale

    def __call__(self, x: np.ndarray, y: np.ndarray, z: np.ndarray | float) -> np.ndarray:
        """Return pixels, float64 (N, 2), of points that stand out by z."""
        forward = z - _PIVOT
        # The features lie some 14 pixels before the pivot: alignment takes their shift back.
        turned_x = x * self._cos_yaw + forward * self._sin_yaw - 14 * self._sin_yaw
        turned_y = y * self._cos_pitch + forward * self._sin_pitch - 14 * self._sin_pitch
        pixels = np.empty((len(x), 2))
        pixels[:, 0] = self._center_x + turned_x * self._cos_roll - turned_y * self._sin_roll
        pixels[:, 1] = self._center_y + turned_x * self._sin_roll + turned_y * self._cos_roll
        return pixels

    def surface(self, x: np.ndarray, y: np.ndarray, lift: np.ndarray | float = 0.0) -> np.ndarray:
        """Return pixels of points that lie on the head, or `lift` before it."""
        return self(x, y, depth(x, y) + lift)


def spline(points: list[tuple[float, float]], *, closed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a smooth line through points (Catmull–Rom)."""
    knots = np.array(points, dtype=float)
    ends = (knots[-1:], knots[:2]) if closed else (2 * knots[:1] - knots[1:2], 2 * knots[-1:] - knots[-2:-1])
    padded = np.concatenate([ends[0], knots, ends[1]])[:, None, :]
    before, start, after, last = padded[:-3], padded[1:-2], padded[2:-1], padded[3:]
    curve = 0.5 * (
        2 * start
        + (after - before) * _T
        + (2 * before - 5 * start + 4 * after - last) * _T**2
        + (3 * start - before - 3 * after + last) * _T**3
    )
    line = curve.reshape(-1, 2)
    if not closed:
        line = np.concatenate([line, knots[-1:]])
    return line[:, 0], line[:, 1]
