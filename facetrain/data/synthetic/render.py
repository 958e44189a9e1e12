"""Rendering of a synthetic photograph: background, face, shading and camera effects."""

from __future__ import annotations

import cv2
import numpy as np

from facetrain.data.images.decode import encode_jpeg
from facetrain.data.synthetic.canvas import NOSE_TIP, Canvas, HeadProjection
from facetrain.data.synthetic.capture_conditions import CaptureConditions, sample_conditions
from facetrain.data.synthetic.face_drawing import draw_face, draw_in_front
from facetrain.data.synthetic.identity import Identity, sample_identity

_SUPERSAMPLING = 2
"""Canvas pixels per output pixel, along each side."""


def render_jpeg(seed: int, identity: int, number: int, size: int) -> bytes:
    """Return image `number` of an identity as a JPEG of `size` pixels a side."""
    conditions = sample_conditions(seed, identity, number)
    return encode_jpeg(render_face(sample_identity(seed, identity), conditions, size), conditions.quality)


def render_face(identity: Identity, conditions: CaptureConditions, size: int = 112) -> np.ndarray:
    """Render one image: uint8 (size, size, 3), RGB."""
    scale, side = _SUPERSAMPLING * size / 112, _SUPERSAMPLING * size
    canvas = Canvas(_render_background(side, conditions), HeadProjection(conditions, scale), scale)
    draw_face(canvas, identity, conditions)
    _shade(canvas, conditions)
    draw_in_front(canvas, identity, conditions)
    image = cv2.resize(canvas.image, (size, size), interpolation=cv2.INTER_AREA)
    return _apply_camera_effects(image, conditions)


def _render_background(side: int, conditions: CaptureConditions) -> np.ndarray:
    """Return a linear gradient between two colors: uint8 (side, side, 3)."""
    first, second, angle = conditions.background
    ramp = np.linspace(-0.7, 0.7, side, dtype=np.float32)
    share = np.clip(0.5 + ramp[None, :] * np.cos(angle) + ramp[:, None] * np.sin(angle), 0, 1)
    rest = 1 - share
    # One color plane at a time: NumPy is several times slower along a last axis of length 3.
    colors = zip(np.array(first, np.float32), np.array(second, np.float32), strict=True)
    planes = [(one * rest + other * share).astype(np.uint8) for one, other in colors]
    return cv2.merge(planes)


def _shade(canvas: Canvas, conditions: CaptureConditions) -> None:
    """Multiply the canvas by the Lambertian shading of an ellipsoid that turns with the head."""
    side = canvas.image.shape[0]
    small = side // 4  # shading is smooth: a quarter of the resolution is enough
    column = (np.arange(small, dtype=np.float32) + 0.5) * 4 / canvas.scale
    x = ((column - NOSE_TIP[0] - 8 * np.sin(conditions.yaw)) / 47)[None, :]
    y = ((column - NOSE_TIP[1] + 8) / 66)[:, None]
    z = np.sqrt(np.maximum(0.05, 1 - x**2 - y**2))
    light = np.array([conditions.light_right, conditions.light_down, conditions.light_toward])
    light /= np.linalg.norm(light)
    factor = conditions.ambient + (1 - conditions.ambient) * 1.35 * np.maximum(
        0, x * light[0] + y * light[1] + z * light[2]
    )
    factor = cv2.resize(factor.astype(np.float32), (side, side), interpolation=cv2.INTER_LINEAR)
    cv2.multiply(canvas.image, cv2.merge([factor] * 3), dst=canvas.image, dtype=cv2.CV_8U)


def _apply_camera_effects(image: np.ndarray, conditions: CaptureConditions) -> np.ndarray:
    """Apply resolution, blur, white balance, exposure, gamma and noise to uint8 (size, size, 3)."""
    size = image.shape[0]
    if conditions.resolution < 1:
        small = max(16, round(size * conditions.resolution))
        image = cv2.resize(image, (small, small), interpolation=cv2.INTER_AREA)
        image = cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR)
    if conditions.blur:
        image = cv2.GaussianBlur(image, (0, 0), conditions.blur)
    level = np.arange(256, dtype=np.float32) / 255
    colors = np.exp([conditions.warmth, conditions.tint, -conditions.warmth])
    gains = (conditions.exposure * colors).tolist()
    curves = [255 * np.clip(level * gain, 0, 1) ** conditions.gamma for gain in gains]
    image = cv2.LUT(image, np.round(np.stack(curves, 1)).astype(np.uint8).reshape(1, 256, 3))
    if conditions.gray:
        image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    if conditions.noise > 1:
        noise = np.empty((size, size, 3), np.int16)
        # OpenCV's generator is per thread and keeps its state: without a seed per image, the noise would depend on
        # the images that this thread rendered before.
        cv2.setRNGSeed(conditions.seed)
        cv2.randn(noise, (0, 0, 0), (conditions.noise, conditions.noise, conditions.noise))
        image = cv2.add(image, noise, dtype=cv2.CV_8U)
    return image
