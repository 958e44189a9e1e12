"""Hair, and objects that hide parts of the face: hat, glasses, mask, hand."""

from __future__ import annotations

import numpy as np

from facetrain.data.synthetic.canvas import Canvas
from facetrain.data.synthetic.capture_conditions import CaptureConditions
from facetrain.data.synthetic.geometry import spline
from facetrain.data.synthetic.identity import Identity


def draw_back_hair(canvas: Canvas, identity: Identity) -> None:
    """Draw the hair behind the head."""
    reach, low = identity.cheek_width + identity.hair_volume, max(identity.hair_length, -12.0)
    side = [
        (reach * 0.75, -66 - identity.hair_volume),
        (reach, -38.0),
        (reach + 1, -8.0),
        (reach * 0.96, low),
    ]
    knots = [(0.0, -70 - identity.hair_volume), *side, *((-x, y) for x, y in reversed(side))]
    x, y = spline(knots)
    canvas.fill(canvas.project(x, y, -8.0), np.array(identity.hair) * 0.8)


def draw_front_hair(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the hair above the forehead, or the hat."""
    if conditions.hat is not None:
        x, y = spline([(-43, -40), (-36, -74), (0, -86), (36, -74), (43, -40), (0, -47)])
        canvas.fill(canvas.project(x, y, 14.0), conditions.hat)
        return
    top = [
        (-(identity.forehead_width + 3), -30.0),
        (-(identity.forehead_width + 4), -52.0),
        (-22.0, -72.0),
        (0.0, -76.0 - identity.hair_volume),
    ]
    rim = [(22.0, -72.0), (identity.forehead_width + 4, -52.0), (identity.forehead_width + 3, -30.0)]
    line = identity.hairline + identity.fringe
    under = [
        (identity.forehead_width - 3, -41.0),
        (14 + identity.parting * 0.5, line + 2),
        (identity.parting, line - 5),
        (-16 + identity.parting * 0.5, line + 3),
        (-(identity.forehead_width - 3), -41.0),
    ]
    x, y = spline([*top, *rim, *under])
    gain = conditions.ambient + (1 - conditions.ambient) * 0.9
    canvas.fill(canvas.project.surface(x, np.minimum(y, -20), 3.0), np.array(identity.hair) * gain)
    x, y = spline(
        [
            (-20 + identity.parting, line - 8),
            (identity.parting, line - 13),
            (20 + identity.parting, line - 9),
        ],
        closed=False,
    )
    canvas.line(
        canvas.project.surface(x, y, 3.0), np.minimum(np.array(identity.hair) * 1.5 + 14, 255) * gain, 1.2
    )


def draw_occlusions(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw glasses, mask and hand."""
    skin = np.array(identity.skin)
    if conditions.glasses:
        tone = np.full(3, conditions.glasses_color)
        for side in (-1.0, 1.0):
            angle = np.linspace(0, 2 * np.pi, 24)
            power = 1.0 if conditions.glasses == 1 else 0.6
            x = side * identity.eye_distance + np.sign(np.cos(angle)) * np.abs(np.cos(angle)) ** power * 11
            y = identity.eye_height + 1 + np.sign(np.sin(angle)) * np.abs(np.sin(angle)) ** power * 8
            lens = canvas.project.surface(x, y, 5.0)
            if conditions.glasses == 3:
                canvas.fill(lens, (24, 24, 28), 0.86)
            canvas.line(lens, tone, 1.2)
        bridge = np.linspace(-(identity.eye_distance - 11), identity.eye_distance - 11, 5)
        canvas.line(canvas.project.surface(bridge, np.full(5, identity.eye_height - 1.0), 7.0), tone, 1.2)
    if conditions.mask:
        x, y = spline([(-34, 2), (0, -6), (34, 2), (30, 30), (0, 44), (-30, 30)])
        canvas.fill(canvas.project.surface(x, y, 8.0), conditions.clothes)
    if conditions.hand is not None:
        angle = np.linspace(0, 2 * np.pi, 20)
        across, down, radius = conditions.hand
        shape = canvas.project(across + np.cos(angle) * radius, down + np.sin(angle) * radius * 1.5, 60.0)
        canvas.fill(shape, skin * 0.8)
