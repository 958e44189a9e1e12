"""Fingerprint of a model: its embedding of a fixed image, which files of embeddings have.

Embeddings of two models are not compared. A digest of the weights would not know that an exported ONNX file is the
same model.
"""

# D embedding

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.normalization import l2_normalize

_SQUARES = 8
"""Colored squares along each side of the image."""
_LEAST_COSINE = 0.98
"""Cosine of two fingerprints from which they are of one model.

Two models that were trained apart have a cosine near 0, and one in bfloat16 and in float32 above 0.999."""


def model_fingerprint(embedder: ImageEmbedder) -> np.ndarray:
    """Return the unit embedding of the fixed image: float32 (D,). No collective."""
    alone = replace(embedder, alone=True)
    return np.asarray(
        l2_normalize(alone.embed([_fixed_image(embedder.image_size)], name="fingerprint", flip=False))[0]
    )


def is_same_model(first_D: np.ndarray | None, second_D: np.ndarray | None) -> bool:
    """Return whether two fingerprints are of one model; also if one of them is unknown, or not finite."""
    if first_D is None or second_D is None:
        return True
    if first_D.shape != second_D.shape:
        return False
    return not first_D @ second_D < _LEAST_COSINE


def _fixed_image(size: int) -> np.ndarray:
    """Return the image, uint8 (size, size, 3): squares of colors that never change."""
    # Of a hash: the random numbers of a library may change with its version.
    colors = hashlib.shake_128(b"facetrain").digest(3 * _SQUARES**2)
    square = np.arange(size) * _SQUARES // size
    return np.frombuffer(colors, np.uint8).reshape(_SQUARES, _SQUARES, 3)[square][:, square]
