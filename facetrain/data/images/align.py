"""Face alignment by five landmarks: both eyes, the nose, both corners of the mouth."""

from __future__ import annotations

import cv2
import numpy as np

from facetrain.face_landmarks import ARCFACE_TEMPLATE, TEMPLATE_SIZE


def similarity(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the similarity transform that maps points (N, 2) to target points in least squares: (2, 3).

    Umeyama, "Least-squares estimation of transformation parameters between two point patterns", 1991,
    equations 38 to 43. For points that all coincide, the scale is undefined; the result is a translation.
    """
    source_mean, target_mean = source.mean(0), target.mean(0)
    source_centered, target_centered = source - source_mean, target - target_mean
    u, singular, v = np.linalg.svd(target_centered.T @ source_centered)
    # A reflection would fit mirrored points better, but a face is never mirrored.
    sign = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(v))])
    rotation = (u * sign) @ v
    variance = np.square(source_centered).sum()
    scale = (singular * sign).sum() / variance if variance > 0 else 1.0
    return np.column_stack([scale * rotation, target_mean - scale * rotation @ source_mean])


def aligned_landmarks(landmarks: np.ndarray, size: int) -> np.ndarray:
    """Return the landmarks (5, 2), in pixels, of the image that `align` cuts out."""
    points = np.asarray(landmarks, np.float64)
    matrix = similarity(points, ARCFACE_TEMPLATE * (size / TEMPLATE_SIZE))
    return points @ matrix[:, :2].T + matrix[:, 2]


def align(image: np.ndarray, landmarks: np.ndarray, size: int) -> np.ndarray:
    """Cut an aligned face out of an image: uint8 (H, W, 3) and landmarks (5, 2) in pixels -> (size, size, 3).

    Pixels outside the image are black, as in InsightFace's alignment.
    """
    matrix = similarity(np.asarray(landmarks, np.float64), ARCFACE_TEMPLATE * (size / TEMPLATE_SIZE))
    return cv2.warpAffine(image, matrix, (size, size), flags=cv2.INTER_LINEAR, borderValue=0)
