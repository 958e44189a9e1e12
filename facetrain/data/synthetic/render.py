"""Rendering of one synthetic image from an identity and capture conditions."""

from __future__ import annotations

import cv2
import numpy as np

from facetrain.data.images.decode import encode_jpeg
from facetrain.data.synthetic.canvas import Canvas
from facetrain.data.synthetic.capture_conditions import CaptureConditions, sample_conditions
from facetrain.data.synthetic.facial_features import (
    draw_brow,
    draw_eye,
    draw_head,
    draw_mouth,
    draw_neck_and_ears,
    draw_nose,
    draw_skin_marks,
)
from facetrain.data.synthetic.geometry import HeadProjection
from facetrain.data.synthetic.hair_and_accessories import draw_back_hair, draw_front_hair, draw_occlusions
from facetrain.data.synthetic.identity import Identity, sample_identity
from facetrain.data.synthetic.photo_effects import apply_camera_effects, render_background, shade

_SUPERSAMPLING = 2
"""Canvas pixels per output pixel, along each side."""


def render_jpeg(seed: int, identity: int, number: int, size: int) -> bytes:
    """Return image `number` of an identity as a JPEG of `size` pixels a side."""
    conditions = sample_conditions(seed, identity, number)
    return encode_jpeg(render_face(sample_identity(seed, identity), conditions, size), conditions.quality)


def render_face(identity: Identity, conditions: CaptureConditions, size: int = 112) -> np.ndarray:
    """Render one image: uint8 (size, size, 3), RGB."""
    scale, side = _SUPERSAMPLING * size / 112, _SUPERSAMPLING * size
    canvas = Canvas(render_background(side, conditions), HeadProjection(conditions, scale), scale)
    # Back to front. Shading comes before the front hair and the occlusions, which have their final colors already.
    draw_back_hair(canvas, identity)
    draw_neck_and_ears(canvas, identity, conditions)
    draw_head(canvas, identity, conditions)
    draw_nose(canvas, identity)
    for eye_side in (-1.0, 1.0):
        draw_eye(canvas, identity, conditions, eye_side)
        draw_brow(canvas, identity, conditions, eye_side)
    draw_mouth(canvas, identity, conditions)
    draw_skin_marks(canvas, identity)
    shade(canvas, conditions)
    draw_front_hair(canvas, identity, conditions)
    draw_occlusions(canvas, identity, conditions)
    image = cv2.resize(canvas.image, (size, size), interpolation=cv2.INTER_AREA)
    return apply_camera_effects(image, conditions)
