"""Drawing of a face: flat shapes, one in front of the other as in a paper theater, and the photo of them."""

# N points of a shape   S side of the image in pixels

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import cv2
import numpy as np

from facetrain.data.images.decode import encode_jpeg
from facetrain.data.synthetic.identity import Identity, sample_identity
from facetrain.data.synthetic.photo import Photo, sample_photo

_FRACTION_BITS = 4
"""Bits behind the binary point of the fixed-point coordinates that OpenCV takes."""
_NOSE_TIP = (56.0, 71.5)
"""Pixel of the tip of the nose in an aligned crop of 112 × 112."""
_EYE_DEPTH = 14.0
_SIDES = np.array([[-1.0, 1.0], [1.0, 1.0]])
"""Factors of x and y for the left and the right side of the image."""
_ANGLE = np.linspace(0, 2 * np.pi, 20, endpoint=False)
_CIRCLE = np.stack([np.cos(_ANGLE), np.sin(_ANGLE)], 1)
_ACROSS = np.linspace(-1, 1, 11)
"""x of points of an eyebrow or of a lip, as a fraction of half its width."""
_ARCH = 1 - _ACROSS**2


class Shape(NamedTuple):
    """A polygon of one color at one distance."""

    outline: np.ndarray
    """float64 (N, 2), in the lengths of `Identity`."""
    color: np.ndarray
    """RGB; what is outside 0 to 255 is clipped."""
    depth: float
    """Distance in front of the edge of the face: a turned head moves the shapes against each other."""
    width: float = 0.0
    """Width of the line if only the outline is drawn; 0 for a filled shape."""


def draw_jpeg(seed: int, identity: int, number: int, size: int) -> bytes:
    """Return photo `number` of an identity as a JPEG of `size` pixels a side."""
    photo = sample_photo(seed, identity, number)
    return encode_jpeg(draw_face(sample_identity(seed, identity), photo, size), photo.quality)


def draw_face(identity: Identity, photo: Photo, size: int) -> np.ndarray:
    """Draw one image: uint8 (S, S, 3), RGB."""
    image = cv2.resize(photo.background, (size, size), interpolation=cv2.INTER_LINEAR)
    scale = size / 112
    # Back to front. One projection of all points: NumPy's calls would take most of the time.
    shapes = [
        *_head(identity, photo),
        *_eyes(identity, photo),
        *_mouth(identity, photo),
        *_in_front(identity, photo),
    ]
    colors = np.clip([shape.color for shape in shapes], 0, 255).tolist()
    for shape, corners, color in zip(shapes, _project(shapes, photo, scale), colors, strict=True):
        if shape.width:
            width = max(1, round(shape.width * scale))
            cv2.polylines(image, [corners], True, color, width, cv2.LINE_AA, _FRACTION_BITS)
        else:
            cv2.fillPoly(image, [corners], color, cv2.LINE_AA, _FRACTION_BITS)
    return _photograph(image, photo)


def _project(shapes: list[Shape], photo: Photo, scale: float) -> list[np.ndarray]:
    """Return the fixed-point pixels of the shapes, int32 (N, 2) each, for the pose of a photo."""
    lengths = [len(shape.outline) for shape in shapes]
    # Alignment keeps the eyes where they are: they turn about themselves.
    forward = np.repeat([shape.depth - _EYE_DEPTH for shape in shapes], lengths)[:, None]
    turn = np.array([photo.yaw, photo.pitch])
    turned = np.concatenate([shape.outline for shape in shapes]) * np.cos(turn) + forward * np.sin(turn)
    cos, sin = np.cos(photo.roll), np.sin(photo.roll)
    pixels = turned @ np.array([[cos, sin], [-sin, cos]]) * photo.size + photo.shift + _NOSE_TIP
    fixed = np.round(pixels * scale * (1 << _FRACTION_BITS)).astype(np.int32)
    return np.split(fixed, np.cumsum(lengths)[:-1])


