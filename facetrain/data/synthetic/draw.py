"""Put a person on pixels."""

from __future__ import annotations

import math

import cv2
import numpy as np

from facetrain.data.synthetic.capture_conditions import Conditions
from facetrain.data.synthetic.geometry import CENTER, Projection, spline
from facetrain.data.synthetic.identity import Identity

_OVERSAMPLE = 2
_SHIFT = 4  # cv2 takes fixed-point coordinates: 4 bits behind the point
Points = tuple[np.ndarray, np.ndarray]


def draw_face(person: Identity, conditions: Conditions, size: int = 112) -> np.ndarray:
    """Draw one image of one person: uint8 (size, size, 3), RGB."""
    scale = _OVERSAMPLE * size / 112
    canvas = _Canvas(person, conditions, scale, _OVERSAMPLE * size)
    canvas.draw()
    image = cv2.resize(canvas.image, (size, size), interpolation=cv2.INTER_AREA)
    return _photograph(image, conditions)


class _Canvas:
    """The image while it is drawn, larger than it will be, so that edges come out smooth."""

    def __init__(self, person: Identity, conditions: Conditions, scale: float, side: int) -> None:
        self._p, self._c, self._scale = person, conditions, scale
        self._project = Projection(conditions, scale)
        self._skin = np.array(person.skin)
        self.image = _background(side, conditions)

    def draw(self) -> None:
        """Draw everything, from the back to the front."""
        self._hair_behind()
        self._neck_and_ears()
        self._head()
        self._nose()
        for side in (-1.0, 1.0):
            self._eye(side)
            self._brow(side)
        self._mouth()
        self._marks()
        self._light()
        self._hair_in_front()
        self._in_the_way()

    def _fill(self, pixels: np.ndarray, color: np.ndarray | tuple[float, ...], opacity: float = 1.0) -> None:
        corners = np.round(pixels * (1 << _SHIFT)).astype(np.int32)
        tone = _tone(color)
        if opacity >= 1:
            cv2.fillPoly(self.image, [corners], tone, cv2.LINE_AA, _SHIFT)
            return
        # Only the part under the shape is blended.
        side = self.image.shape[0]
        low = [min(max(math.floor(v) - 2, 0), side) for v in pixels.min(0).tolist()]
        high = [min(max(math.ceil(v) + 3, 0), side) for v in pixels.max(0).tolist()]
        if high[0] <= low[0] or high[1] <= low[1]:
            return
        part = self.image[low[1] : high[1], low[0] : high[0]]
        over = part.copy()
        cv2.fillPoly(over, [corners - (np.array(low, np.int32) << _SHIFT)], tone, cv2.LINE_AA, _SHIFT)
        cv2.addWeighted(over, opacity, part, 1 - opacity, 0, dst=part)

    def _line(self, pixels: np.ndarray, color: np.ndarray | tuple[float, ...], width: float) -> None:
        corners = np.round(pixels * (1 << _SHIFT)).astype(np.int32)
        cv2.polylines(
            self.image,
            [corners],
            False,
            _tone(color),
            max(1, round(width * self._scale)),
            cv2.LINE_AA,
            _SHIFT,
        )

    def _outline(self) -> Points:
        p, c = self._p, self._c
        drop = 2.2 * c.mouth_open
        side = [
            (p.forehead_width * 0.62, -57.0),
            (p.forehead_width, -42.0),
            (p.cheek_width, -17.0),
            (p.cheek_width * 0.97, 2.0),
            (p.jaw_width, p.jaw_height + drop * 0.5),
            (p.chin_width, 39.0 + drop),
        ]
        knots = [(0.0, -62.0), *side, (0.0, 42.0 + drop), *((-x, y) for x, y in reversed(side))]
        return spline(knots)

    def _head(self) -> None:
        x, y = self._outline()
        self._fill(self._project(x, y, 4.0), self._skin)
        if self._p.beard:
            lower = y > 6
            inner_x, inner_y = x[lower] * 0.99, y[lower]
            beard = np.array(self._p.hair) * 0.6 + self._skin * 0.4
            top = self._project.surface(
                np.linspace(-24, 24, 9)[::-1], np.full(9, 13.0) + 4 * np.abs(np.linspace(-1, 1, 9))
            )
            order = np.argsort(-inner_x)
            rim = self._project(inner_x[order], inner_y[order], 8.0)
            self._fill(np.vstack([rim, top[::-1]]), beard, self._p.beard)

    def _neck_and_ears(self) -> None:
        x, y = spline([(-20, 20), (-18, 45), (-44, 62), (44, 62), (18, 45), (20, 20)], closed=True)
        self._fill(self._project(x, y, 0.0), self._skin * 0.8)
        self._fill(
            self._project(np.array([-60.0, -24, 24, 60, 60, -60]), np.array([56.0, 46, 46, 56, 80, 80]), 0.0),
            self._c.clothes,
        )
        for side in (-1.0, 1.0):
            size = self._p.ear_size
            angle = np.linspace(0, 2 * np.pi, 20)
            x = side * (self._p.cheek_width + 0.5) + np.cos(angle) * size * 0.5
            self._fill(self._project(x, -9 + np.sin(angle) * size * 1.25, -6.0), self._skin * 0.9)

    def _nose(self) -> None:
        p = self._p
        dark, light = self._skin * 0.72, np.minimum(self._skin * 1.12 + 6, 255)
        tip = p.nose_length
        for side in (-1.0, 1.0):
            x, y = spline(
                [(side * p.bridge_width, -20), (side * p.bridge_width * 1.1, -8), (side * p.nose_width * 0.9, tip - 3),
                 (side * p.nose_width, tip + 1), (side * p.nose_width * 0.5, tip + 2.2)], closed=False,
            )  # fmt: skip
            lift = np.interp(y, [-20, tip], [3, 9])
            self._line(self._project.surface(x, y, lift), self._skin * 0.84, 0.7)
            angle = np.linspace(0, 2 * np.pi, 12)
            nostril = self._project.surface(
                side * p.nose_width * 0.45 + np.cos(angle) * 1.7, tip + 1.4 + np.sin(angle) * 0.9, 9.0
            )
            self._fill(nostril, dark * 0.6)
        angle = np.linspace(0, 2 * np.pi, 16)
        ball = self._project.surface(
            np.cos(angle) * p.nose_width * 0.42 * p.nose_round,
            tip - 3 + np.sin(angle) * 2.8 * p.nose_round,
            12.0,
        )
        self._fill(ball, light, 0.5)
        shadow_x, shadow_y = spline(
            [(-p.nose_width, tip + 1), (0, tip + 4.2), (p.nose_width, tip + 1), (0, tip + 2)]
        )
        self._fill(self._project.surface(shadow_x, shadow_y, 7.0), dark, 0.6)

    def _eye(self, side: float) -> None:
        p, c = self._p, self._c
        opening = p.eye_opening * (1 - c.eyes_closed) * (1 - 0.15 * max(c.smile, 0))
        center_x, center_y = side * p.eye_distance, p.eye_height
        angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        local_x = np.cos(angle) * p.eye_width
        local_y = np.where(np.sin(angle) < 0, np.sin(angle) * opening * 1.1, np.sin(angle) * opening * 0.8)
        tilt = side * p.eye_tilt
        x = center_x + local_x - local_y * tilt
        y = center_y + local_y - side * local_x * abs(p.eye_tilt) * np.sign(p.eye_tilt)
        socket = self._project.surface(
            center_x + np.cos(angle) * (p.eye_width + 3), center_y - 1 + np.sin(angle) * 6.5
        )
        self._fill(socket, self._skin * 0.86, 0.55)
        white = self._project.surface(x, y, 1.0)
        self._fill(white, (236, 232, 226))
        self._iris(white, center_x + c.gaze[0] * 3, center_y + c.gaze[1] * 2 - 0.3, opening)
        upper = np.sin(angle) <= 0.01
        order = np.argsort(x[upper])
        lid = self._project.surface(x[upper][order], y[upper][order], 1.5)
        self._line(lid, np.array(p.hair) * 0.5, 1.0)
        crease = self._project.surface(x[upper][order], y[upper][order] - p.lid - 0.6, 1.0)
        self._line(crease, self._skin * 0.7, 0.6)

    def _iris(self, white: np.ndarray, x: float, y: float, opening: float) -> None:
        if opening < 0.8:
            return
        angle = np.linspace(0, 2 * np.pi, 16, endpoint=False)
        side = self.image.shape[0]
        low = np.clip(np.floor(white.min(0)).astype(int), 0, side - 1)
        high = np.clip(np.ceil(white.max(0)).astype(int) + 1, 1, side)
        if (high <= low).any():
            return
        seen = np.zeros((high[1] - low[1], high[0] - low[0]), np.uint8)
        offset = (low << _SHIFT).astype(np.int32)
        cv2.fillPoly(
            seen, [np.round(white * (1 << _SHIFT)).astype(np.int32) - offset], 255, cv2.LINE_AA, _SHIFT
        )
        part = self.image[low[1] : high[1], low[0] : high[0]]
        before = part.copy()
        for radius, color in ((3.4, np.array(self._p.iris)), (1.5, np.array([12.0, 10, 10]))):
            self._fill(
                self._project.surface(x + np.cos(angle) * radius, y + np.sin(angle) * radius, 1.0), color
            )
        glint = self._project.surface(x + 1.0 + np.cos(angle) * 0.7, y - 1.1 + np.sin(angle) * 0.7, 1.0)
        self._fill(glint, (250, 250, 250))
        share = (seen.astype(np.float32) / 255)[:, :, None]
        part[:] = (part * share + before * (1 - share)).astype(np.uint8)

    def _brow(self, side: float) -> None:
        p = self._p
        t = np.linspace(-1, 1, 9)
        x = side * (p.eye_distance + t * p.brow_width)
        y = p.brow_height - self._c.brows_up - p.brow_arch * (1 - t**2) + t * p.brow_tilt * p.brow_width
        thick = p.brow_thickness * (1 - 0.55 * np.maximum(t, 0)) * 0.5
        upper, lower = self._project.surface(x, y - thick, 2.0), self._project.surface(x, y + thick, 2.0)
        self._fill(np.vstack([upper, lower[::-1]]), np.array(p.hair) * 0.75 + self._skin * 0.1, 0.85)

    def _mouth(self) -> None:
        p, c = self._p, self._c
        width = p.mouth_width * (1 + 0.13 * c.smile)
        rise, gap = 2.6 * c.smile, 3.2 * c.mouth_open
        t = np.linspace(-1, 1, 13)
        x = t * width
        middle = p.mouth_height - rise * t**2
        bow = p.upper_lip * (1 - np.abs(t) ** 1.6) - p.cupid_bow * np.exp(-((t / 0.16) ** 2))
        upper_top = self._project.surface(x, middle - gap * 0.25 * (1 - t**2) - bow, 3.0)
        upper_low = self._project.surface(x, middle - gap * 0.25 * (1 - t**2), 3.0)
        lower_top = self._project.surface(x, middle + gap * (1 - t**2), 3.0)
        lower_low = self._project.surface(x, middle + gap * (1 - t**2) + p.lower_lip * (1 - t**2), 3.0)
        if p.moustache:
            hair_top = self._project.surface(x * 0.95, middle - p.upper_lip - 5 * (1 - t**2), 4.0)
            self._fill(np.vstack([hair_top, upper_top[::-1]]), np.array(p.hair) * 0.7, p.moustache)
        if gap > 0.4:
            self._fill(np.vstack([upper_low, lower_top[::-1]]), (58, 22, 24))
            teeth = self._project.surface(x * 0.8, middle + gap * 0.3 * (1 - t**2), 3.0)
            self._fill(np.vstack([upper_low[1:-1], teeth[1:-1][::-1]]), (232, 228, 218))
        lips = np.array(p.lips)
        self._fill(np.vstack([upper_top, upper_low[::-1]]), lips * 0.9)
        self._fill(np.vstack([lower_top, lower_low[::-1]]), lips * 1.04)
        self._line(upper_low, lips * 0.5, 0.6)

    def _marks(self) -> None:
        p = self._p
        for across, down, radius in p.moles:
            angle = np.linspace(0, 2 * np.pi, 10)
            self._fill(
                self._project.surface(across + np.cos(angle) * radius, down + np.sin(angle) * radius),
                self._skin * 0.4,
            )
        if p.freckles:
            rng = np.random.default_rng(round(p.eye_distance * 1e6))
            for across, down in zip(rng.uniform(-24, 24, 26), rng.uniform(-12, 6, 26), strict=True):
                dot = self._project.surface(across + np.array([-0.5, 0.5, 0]), down + np.array([0, 0, 0.9]))
                self._fill(dot, self._skin * 0.68, 0.7 * p.freckles)
        if p.folds:
            for side in (-1.0, 1.0):
                x, y = spline(
                    [(side * 10, 4), (side * 15, 11), (side * (p.mouth_width + 4), p.mouth_height)],
                    closed=False,
                )
                self._line(self._project.surface(x, y), self._skin * (1 - 0.45 * p.folds), 0.7)

    def _light(self) -> None:
        """Shade the head as an ellipsoid, turned with it."""
        side = self.image.shape[0]
        small = side // 4  # shading is smooth: a quarter of the pixels is enough
        column = (np.arange(small, dtype=np.float32) + 0.5) * 4 / self._scale
        x = ((column - CENTER[0] - 8 * np.sin(self._c.yaw)) / 47)[None, :]
        y = ((column - CENTER[1] + 8) / 66)[:, None]
        z = np.sqrt(np.maximum(0.05, 1 - x**2 - y**2))
        light = np.array(self._c.light) / np.linalg.norm(self._c.light)
        shade = self._c.ambient + (1 - self._c.ambient) * 1.35 * np.maximum(
            0, x * light[0] + y * light[1] + z * light[2]
        )
        shade = cv2.resize(shade.astype(np.float32), (side, side), interpolation=cv2.INTER_LINEAR)
        cv2.multiply(self.image, cv2.merge([shade] * 3), dst=self.image, dtype=cv2.CV_8U)

    def _hair_behind(self) -> None:
        p = self._p
        reach, low = p.cheek_width + p.hair_volume, max(p.hair_length, -12.0)
        side = [(reach * 0.75, -66 - p.hair_volume), (reach, -38.0), (reach + 1, -8.0), (reach * 0.96, low)]
        knots = [(0.0, -70 - p.hair_volume), *side, *((-x, y) for x, y in reversed(side))]
        x, y = spline(knots)
        self._fill(self._project(x, y, -8.0), np.array(p.hair) * 0.8)

    def _hair_in_front(self) -> None:
        p = self._p
        if self._c.hat is not None:
            x, y = spline([(-43, -40), (-36, -74), (0, -86), (36, -74), (43, -40), (0, -47)])
            self._fill(self._project(x, y, 14.0), self._c.hat)
            return
        top = [
            (-(p.forehead_width + 3), -30.0),
            (-(p.forehead_width + 4), -52.0),
            (-22.0, -72.0),
            (0.0, -76.0 - p.hair_volume),
        ]
        rim = [(22.0, -72.0), (p.forehead_width + 4, -52.0), (p.forehead_width + 3, -30.0)]
        line = p.hairline + p.fringe
        under = [
            (p.forehead_width - 3, -41.0),
            (14 + p.parting * 0.5, line + 2),
            (p.parting, line - 5),
            (-16 + p.parting * 0.5, line + 3),
            (-(p.forehead_width - 3), -41.0),
        ]
        x, y = spline([*top, *rim, *under])
        gain = self._c.ambient + (1 - self._c.ambient) * 0.9
        self._fill(self._project.surface(x, np.minimum(y, -20), 3.0), np.array(p.hair) * gain)
        x, y = spline(
            [(-20 + p.parting, line - 8), (p.parting, line - 13), (20 + p.parting, line - 9)], closed=False
        )
        self._line(self._project.surface(x, y, 3.0), np.minimum(np.array(p.hair) * 1.5 + 14, 255) * gain, 1.2)

    def _in_the_way(self) -> None:
        c, p = self._c, self._p
        if c.glasses:
            tone = np.full(3, c.glasses_color)
            for side in (-1.0, 1.0):
                angle = np.linspace(0, 2 * np.pi, 24)
                power = 1.0 if c.glasses == 1 else 0.6
                x = side * p.eye_distance + np.sign(np.cos(angle)) * np.abs(np.cos(angle)) ** power * 11
                y = p.eye_height + 1 + np.sign(np.sin(angle)) * np.abs(np.sin(angle)) ** power * 8
                lens = self._project.surface(x, y, 5.0)
                if c.glasses == 3:
                    self._fill(lens, (24, 24, 28), 0.86)
                self._line(lens, tone, 1.2)
            bridge = np.linspace(-(p.eye_distance - 11), p.eye_distance - 11, 5)
            self._line(self._project.surface(bridge, np.full(5, p.eye_height - 1.0), 7.0), tone, 1.2)
        if c.mask:
            x, y = spline([(-34, 2), (0, -6), (34, 2), (30, 30), (0, 44), (-30, 30)])
            self._fill(self._project.surface(x, y, 8.0), c.clothes)
        if c.hand is not None:
            angle = np.linspace(0, 2 * np.pi, 20)
            across, down, radius = c.hand
            shape = self._project(across + np.cos(angle) * radius, down + np.sin(angle) * radius * 1.5, 60.0)
            self._fill(shape, self._skin * 0.8)


