"""Outlines of a face in three dimensions, and their way onto the picture."""

# N points

from __future__ import annotations

import numpy as np

from facetrain.data.synthetic.conditions import Conditions

CENTRE = (56.0, 71.5)
"""Where the tip of the nose stands in an aligned crop of 112 × 112."""
_PIVOT = 26.0


def depth(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return how far the surface of the head stands out at points of its front, in pixels."""
    return 44 * np.sqrt(np.maximum(0, 1 - (x / 46) ** 2 - ((y + 8) / 64) ** 2))


class Projection:
    """Turn a head as the picture has it, and give the pixels of its points."""

    def __init__(self, conditions: Conditions, scale: float) -> None:
        self._yaw, self._pitch = conditions.yaw, conditions.pitch
        self._roll, self._shift = conditions.roll, conditions.shift
        # Alignment brings eyes and mouth back to their places, so a turned head comes out a little larger.
        self._size = conditions.scale * scale / np.sqrt(max(np.cos(conditions.yaw), 0.5))
        self._scale = scale

    def __call__(self, x: np.ndarray, y: np.ndarray, z: np.ndarray | float) -> np.ndarray:
        """Return pixels, float64 (N, 2), of points that stand out by z."""
        forward = np.asarray(z, dtype=float) - _PIVOT
        turned_x = x * np.cos(self._yaw) + forward * np.sin(self._yaw)
        turned_y = y * np.cos(self._pitch) + forward * np.sin(self._pitch)
        cos, sin = np.cos(self._roll) * self._size, np.sin(self._roll) * self._size
        # The features lie some 14 pixels before the pivot: alignment takes their shift back.
        turned_x = turned_x - 14 * np.sin(self._yaw)
        turned_y = turned_y - 14 * np.sin(self._pitch)
        return np.stack(
            [
                (CENTRE[0] + self._shift[0]) * self._scale + turned_x * cos - turned_y * sin,
                (CENTRE[1] + self._shift[1]) * self._scale + turned_x * sin + turned_y * cos,
            ],
            axis=1,
        )

    def surface(self, x: np.ndarray, y: np.ndarray, lift: np.ndarray | float = 0.0) -> np.ndarray:
        """Return pixels of points that lie on the head, or `lift` before it."""
        return self(x, y, depth(x, y) + lift)


def spline(
    points: list[tuple[float, float]], *, closed: bool = True, steps: int = 6
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a smooth line through points (Catmull–Rom)."""
    knots = np.array(points, dtype=float)
    if closed:
        before, after, last = np.roll(knots, 1, 0), np.roll(knots, -1, 0), np.roll(knots, -2, 0)
        start = knots
    else:
        padded = np.vstack([2 * knots[0] - knots[1], knots, 2 * knots[-1] - knots[-2]])
        before, start, after, last = padded[:-3], padded[1:-2], padded[2:-1], padded[3:]
    t = np.linspace(0, 1, steps, endpoint=False)[None, :, None]
    before, start, after, last = (part[:, None, :] for part in (before, start, after, last))
    curve = 0.5 * (
        2 * start
        + (after - before) * t
        + (2 * before - 5 * start + 4 * after - last) * t**2
        + (3 * start - before - 3 * after + last) * t**3
    )
    line = curve.reshape(-1, 2)
    if not closed:
        line = np.vstack([line, knots[-1]])
    return line[:, 0], line[:, 1]
