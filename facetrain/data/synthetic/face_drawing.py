"""Drawing of a face: head, eyes, nose, mouth, skin, hair, and objects that hide parts of it."""

from __future__ import annotations

import numpy as np

from facetrain.data.synthetic.canvas import Canvas, ColorLike, ellipse, spline
from facetrain.data.synthetic.capture_conditions import CaptureConditions
from facetrain.data.synthetic.identity import Identity

_SIDES = (-1.0, 1.0)
"""The left and the right side of the image."""


def draw_face(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the hair behind the head, and the head, back to front; shading comes after these."""
    _draw_back_hair(canvas, identity)
    _draw_neck_and_ears(canvas, identity, conditions)
    _draw_head(canvas, identity, conditions)
    _draw_nose(canvas, identity)
    for side in _SIDES:
        _draw_eye(canvas, identity, conditions, side)
        _draw_brow(canvas, identity, conditions, side)
    _draw_mouth(canvas, identity, conditions)
    _draw_skin_marks(canvas, identity)


def draw_in_front(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the front hair or the hat, and occlusions; they have their final colors already."""
    _draw_front_hair(canvas, identity, conditions)
    if conditions.glasses:
        _draw_glasses(canvas, identity, conditions)
    if conditions.mask:
        x, y = spline([(-34, 2), (0, -6), (34, 2), (30, 30), (0, 44), (-30, 30)])
        canvas.fill(canvas.project.surface(x, y, 8.0), conditions.clothes)
    if conditions.hand is not None:
        across, down, radius = conditions.hand
        x, y = ellipse((across, down), (radius, radius * 1.5), 20)
        canvas.fill(canvas.project(x, y, 60.0), identity.skin * 0.8)


def _draw_neck_and_ears(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the neck, the clothes and the ears."""
    x, y = spline([(-20, 20), (-18, 45), (-44, 62), (44, 62), (18, 45), (20, 20)])
    canvas.fill(canvas.project(x, y, 0.0), identity.skin * 0.8)
    x, y = np.array([-60.0, -24, 24, 60, 60, -60]), np.array([56.0, 46, 46, 56, 80, 80])
    canvas.fill(canvas.project(x, y, 0.0), conditions.clothes)
    for side in _SIDES:
        center, size = side * (identity.cheek_width + 0.5), identity.ear_size
        x, y = ellipse((center, -9), (size * 0.5, size * 1.25), 20)
        canvas.fill(canvas.project(x, y, -6.0), identity.skin * 0.9)


def _draw_head(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the skin of the face and the beard."""
    x, y = _face_outline(identity, conditions.mouth_open)
    canvas.fill(canvas.project(x, y, 4.0), identity.skin)
    if identity.beard:
        inner_x, inner_y = x[y > 6] * 0.99, y[y > 6]
        top_x = np.linspace(-24, 24, 9)
        top = canvas.project.surface(top_x, 13.0 + 4 * np.abs(np.linspace(-1, 1, 9)))
        order = np.argsort(-inner_x)
        rim = canvas.project(inner_x[order], inner_y[order], 8.0)
        canvas.fill(np.vstack([rim, top]), identity.hair * 0.6 + identity.skin * 0.4, identity.beard)


def _draw_nose(canvas: Canvas, identity: Identity) -> None:
    """Draw the nose with its nostrils, highlight and shadow."""
    skin, tip, width = identity.skin, identity.nose_length, identity.nose_width
    dark, light = skin * 0.72, np.minimum(skin * 1.12 + 6, 255)
    for side in _SIDES:
        half, bridge = side * width, side * identity.bridge_width
        root = [(bridge, -20), (bridge * 1.1, -8)]
        wing = [(half * 0.9, tip - 3), (half, tip + 1), (half * 0.5, tip + 2.2)]
        x, y = spline(root + wing, closed=False)
        lift = np.interp(y, [-20, tip], [3, 9])
        canvas.line(canvas.project.surface(x, y, lift), skin * 0.84, 0.7)
        canvas.fill_ellipse((half * 0.45, tip + 1.4), (1.7, 0.9), dark * 0.6, lift=9.0, points=12)
    ball = (width * 0.42 * identity.nose_round, 2.8 * identity.nose_round)
    canvas.fill_ellipse((0, tip - 3), ball, light, lift=12.0, points=16, opacity=0.5)
    x, y = spline([(-width, tip + 1), (0, tip + 4.2), (width, tip + 1), (0, tip + 2)])
    canvas.fill(canvas.project.surface(x, y, 7.0), dark, 0.6)


def _draw_eye(canvas: Canvas, identity: Identity, conditions: CaptureConditions, side: float) -> None:
    """Draw one eye; `side` is −1 for the left one in the image, 1 for the right one."""
    skin = identity.skin
    opening = identity.eye_opening * (1 - conditions.eyes_closed) * (1 - 0.15 * max(conditions.smile, 0))
    center_x, center_y = side * identity.eye_distance, identity.eye_height
    angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    cos, sin = np.cos(angle), np.sin(angle)
    local_x, local_y = cos * identity.eye_width, sin * opening * np.where(sin < 0, 1.1, 0.8)
    x = center_x + local_x - local_y * side * identity.eye_tilt
    y = center_y + local_y - side * local_x * identity.eye_tilt
    socket = canvas.project.surface(center_x + cos * (identity.eye_width + 3), center_y - 1 + sin * 6.5)
    canvas.fill(socket, skin * 0.86, 0.55)
    white = canvas.project.surface(x, y, 1.0)
    canvas.fill(white, (236, 232, 226))
    if opening >= 0.8:
        gaze_right, gaze_down = conditions.gaze
        canvas.fill_inside(
            white, _iris(canvas, identity, center_x + gaze_right * 3, center_y + gaze_down * 2 - 0.3)
        )
    upper = np.flatnonzero(sin <= 0.01)
    upper = upper[np.argsort(x[upper])]
    canvas.line(canvas.project.surface(x[upper], y[upper], 1.5), identity.hair * 0.5, 1.0)
    canvas.line(canvas.project.surface(x[upper], y[upper] - identity.lid - 0.6, 1.0), skin * 0.7, 0.6)


def _iris(canvas: Canvas, identity: Identity, x: float, y: float) -> list[tuple[np.ndarray, ColorLike]]:
    """Return the shapes of an iris at (x, y), its pupil and its highlight, each with its color."""
    angle = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    discs = ((0, 0, 3.4, identity.iris), (0, 0, 1.5, (12, 10, 10)), (1.0, -1.1, 0.7, (250, 250, 250)))
    return [
        (
            canvas.project.surface(
                x + right + np.cos(angle) * radius, y + down + np.sin(angle) * radius, 1.0
            ),
            color,
        )
        for right, down, radius, color in discs
    ]


def _draw_brow(canvas: Canvas, identity: Identity, conditions: CaptureConditions, side: float) -> None:
    """Draw one eyebrow; `side` as in `_draw_eye`."""
    t = np.linspace(-1, 1, 9)
    x = side * (identity.eye_distance + t * identity.brow_width)
    y = identity.brow_height - conditions.brows_up - identity.brow_arch * (1 - t**2)
    y += t * identity.brow_tilt * identity.brow_width
    thick = identity.brow_thickness * (1 - 0.55 * np.maximum(t, 0)) * 0.5
    upper, lower = canvas.project.surface(x, y - thick, 2.0), canvas.project.surface(x, y + thick, 2.0)
    canvas.fill(np.vstack([upper, lower[::-1]]), identity.hair * 0.75 + identity.skin * 0.1, 0.85)


def _draw_mouth(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    """Draw the lips, the teeth and the moustache."""
    width = identity.mouth_width * (1 + 0.13 * conditions.smile)
    rise, gap = 2.6 * conditions.smile, 3.2 * conditions.mouth_open
    t = np.linspace(-1, 1, 13)
    x, arc = t * width, 1 - t**2
    middle = identity.mouth_height - rise * t**2
    upper, lower = middle - gap * 0.25 * arc, middle + gap * arc
    bow = identity.upper_lip * (1 - np.abs(t) ** 1.6) - identity.cupid_bow * np.exp(-((t / 0.16) ** 2))
    upper_top, upper_low, lower_top, lower_low = (
        canvas.project.surface(x, y, 3.0)
        for y in (upper - bow, upper, lower, lower + identity.lower_lip * arc)
    )
    if identity.moustache:
        hair_top = canvas.project.surface(x * 0.95, middle - identity.upper_lip - 5 * arc, 4.0)
        canvas.fill(np.vstack([hair_top, upper_top[::-1]]), identity.hair * 0.7, identity.moustache)
    if gap > 0.4:
        canvas.fill(np.vstack([upper_low, lower_top[::-1]]), (58, 22, 24))
        teeth = canvas.project.surface(x * 0.8, middle + gap * 0.3 * arc, 3.0)
        canvas.fill(np.vstack([upper_low[1:-1], teeth[1:-1][::-1]]), (232, 228, 218))
    canvas.fill(np.vstack([upper_top, upper_low[::-1]]), identity.lips * 0.9)
    canvas.fill(np.vstack([lower_top, lower_low[::-1]]), identity.lips * 1.04)
    canvas.line(upper_low, identity.lips * 0.5, 0.6)


def _draw_skin_marks(canvas: Canvas, identity: Identity) -> None:
    """Draw moles, freckles and the folds beside the mouth."""
    skin = identity.skin
    for across, down, radius in identity.moles:
        canvas.fill_ellipse((across, down), (radius, radius), skin * 0.4, points=10)
    if identity.freckles:
        rng = np.random.default_rng(round(identity.eye_distance * 1e6))
        for across, down in zip(rng.uniform(-24, 24, 26), rng.uniform(-12, 6, 26), strict=True):
            dot = canvas.project.surface(across + np.array([-0.5, 0.5, 0]), down + np.array([0, 0, 0.9]))
            canvas.fill(dot, skin * 0.68, 0.7 * identity.freckles)
    for side in _SIDES if identity.folds else ():
        corner = (side * (identity.mouth_width + 4), identity.mouth_height)
        x, y = spline([(side * 10, 4), (side * 15, 11), corner], closed=False)
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
    return spline([(0.0, -62.0), *side, (0.0, 42.0 + drop), *((-x, y) for x, y in reversed(side))])


def _draw_back_hair(canvas: Canvas, identity: Identity) -> None:
    """Draw the hair behind the head."""
    volume = identity.hair_volume
    reach, low = identity.cheek_width + volume, max(identity.hair_length, -12.0)
    side = [(reach * 0.75, -66 - volume), (reach, -38.0), (reach + 1, -8.0), (reach * 0.96, low)]
    x, y = spline([(0.0, -70 - volume), *side, *((-x, y) for x, y in reversed(side))])
    canvas.fill(canvas.project(x, y, -8.0), identity.hair * 0.8)


def _draw_front_hair(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
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


def _draw_glasses(canvas: Canvas, identity: Identity, conditions: CaptureConditions) -> None:
    tone, distance = np.full(3, conditions.glasses_color), identity.eye_distance
    cos, sin = ellipse((0, 0), (1, 1), 24)
    power = 1.0 if conditions.glasses == 1 else 0.6
    x, y = np.sign(cos) * np.abs(cos) ** power * 11, np.sign(sin) * np.abs(sin) ** power * 8
    for side in _SIDES:
        lens = canvas.project.surface(side * distance + x, identity.eye_height + 1 + y, 5.0)
        if conditions.glasses == 3:
            canvas.fill(lens, (24, 24, 28), 0.86)
        canvas.line(lens, tone, 1.2)
    bridge = np.linspace(-(distance - 11), distance - 11, 5)
    canvas.line(canvas.project.surface(bridge, np.full(5, identity.eye_height - 1.0), 7.0), tone, 1.2)