def _head(identity: Identity, photo: Photo) -> Iterator[Shape]:
    """Yield what is behind the eyes: hair, clothes, ears, face and nose."""
    skin, cheek, forehead = identity.skin, identity.cheek_width, identity.forehead_width
    reach, top = cheek + identity.hair_volume, -70 - identity.hair_volume
    ends = (reach + 1, -8), (reach * 0.96, max(identity.hair_length, -12.0))
    hair = _symmetric((0, top), (reach * 0.75, top + 4), (reach, -38), *ends)
    yield Shape(hair, identity.hair * 0.8, -12)
    yield Shape(_symmetric((18, 20), (18, 45), (44, 62)), skin * 0.8, 0)
    yield Shape(_symmetric((0, 50), (30, 46), (60, 56), (60, 80)), photo.clothes, 0)
    ear = _ellipse(cheek, -9, identity.ear_size * 0.5, identity.ear_size * 1.25)
    yield from (Shape(ear * side, skin * 0.9, -6) for side in _SIDES)
    drop = 2.2 * photo.mouth_open
    jaw = (
        (identity.jaw_width, identity.jaw_height + drop / 2),
        (identity.chin_width, 39 + drop),
        (0, 42 + drop),
    )
    upper = (0, -62), (forehead * 0.6, -57), (forehead, -42), (cheek, -17), (cheek * 0.97, 2)
    yield Shape(_symmetric(*upper, *jaw), skin, 0)
    if identity.beard:
        beard = _symmetric((0, 12), (20, 16), (cheek * 0.92, 5), *jaw)
        yield Shape(beard, _mix(skin, identity.hair * 0.7, identity.beard), 0)
    tip, width, bridge = identity.nose_length, identity.nose_width, identity.bridge_width
    nose = _symmetric((bridge, -20), (bridge * 1.2, -8), (width, tip), (width * 0.5, tip + 3))
    yield Shape(nose, skin * 1.04 + 5, 18)
    yield Shape(_ellipse(0, tip + 2.5, width * 0.9, 2.5), skin * 0.75, 18)
    yield Shape(_ellipse(0, tip - 2, width * 0.5, 3), skin * 1.08 + 8, 22)
    nostril = _ellipse(width * 0.45, tip + 1.4, 1.8, 1)
    yield from (Shape(nostril * side, skin * 0.45, 19) for side in _SIDES)
    yield from (Shape(_ellipse(x, y, radius, radius), skin * 0.4, 12) for x, y, radius in identity.moles)


def _eyes(identity: Identity, photo: Photo) -> Iterator[Shape]:
    """Yield the eyes and the eyebrows."""
    x, y, width = identity.eye_distance, identity.eye_height, identity.eye_width
    opening = identity.eye_opening * (1 - photo.eyes_closed)
    tilt = np.array([[1, -identity.eye_tilt], [0, 1]])
    socket = _ellipse(x, y - 2, width + 4, 8)
    rim = _ellipse(0, -0.7, width * 1.1, opening * 1.3) @ tilt + (x, y)
    white = _ellipse(0, 0, width, opening) @ tilt + (x, y)
    height = identity.brow_height - photo.brows_up
    brow_y = height - identity.brow_arch * _ARCH - identity.brow_tilt * identity.brow_width * _ACROSS
    half = identity.brow_thickness * (1 - 0.5 * np.maximum(_ACROSS, 0)) / 2
    brow = _band(x + identity.brow_width * _ACROSS, brow_y - half, brow_y + half)
    for side in _SIDES:
        yield Shape(socket * side, identity.skin * 0.8, 13)
        yield Shape(rim * side, identity.hair * 0.5, _EYE_DEPTH)
        yield Shape(white * side, np.array([236.0, 232.0, 226.0]), _EYE_DEPTH)
        for radius, color in (3.4, identity.iris), (1.5, np.full(3, 11.0)):
            disc = _ellipse(x * side[0] + photo.gaze, y, radius, min(opening, radius))
            yield Shape(disc, color, _EYE_DEPTH)
        yield Shape(brow * side, _mix(identity.skin, identity.hair * 0.75, 0.85), 13)


