"""Canvas of a synthetic photograph: the surface of the head, its projection to pixels, and antialiased shapes.

Head coordinates are in pixels of an aligned 112 × 112 crop. The origin is the tip of the nose; x grows to the right,
y downward, z toward the camera.
"""

# N points of a shape

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

from facetrain.data.synthetic.capture_conditions import CaptureConditions

_FRACTION_BITS = 4
"""Bits behind the binary point of the fixed-point coordinates that OpenCV takes."""
ColorLike = np.ndarray | tuple[float, ...]
"""RGB, 0 to 255; values outside are clipped."""
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


class Canvas:
    """RGB image with methods that fill and stroke shapes given in pixels, float64 (N, 2)."""

    def __init__(self, image: np.ndarray, project: HeadProjection, scale: float) -> None:
        """Take the background, uint8 (side, side, 3), which the shapes overwrite.

        Args:
            image: the background.
            project: projection of head coordinates to pixels of this image.
            scale: pixels of this image per pixel of a 112 × 112 crop.
        """
        self.image, self.project, self.scale = image, project, scale

    def fill(self, outline_N2: np.ndarray, color: ColorLike, opacity: float = 1.0) -> None:
        """Fill a polygon."""
        corners, tone = _fixed_point(outline_N2), _clipped(color)
        if opacity >= 1:
            cv2.fillPoly(self.image, [corners], tone, cv2.LINE_AA, _FRACTION_BITS)
            return
        # Blend the bounding box only: blending the whole canvas takes most of the rendering time.
        side = self.image.shape[0]
        low = [min(max(math.floor(v) - 2, 0), side) for v in outline_N2.min(0).tolist()]
        high = [min(max(math.ceil(v) + 3, 0), side) for v in outline_N2.max(0).tolist()]
        if high[0] <= low[0] or high[1] <= low[1]:
            return
        box = self.image[low[1] : high[1], low[0] : high[0]]
        filled = box.copy()
        offset = np.array(low, np.int32) << _FRACTION_BITS
        cv2.fillPoly(filled, [corners - offset], tone, cv2.LINE_AA, _FRACTION_BITS)
        cv2.addWeighted(filled, opacity, box, 1 - opacity, 0, dst=box)

    def fill_ellipse(
        self,
        center: tuple[float, float],
        radii: tuple[float, float],
        color: ColorLike,
        *,
        lift: float = 0.0,
        points: int,
        opacity: float = 1.0,
    ) -> None:
        """Fill an ellipse of head coordinates, `lift` in front of the head's surface."""
        self.fill(self.project.surface(*ellipse(center, radii, points), lift), color, opacity)

    def fill_inside(self, outline_N2: np.ndarray, shapes: Sequence[tuple[np.ndarray, ColorLike]]) -> None:
        """Fill polygons, each (N, 2) with its color, but only where they are inside an outline."""
        side = self.image.shape[0]
        low = np.clip(np.floor(outline_N2.min(0)).astype(int), 0, side - 1)
        high = np.clip(np.ceil(outline_N2.max(0)).astype(int) + 1, 1, side)
        if (high <= low).any():
            return
        mask = np.zeros((high[1] - low[1], high[0] - low[0]), np.uint8)
        offset = (low << _FRACTION_BITS).astype(np.int32)
        cv2.fillPoly(mask, [_fixed_point(outline_N2) - offset], 255, cv2.LINE_AA, _FRACTION_BITS)
        box = self.image[low[1] : high[1], low[0] : high[0]]
        before = box.copy()
        for shape_N2, color in shapes:
            self.fill(shape_N2, color)
        weight = (mask.astype(np.float32) / 255)[:, :, None]
        box[:] = (box * weight + before * (1 - weight)).astype(np.uint8)

    def line(self, pixels_N2: np.ndarray, color: ColorLike, width: float) -> None:
        """Stroke an open line; `width` is in pixels of a 112 × 112 crop."""
        thickness = max(1, round(width * self.scale))
        corners = [_fixed_point(pixels_N2)]
        cv2.polylines(self.image, corners, False, _clipped(color), thickness, cv2.LINE_AA, _FRACTION_BITS)


def _fixed_point(pixels_N2: np.ndarray) -> np.ndarray:
    return np.round(pixels_N2 * (1 << _FRACTION_BITS)).astype(np.int32)


def _clipped(color: ColorLike) -> tuple[float, ...]:
    return tuple(min(max(float(value), 0.0), 255.0) for value in color)
