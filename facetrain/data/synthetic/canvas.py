"""Supersampled canvas for antialiased shapes."""

# N points of a shape

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

from facetrain.data.synthetic.geometry import HeadProjection, ellipse

_FRACTION_BITS = 4
"""Bits behind the binary point of the fixed-point coordinates that OpenCV takes."""
ColorLike = np.ndarray | tuple[float, ...]
"""RGB, 0 to 255; values outside are clipped."""


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
