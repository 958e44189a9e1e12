"""L2 normalization of embeddings, their length before it, and the check of what a network has computed."""

# N rows   D embedding

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from facetrain.errors import ModelError

_LENGTH_TOLERANCE = 1e-3
"""Difference from length 1 of an embedding that was normalized in 16 bits."""


def embedding_lengths(embedding_ND: np.ndarray) -> np.ndarray:
    """Return the length of each row, (N,): before normalization, it is the quality of the image.

    Networks give blurred and hidden faces shorter embeddings (Meng et al., "MagFace", CVPR 2021).
    """
    length_N: np.ndarray = np.linalg.norm(embedding_ND, axis=1)
    return length_N


def are_normalized(embedding_ND: np.ndarray) -> bool:
    """Return whether the network has normalized the embeddings itself: their lengths then say nothing of the images.

    Nor does the length of the sum of two of them, of an image and its mirror image.
    """
    return bool(np.allclose(embedding_lengths(embedding_ND), 1, rtol=0, atol=_LENGTH_TOLERANCE))


def l2_normalize(embedding_ND: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1, in the same dtype: (N, D).

    The length is bounded below by 1e-12, so that a row of zeros stays zero instead of becoming NaN.
    """
    return embedding_ND / np.maximum(embedding_lengths(embedding_ND), 1e-12)[:, None]


def unit_rows(row_ND: np.ndarray) -> np.ndarray:
    """Return rows scaled to length 1 in float64, (N, D); rows of zeros stay zero."""
    row_ND = row_ND.astype(np.float64)
    largest_N1 = np.abs(row_ND).max(1, keepdims=True)
    # Squares of very small or large numbers have no float64.
    row_ND /= np.where(largest_N1 > 0, largest_N1, 1)
    # Row by row: the same row has the same length in every block.
    length_N = np.sqrt(np.einsum("nd,nd->n", row_ND, row_ND))
    return np.asarray(row_ND / np.where(length_N > 0, length_N, 1)[:, None])


def require_finite(embedding_ND: np.ndarray, name: str, indices: Sequence[int] | None = None) -> None:
    """Check the embeddings (N, D) that a network has computed; `indices` are the numbers of the N images in `name`.

    An embedding of zeros has no direction: as a point, it would be near every other one.

    Raises:
        ModelError: an embedding is not finite, or all its numbers are 0.
    """
    bad = np.flatnonzero(~np.isfinite(embedding_ND).all(1) | ~embedding_ND.any(1))
    if len(bad):
        number = bad.item(0) if indices is None else indices[bad.item(0)]
        raise ModelError(
            f"{name}: the embedding of image {number} is not finite, or zero; the network has diverged, "
            "use an earlier checkpoint"
        )
