"""L2 normalization of embeddings, and the cosine of an embedding of zeros.

Many systems write zeros for an image in which they find no face. Such an image is rejected: it matches nobody, so its
cosine is the lowest one, with every other image and with another rejected one.
"""

# N rows   Q, G rows of two arrays   D embedding

from __future__ import annotations

import numpy as np

from facetrain.errors import ModelError

REJECTED = -1.0
"""Cosine of a rejected image with every other."""


def l2_normalize(embedding_ND: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1, in the same dtype: (N, D).

    The length is bounded below by 1e-12, so that a row of zeros stays zero instead of becoming NaN.
    """
    return embedding_ND / np.maximum(np.linalg.norm(embedding_ND, axis=1, keepdims=True), 1e-12)


def require_finite(embedding_ND: np.ndarray, name: str, *, first: int = 0) -> None:
    """Check the embeddings (N, D) that a network has computed; `first` is the number of the first image in `name`.

    Raises:
        ModelError: an embedding is not finite.
    """
    bad = np.flatnonzero(~np.isfinite(embedding_ND).all(1))
    if len(bad):
        raise ModelError(
            f"{name}: the embedding of image {first + bad[0]} is not finite; the network has diverged, "
            "use an earlier checkpoint"
        )


def is_rejected(embedding_ND: np.ndarray) -> np.ndarray:
    """Return which rows are embeddings of zeros: bool (N,)."""
    return ~np.any(embedding_ND, axis=1)


def cosines(
    unit_QD: np.ndarray, unit_GD: np.ndarray, rejected_Q: np.ndarray, rejected_G: np.ndarray
) -> np.ndarray:
    """Return the cosine of each unit embedding of one array with each of another: float (Q, G).

    The last two arguments are `is_rejected` of the first two.
    """
    cosine_QG = unit_QD @ unit_GD.T
    if rejected_Q.any():
        cosine_QG[rejected_Q] = REJECTED
    if rejected_G.any():
        cosine_QG[:, rejected_G] = REJECTED
    return cosine_QG
