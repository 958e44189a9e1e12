"""Facial features: face, ears, nose, eyes, eyebrows, mouth and skin marks."""

from __future__ import annotations

import numpy as np

from facetrain.data.synthetic.canvas import Canvas, ColorLike
from facetrain.data.synthetic.capture_conditions import CaptureConditions
from facetrain.data.synthetic.geometry import spline
from facetrain.data.synthetic.identity import Identity


def draw_neck_and_ears(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the neck, the clothes and the ears."""
    skin = np.array(identity.skin)
    x, y = spline([(-20, 20), (-18, 45), (-44, 62), (44, 62), (18, 45), (20, 20)], closed=True)
    canvas.fill(canvas.project(x, y, 0.0), skin * 0.8)
    canvas.fill(
        canvas.project(np.array([-60.0, -24, 24, 60, 60, -60]), np.array([56.0, 46, 46, 56, 80, 80]), 0.0),
        conditions.clothes,
    )
    for side in (-1.0, 1.0):
        size = identity.ear_size
        angle = np.linspace(0, 2 * np.pi, 20)
        x = side * (identity.cheek_width + 0.5) + np.cos(angle) * size * 0.5
        canvas.fill(canvas.project(x, -9 + np.sin(angle) * size * 1.25, -6.0), skin * 0.9)


def draw_head(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the skin of the face and the beard."""
    skin = np.array(identity.skin)
    x, y = _face_outline(identity, conditions.mouth_open)
    canvas.fill(canvas.project(x, y, 4.0), skin)
    if identity.beard:
        lower = y > 6
        inner_x, inner_y = x[lower] * 0.99, y[lower]
        beard = np.array(identity.hair) * 0.6 + skin * 0.4
        top = canvas.project.surface(
            np.linspace(-24, 24, 9)[::-1], np.full(9, 13.0) + 4 * np.abs(np.linspace(-1, 1, 9))
        )
        order = np.argsort(-inner_x)
        rim = canvas.project(inner_x[order], inner_y[order], 8.0)
        canvas.fill(np.vstack([rim, top[::-1]]), beard, identity.beard)


def draw_nose(canvas: Canvas, identity: Identity) -> None:
    """Draw the nose with its nostrils, highlight and shadow."""
    skin = np.array(identity.skin)
    dark, light = skin * 0.72, np.minimum(skin * 1.12 + 6, 255)
    tip = identity.nose_length
    for side in (-1.0, 1.0):
        half = side * identity.nose_width
        bridge = side * identity.bridge_width
        knots = [
            (bridge, -20),
            (bridge * 1.1, -8),
            (half * 0.9, tip - 3),
            (half, tip + 1),
            (half * 0.5, tip + 2.2),
        ]
        x, y = spline(knots, closed=False)
        lift = np.interp(y, [-20, tip], [3, 9])
        canvas.line(canvas.project.surface(x, y, lift), skin * 0.84, 0.7)
        angle = np.linspace(0, 2 * np.pi, 12)
        nostril = canvas.project.surface(
            side * identity.nose_width * 0.45 + np.cos(angle) * 1.7, tip + 1.4 + np.sin(angle) * 0.9, 9.0
        )
        canvas.fill(nostril, dark * 0.6)
    angle = np.linspace(0, 2 * np.pi, 16)
    ball = canvas.project.surface(
        np.cos(angle) * identity.nose_width * 0.42 * identity.nose_round,
        tip - 3 + np.sin(angle) * 2.8 * identity.nose_round,
        12.0,
    )
    canvas.fill(ball, light, 0.5)
    shadow_x, shadow_y = spline(
        [(-identity.nose_width, tip + 1), (0, tip + 4.2), (identity.nose_width, tip + 1), (0, tip + 2)]
    )
    canvas.fill(canvas.project.surface(shadow_x, shadow_y, 7.0), dark, 0.6)


def draw_eye(canvas: Canvas, identity: Identity, conditions: CaptureConditions, side: float) -> None:
    """Draw one eye; `side` is −1 for the left one in the image, 1 for the right one."""
    skin = np.array(identity.skin)
    opening = identity.eye_opening * (1 - conditions.eyes_closed) * (1 - 0.15 * max(conditions.smile, 0))
    center_x, center_y = side * identity.eye_distance, identity.eye_height
    angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    local_x = np.cos(angle) * identity.eye_width
    local_y = np.where(np.sin(angle) < 0, np.sin(angle) * opening * 1.1, np.sin(angle) * opening * 0.8)
    tilt = side * identity.eye_tilt
    x = center_x + local_x - local_y * tilt
    y = center_y + local_y - side * local_x * abs(identity.eye_tilt) * np.sign(identity.eye_tilt)
    socket = canvas.project.surface(
        center_x + np.cos(angle) * (identity.eye_width + 3), center_y - 1 + np.sin(angle) * 6.5
    )
    canvas.fill(socket, skin * 0.86, 0.55)
    white = canvas.project.surface(x, y, 1.0)
    canvas.fill(white, (236, 232, 226))
    if opening >= 0.8:
        iris_x, iris_y = center_x + conditions.gaze[0] * 3, center_y + conditions.gaze[1] * 2 - 0.3
        canvas.fill_inside(white, _iris_and_pupil(identity, canvas, iris_x, iris_y))
    upper = np.sin(angle) <= 0.01
    order = np.argsort(x[upper])
    lid = canvas.project.surface(x[upper][order], y[upper][order], 1.5)
    canvas.line(lid, np.array(identity.hair) * 0.5, 1.0)
    crease = canvas.project.surface(x[upper][order], y[upper][order] - identity.lid - 0.6, 1.0)
    canvas.line(crease, skin * 0.7, 0.6)


def draw_brow(canvas: Canvas, identity: Identity, conditions: CaptureConditions, side: float) -> None:
    """Draw one eyebrow; `side` as in `draw_eye`."""
    skin = np.array(identity.skin)
    t = np.linspace(-1, 1, 9)
    x = side * (identity.eye_distance + t * identity.brow_width)
    y = (
        identity.brow_height
        - conditions.brows_up
        - identity.brow_arch * (1 - t**2)
        + t * identity.brow_tilt * identity.brow_width
    )
    thick = identity.brow_thickness * (1 - 0.55 * np.maximum(t, 0)) * 0.5
    upper, lower = canvas.project.surface(x, y - thick, 2.0), canvas.project.surface(x, y + thick, 2.0)
    canvas.fill(np.vstack([upper, lower[::-1]]), np.array(identity.hair) * 0.75 + skin * 0.1, 0.85)


def draw_mouth(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the lips, the teeth and the moustache."""
    width = identity.mouth_width * (1 + 0.13 * conditions.smile)
    rise, gap = 2.6 * conditions.smile, 3.2 * conditions.mouth_open
    t = np.linspace(-1, 1, 13)
    x = t * width
    middle = identity.mouth_height - rise * t**2
    bow = identity.upper_lip * (1 - np.abs(t) ** 1.6) - identity.cupid_bow * np.exp(-((t / 0.16) ** 2))
    upper_top = canvas.project.surface(x, middle - gap * 0.25 * (1 - t**2) - bow, 3.0)
    upper_low = canvas.project.surface(x, middle - gap * 0.25 * (1 - t**2), 3.0)
    lower_top = canvas.project.surface(x, middle + gap * (1 - t**2), 3.0)
    lower_low = canvas.project.surface(x, middle + gap * (1 - t**2) + identity.lower_lip * (1 - t**2), 3.0)
    if identity.moustache:
        hair_top = canvas.project.surface(x * 0.95, middle - identity.upper_lip - 5 * (1 - t**2), 4.0)
        canvas.fill(np.vstack([hair_top, upper_top[::-1]]), np.array(identity.hair) * 0.7, identity.moustache)
    if gap > 0.4:
        canvas.fill(np.vstack([upper_low, lower_top[::-1]]), (58, 22, 24))
        teeth = canvas.project.surface(x * 0.8, middle + gap * 0.3 * (1 - t**2), 3.0)
        canvas.fill(np.vstack([upper_low[1:-1], teeth[1:-1][::-1]]), (232, 228, 218))
    lips = np.array(identity.lips)
    canvas.fill(np.vstack([upper_top, upper_low[::-1]]), lips * 0.9)
    canvas.fill(np.vstack([lower_top, lower_low[::-1]]), lips * 1.04)
    canvas.line(upper_low, lips * 0.5, 0.6)


def draw_skin_marks(canvas: Canvas, identity: Identity) -> None:
    """Draw moles, freckles and the folds beside the mouth."""
    skin = np.array(identity.skin)
    for across, down, radius in identity.moles:
        angle = np.linspace(0, 2 * np.pi, 10)
        canvas.fill(
            canvas.project.surface(across + np.cos(angle) * radius, down + np.sin(angle) * radius),
            skin * 0.4,
        )
    if identity.freckles:
        rng = np.random.default_rng(round(identity.eye_distance * 1e6))
        for across, down in zip(rng.uniform(-24, 24, 26), rng.uniform(-12, 6, 26), strict=True):
            dot = canvas.project.surface(across + np.array([-0.5, 0.5, 0]), down + np.array([0, 0, 0.9]))
            canvas.fill(dot, skin * 0.68, 0.7 * identity.freckles)
    if identity.folds:
        for side in (-1.0, 1.0):
            x, y = spline(
                [(side * 10, 4), (side * 15, 11), (side * (identity.mouth_width + 4), identity.mouth_height)],
                closed=False,
            )
            canvas.line(canvas.project.surface(x, y), skin * (1 - 0.45 * identity.folds), 0.7)


def _face_outline(identity: Identity, mouth_open: float) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, (N,) each, of the outline of the face; an open mouth lowers the chin."""
    drop = 2.2 * mouth_open
    side = [
        (identity.forehead_width * 0.62, -57.0),
        (identity.forehead_width, -42.0),
        (identity.cheek_width, -17.0),
        (identity.cheek_width * 0.97, 2.0),
        (identity.jaw_width, identity.jaw_height + drop * 0.5),
        (identity.chin_width, 39.0 + drop),
    ]
    knots = [(0.0, -62.0), *side, (0.0, 42.0 + drop), *((-x, y) for x, y in reversed(side))]
    return spline(knots)


def _iris_and_pupil(
    identity: Identity, canvas: Canvas, x: float, y: float
) -> list[tuple[np.ndarray, ColorLike]]:
    """Return the shapes of an iris at (x, y), its pupil and its highlight, each with its color."""
    angle = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    discs = [
        (canvas.project.surface(x + np.cos(angle) * radius, y + np.sin(angle) * radius, 1.0), np.array(color))
        for radius, color in ((3.4, identity.iris), (1.5, (12.0, 10.0, 10.0)))
    ]
    highlight = canvas.project.surface(x + 1.0 + np.cos(angle) * 0.7, y - 1.1 + np.sin(angle) * 0.7, 1.0)
    return [*discs, (highlight, np.array([250.0, 250.0, 250.0]))]