def _mouth(identity: Identity, photo: Photo) -> Iterator[Shape]:
    """Yield the moustache, the lips and what is between them."""
    lips, x = identity.skin * identity.lip_tint, _ACROSS * identity.mouth_width * (1 + 0.13 * photo.smile)
    middle = identity.mouth_height - 2.6 * photo.smile * _ACROSS**2
    upper, lower = middle - 0.8 * photo.mouth_open * _ARCH, middle + 3.2 * photo.mouth_open * _ARCH
    if identity.moustache:
        top = middle - identity.upper_lip - 5 * _ARCH
        yield Shape(_band(x, top, middle), _mix(identity.skin, identity.hair * 0.7, identity.moustache), 16)
    yield Shape(_band(x, upper, lower), np.array([58.0, 22.0, 24.0]), 15)
    yield Shape(_band(x, upper - identity.upper_lip * (1 - np.abs(_ACROSS) ** 1.6), upper), lips * 0.85, 16)
    yield Shape(_band(x, lower, lower + identity.lower_lip * _ARCH), lips * 1.04, 16)


def _in_front(identity: Identity, photo: Photo) -> Iterator[Shape]:
    """Yield the hair above the forehead, and what hides a part of the face."""
    width, line, part = identity.forehead_width, identity.hairline, identity.parting
    right = [(20.0, -72.0), (width + 4, -52.0), (width + 3, -30.0), (width - 3, -41.0)]
    left = [(-x, y) for x, y in reversed(right)]
    under = [(part + 14, line + 2), (part, line - 6), (part - 14, line + 2)]
    yield Shape(_smooth([(0, -76 - identity.hair_volume), *right, *under, *left]), identity.hair, 8)
    if photo.glasses:
        lens = _ellipse(identity.eye_distance, identity.eye_height + 1, 10.5, 8)
        yield from (Shape(lens * side, np.full(3, photo.glasses), 20, width=1.2) for side in _SIDES)
    if photo.mask:
        yield Shape(_symmetric((0, -6), (34, 2), (30, 30), (0, 44)), photo.clothes, 24)


def _photograph(image: np.ndarray, photo: Photo) -> np.ndarray:
    """Apply light, blur and noise to uint8 (S, S, 3)."""
    light = cv2.resize(photo.light, image.shape[:2], interpolation=cv2.INTER_LINEAR)
    image = cv2.multiply(image, light, dtype=cv2.CV_8U)
    if photo.gray:
        image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    if photo.blur:
        image = cv2.GaussianBlur(image, (0, 0), photo.blur)
    # OpenCV's generator is per thread and keeps its state: without a seed per image, the noise would depend on the
    # images that this thread drew before.
    cv2.setRNGSeed(photo.noise_seed)
    noise = cv2.randn(np.empty(image.shape, np.int16), (0,) * 3, (photo.noise,) * 3)
    return cv2.add(image, noise, dtype=cv2.CV_8U)


def _mix(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    return first * (1 - share) + second * share


def _ellipse(x: float, y: float, width: float, height: float) -> np.ndarray:
    """Return the outline of an ellipse around (x, y), given by half its width and height."""
    return _CIRCLE * (width, height) + (x, y)


def _band(x: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Return the outline of what is between two lines over the same x."""
    return np.stack([np.concatenate([x, x[::-1]]), np.concatenate([upper, lower[::-1]])], 1)


def _symmetric(*right: tuple[float, float]) -> np.ndarray:
    """Return a smooth outline, given by points of its right half from top to bottom."""
    return _smooth([*right, *((-x, y) for x, y in reversed(right) if x)])


def _smooth(points: list[tuple[float, float]]) -> np.ndarray:
    """Return a closed Catmull–Rom spline through points."""
    return _spline_weights(len(points)) @ np.array(points)


@cache
def _spline_weights(count: int) -> np.ndarray:
    """Return the weights of `count` points in the points of their spline: float64 (4 × count, count)."""
    t = np.arange(4)[:, None] / 4
    cubics = [-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2]
    weights = np.zeros((count, 4, count))
    for start in range(count):
        for place, cubic in enumerate(cubics):
            weights[start, :, (start + place - 1) % count] += cubic[:, 0] / 2
    return weights.reshape(-1, count)