def _tone(color: np.ndarray | tuple[float, ...]) -> tuple[float, ...]:
    return tuple(min(max(float(value), 0.0), 255.0) for value in color)


def _background(side: int, c: Conditions) -> np.ndarray:
    first, second, angle = c.background
    ramp = np.linspace(-0.7, 0.7, side, dtype=np.float32)
    share = np.clip(0.5 + ramp[None, :] * np.cos(angle) + ramp[:, None] * np.sin(angle), 0, 1)
    rest = 1 - share
    # Color by color: NumPy is several times slower along an axis of three.
    colors = zip(np.array(first, np.float32), np.array(second, np.float32), strict=True)
    planes = [(one * rest + other * share).astype(np.uint8) for one, other in colors]
    return cv2.merge(planes)


def _photograph(image: np.ndarray, c: Conditions) -> np.ndarray:
    """Add what a camera adds: resolution, blur, color of the light, exposure, noise."""
    size = image.shape[0]
    if c.resolution < 1:
        small = max(16, round(size * c.resolution))
        image = cv2.resize(image, (small, small), interpolation=cv2.INTER_AREA)
        image = cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR)
    if c.blur:
        image = cv2.GaussianBlur(image, (0, 0), c.blur)
    level = np.arange(256, dtype=np.float32) / 255
    table = np.stack([255 * np.clip(level * gain, 0, 1) ** c.gamma for gain in c.gains], 1)
    image = cv2.LUT(image, np.round(table).astype(np.uint8).reshape(1, 256, 3))
    if c.gray:
        image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    if c.noise > 1:
        noise = np.empty((size, size, 3), np.int16)
        cv2.setRNGSeed(c.seed)
        cv2.randn(noise, (0, 0, 0), (c.noise, c.noise, c.noise))
        image = cv2.add(image, noise, dtype=cv2.CV_8U)
    return image
