"""Hair, and objects that hide parts of the face: hat, glasses, mask, hand."""

from __future__ import annotations

import numpy as np

from facetrain.data.synthetic.canvas import Canvas
from facetrain.data.synthetic.capture_conditions import CaptureConditions
from facetrain.data.synthetic.facial_features import SIDES
from facetrain.data.synthetic.geometry import ellipse, spline
from facetrain.data.synthetic.identity import Identity


def draw_back_hair(canvas: Canvas, identity: Identity) -> None:
    """Draw the hair behind the head."""
    volume = identity.hair_volume
    reach, low = identity.cheek_width + volume, max(identity.hair_length, -12.0)
    side = [(reach * 0.75, -66 - volume), (reach, -38.0), (reach + 1, -8.0), (reach * 0.96, low)]
    x, y = spline([(0.0, -70 - volume), *side, *((-x, y) for x, y in reversed(side))])
    canvas.fill(canvas.project(x, y, -8.0), identity.hair * 0.8)


def draw_front_hair(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the hair above the forehead, or the hat."""
    if conditions.hat is not None:
        x, y = spline([(-43, -40), (-36, -74), (0, -86), (36, -74), (43, -40), (0, -47)])
        canvas.fill(canvas.project(x, y, 14.0), conditions.hat)
        return
    width, parting, line = identity.forehead_width, identity.parting, identity.hairline + identity.fringe
    left = [(-(width + 3), -30.0), (-(width + 4), -52.0), (-22.0, -72.0)]
    right = [(22.0, -72.0), (width + 4, -52.0), (width + 3, -30.0), (width - 3, -41.0)]
    under = [(14 + parting * 0.5, line + 2), (parting, line - 5), (-16 + parting * 0.5, line + 3)]
    x, y = spline([*left, (0.0, -76.0 - identity.hair_volume), *right, *under, (-(width - 3), -41.0)])
    gain = conditions.ambient + (1 - conditions.ambient) * 0.9
    canvas.fill(canvas.project.surface(x, np.minimum(y, -20), 3.0), identity.hair * gain)
    strand = [(-20 + parting, line - 8), (parting, line - 13), (20 + parting, line - 9)]
    x, y = spline(strand, closed=False)
    canvas.line(canvas.project.surface(x, y, 3.0), np.minimum(identity.hair * 1.5 + 14, 255) * gain, 1.2)


def draw_occlusions(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw glasses, mask and hand."""
    if conditions.glasses:
        _draw_glasses(canvas, identity, conditions)
    if conditions.mask:
        x, y = spline([(-34, 2), (0, -6), (34, 2), (30, 30), (0, 44), (-30, 30)])
        canvas.fill(canvas.project.surface(x, y, 8.0), conditions.clothes)
    if conditions.hand is not None:
        across, down, radius = conditions.hand
        x, y = ellipse((across, down), (radius, radius * 1.5), 20)
        canvas.fill(canvas.project(x, y, 60.0), identity.skin * 0.8)


def _draw_glasses(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    tone, distance = np.full(3, conditions.glasses_color), identity.eye_distance
    cos, sin = ellipse((0, 0), (1, 1), 24)
    power = 1.0 if conditions.glasses == 1 else 0.6
    x, y = np.sign(cos) * np.abs(cos) ** power * 11, np.sign(sin) * np.abs(sin) ** power * 8
    for side in SIDES:
        lens = canvas.project.surface(side * distance + x, identity.eye_height + 1 + y, 5.0)
        if conditions.glasses == 3:
            canvas.fill(lens, (24, 24, 28), 0.86)
        canvas.line(lens, tone, 1.2)
    bridge = np.linspace(-(distance - 11), distance - 11, 5)
    canvas.line(canvas.project.surface(bridge, np.full(5, identity.eye_height - 1.0), 7.0), tone, 1.2)
