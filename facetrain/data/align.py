"""Faces turned upright by five landmarks: both eyes, the nose, both corners of the mouth."""

from __future__ import annotations

import cv2
import numpy as np

ARCFACE_TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
"""Where the landmarks lie in the 112 × 112 images that ArcFace's models were trained on (x, y)."""
_TEMPLATE_SIZE = 112


def similarity(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the (2, 3) rotation, scale and shift that brings points nearest to others, in least squares.

    Umeyama, "Least-squares estimation of transformation parameters between two point patterns", 1991,
    equations 38 to 43. Points that all coincide have no scale; they are shifted only.
    """
    from_mean, to_mean = source.mean(0), target.mean(0)
    centered, wanted = source - from_mean, target - to_mean
    u, strength, v = np.linalg.svd(wanted.T @ centered)
    # A reflection would fit mirrored points better, and no face needs one.
    sign = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(v))])
    rotation = (u * sign) @ v
    spread = np.square(centered).sum()
    scale = (strength * sign).sum() / spread if spread > 0 else 1.0
    return np.column_stack([scale * rotation, to_mean - scale * rotation @ from_mean])


def align(image: np.ndarray, landmarks: np.ndarray, size: int) -> np.ndarray:
    """Cut a face out of an image, uint8 (H, W, 3), by its landmarks (5, 2) in pixels: (size, size, 3).

    What lies outside the image is black, as in InsightFace's alignment.
    """
    matrix = similarity(np.asarray(landmarks, np.float64), ARCFACE_TEMPLATE * (size / _TEMPLATE_SIZE))
    return cv2.warpAffine(image, matrix, (size, size), flags=cv2.INTER_LINEAR, borderValue=0)
