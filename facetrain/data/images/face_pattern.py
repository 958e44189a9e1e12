"""Pattern of dark and bright places in face images: their orientation, and the alignment of two datasets.

The average over many aligned faces shows eyes, nose and mouth; another alignment moves or scales it. No network is
needed. The patterns of single images are noisy, so all decisions are made over many images.
"""

# N images   S side of a pattern (PATTERN_SIZE)

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np

from facetrain.data.images.decode import resize_square
from facetrain.face_landmarks import ARCFACE_TEMPLATE, TEMPLATE_SIZE

PATTERN_SIZE = 56
_PIXELS = TEMPLATE_SIZE / PATTERN_SIZE
"""Pixels of a 112 × 112 image per number of a pattern."""
_MAX_SHIFT = 14
_SCALES = np.exp(np.linspace(-0.95, 0.95, 41))
"""Scales from 1 / 2.6 to 2.6 in steps of 4.9 %; the middle one is 1."""


@dataclass(frozen=True)
class Registration:
    """The position of one average face relative to another one."""

    scale: float
    """Size of the face, as a multiple of the reference's."""
    right: float
    """Shift to the right, in pixels of a 112 × 112 image."""
    down: float
    """Shift down, in pixels of a 112 × 112 image."""
    similarity: float
    """Correlation with the reference after the shift and the scaling."""
    similarity_in_place: float
    """Correlation with the reference as it is."""


def face_pattern(image: np.ndarray) -> np.ndarray:
    """Return the local contrast of an image: uint8 (H, W, 3) RGB -> float32 (S, S).

    Large areas of light and shadow are removed, so that lighting and hair do not dominate.
    """
    gray = cv2.cvtColor(resize_square(image, TEMPLATE_SIZE), cv2.COLOR_RGB2GRAY)
    small = cv2.resize(gray, (PATTERN_SIZE, PATTERN_SIZE), interpolation=cv2.INTER_AREA).astype(np.float32)
    detail = small - cv2.GaussianBlur(small, (0, 0), 5)
    contrast = np.sqrt(cv2.GaussianBlur(detail * detail, (0, 0), 8))
    return np.asarray(cv2.GaussianBlur(detail / (contrast + 4), (0, 0), 1))


def correlation(patterns_NSS: np.ndarray, reference_SS: np.ndarray) -> np.ndarray:
    """Return the correlation of each pattern with a reference, inside the ellipse of a face: float (N,)."""
    inside = _face_ellipse()
    values, reference = patterns_NSS[:, inside], reference_SS[inside]
    values = values - values.mean(1, keepdims=True)
    reference = reference - reference.mean()
    norms = np.linalg.norm(values, axis=1) * np.linalg.norm(reference)
    return np.asarray(values @ reference / np.maximum(norms, 1e-9))


def orientation_correlations(patterns_NSS: np.ndarray) -> np.ndarray:
    """Return the correlation with an upright face after 0, 1, 2 and 3 quarter turns: (N, 4).

    The largest one of an upright face is the first; of a face that must be turned k quarters counterclockwise
    to be upright it is the one of k.
    """
    turned = [np.rot90(patterns_NSS, turns, axes=(1, 2)) for turns in range(4)]
    return np.stack([correlation(patterns, upright_face()) for patterns in turned], axis=1)


def register(reference_SS: np.ndarray, average_SS: np.ndarray) -> Registration:
    """Find the scale and the shift under which an average face fits a reference."""
    inside = _face_ellipse().astype(np.float32)
    reference = np.where(inside > 0, reference_SS - reference_SS[inside > 0].mean(), 0).astype(np.float32)
    center = (PATTERN_SIZE - 1) / 2
    best = (-1.0, 1.0, 0.0, 0.0)
    for scale in _SCALES:
        # The average is scaled by 1 / scale around its center and padded, then the reference slides over it.
        matrix = cv2.getRotationMatrix2D((center, center), 0, 1 / scale)
        scaled = cv2.warpAffine(average_SS, matrix, (PATTERN_SIZE, PATTERN_SIZE))
        found = cv2.matchTemplate(np.pad(scaled, _MAX_SHIFT), reference, cv2.TM_CCORR_NORMED, mask=inside)
        found = np.nan_to_num(found, nan=-1.0, posinf=-1.0, neginf=-1.0)
        row, column = np.unravel_index(int(found.argmax()), found.shape)
        if found[row, column] > best[0]:
            shift = (float(column) - _MAX_SHIFT) * scale, (float(row) - _MAX_SHIFT) * scale
            best = (float(found[row, column]), float(scale), *shift)
    similarity, scale, right, down = best
    in_place = float(correlation(average_SS[None], reference_SS)[0])
    return Registration(scale, right * _PIXELS, down * _PIXELS, similarity, in_place)


@cache
def _face_ellipse() -> np.ndarray:
    row, column = np.mgrid[0:PATTERN_SIZE, 0:PATTERN_SIZE] / PATTERN_SIZE
    return np.asarray(((column - 0.5) / 0.42) ** 2 + ((row - 0.58) / 0.42) ** 2 < 1)


@cache
def upright_face() -> np.ndarray:
    """Return the pattern (S, S) of a face at the landmarks of ArcFace's template: dark eyes, nostrils and mouth."""
    y, x = (np.mgrid[0:PATTERN_SIZE, 0:PATTERN_SIZE] + 0.5) * _PIXELS

    def blob(center_x: float, center_y: float, width: float, height: float) -> np.ndarray:
        return np.asarray(np.exp(-(((x - center_x) / width) ** 2) / 2 - ((y - center_y) / height) ** 2 / 2))

    left_eye, right_eye, nose, left_mouth, right_mouth = ARCFACE_TEMPLATE.tolist()
    mouth = (left_mouth[0] + right_mouth[0]) / 2, (left_mouth[1] + right_mouth[1]) / 2
    eyes = sum(blob(eye[0], eye[1] - 3, 9, 6) for eye in (left_eye, right_eye))
    cheeks = sum(blob(eye[0], eye[1] + 14, 9, 5) for eye in (left_eye, right_eye))
    bridge, nostrils = blob(nose[0], nose[1] - 6, 5, 10), blob(nose[0], nose[1] + 6, 8, 3)
    lips, chin = blob(*mouth, 13, 4), blob(mouth[0], mouth[1] + 11, 8, 4)
    return np.asarray(0.5 * cheeks + 0.5 * bridge + 0.3 * chin - eyes - 0.4 * nostrils - 0.7 * lips)
