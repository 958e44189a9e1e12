"""Geometry of the head: its surface, smooth outlines on it, and the projection to pixels.

Head coordinates are in pixels of an aligned 112 × 112 crop. The origin is the tip of the nose; x grows to the right,
y downward, z toward the camera.
"""

# N points

from __future__ import annotations

import numpy as np

from facetrain.data.synthetic.capture_conditions import CaptureConditions

NOSE_TIP = (56.0, 71.5)
"""Pixel of the tip of the nose in an aligned crop of 112 × 112."""
_ROTATION_CENTER_Z = 26.0
_CURVE_PARAMETER = np.linspace(0, 1, 6, endpoint=False)[None, :, None]
"""Positions of the points that a spline has between two knots."""


def depth(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return z of the head's surface, an ellipsoid, at points (N,) of its front."""
    return 44 * np.sqrt(np.maximum(0, 1 - (x / 46) ** 2 - ((y + 8) / 64) ** 2))


class HeadProjection:
    """Projection of head coordinates to pixels, for the pose of one image."""

    def __init__(self, conditions: CaptureConditions, scale: float) -> None:
        """Compute the rotation; `scale` is the number of pixels per pixel of a 112 × 112 crop."""
        yaw, pitch, roll = conditions.yaw, conditions.pitch, conditions.roll
        self._cos_yaw, self._sin_yaw = np.cos(yaw), np.sin(yaw)
        self._cos_pitch, self._sin_pitch = np.cos(pitch), np.sin(pitch)
        # Alignment moves the eyes and the mouth to fixed positions, which enlarges a turned head a little.
        size = conditions.scale * scale / np.sqrt(max(self._cos_yaw, 0.5))
        self._cos_roll, self._sin_roll = np.cos(roll) * size, np.sin(roll) * size
        self._center_x = (NOSE_TIP[0] + conditions.shift[0]) * scale
        self._center_y = (NOSE_TIP[1] + conditions.shift[1]) * scale

    def __call__(self, x: np.ndarray, y: np.ndarray, z: np.ndarray | float) -> np.ndarray:
        """Project points (N,), (N,), (N,) or a scalar z to pixels: float64 (N, 2)."""
        forward = z - _ROTATION_CENTER_Z
        # Eyes and mouth are about 14 pixels in front of the rotation center. Alignment undoes their shift.
        turned_x = x * self._cos_yaw + forward * self._sin_yaw - 14 * self._sin_yaw
        turned_y = y * self._cos_pitch + forward * self._sin_pitch - 14 * self._sin_pitch
        pixels = np.empty((len(x), 2))
        pixels[:, 0] = self._center_x + turned_x * self._cos_roll - turned_y * self._sin_roll
        pixels[:, 1] = self._center_y + turned_x * self._sin_roll + turned_y * self._cos_roll
        return pixels

    def surface(self, x: np.ndarray, y: np.ndarray, lift: np.ndarray | float = 0.0) -> np.ndarray:
        """Project points (N,), (N,) on the head's surface, or `lift` in front of it: float64 (N, 2)."""
        return self(x, y, depth(x, y) + lift)


def ellipse(
    center: tuple[float, float], radii: tuple[float, float], points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, (N,) each, of an ellipse; the last point is the first one."""
    angle = np.linspace(0, 2 * np.pi, points)
    return center[0] + np.cos(angle) * radii[0], center[1] + np.sin(angle) * radii[1]


def spline(points: list[tuple[float, float]], *, closed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, (N,) each, of a Catmull–Rom spline through points."""
    knots = np.array(points, dtype=float)
    ends = (knots[-1:], knots[:2]) if closed else (2 * knots[:1] - knots[1:2], 2 * knots[-1:] - knots[-2:-1])
    padded = np.concatenate([ends[0], knots, ends[1]])[:, None, :]
    before, start, after, last = padded[:-3], padded[1:-2], padded[2:-1], padded[3:]
    curve = 0.5 * (
        2 * start
        + (after - before) * _CURVE_PARAMETER
        + (2 * before - 5 * start + 4 * after - last) * _CURVE_PARAMETER**2
        + (3 * start - before - 3 * after + last) * _CURVE_PARAMETER**3
    )
    line = curve.reshape(-1, 2)
    if not closed:
        line = np.concatenate([line, knots[-1:]])
    return line[:, 0], line[:, 1]
