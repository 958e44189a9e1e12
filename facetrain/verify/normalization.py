"""L2 normalization of embeddings."""

# N rows   D embedding

from __future__ import annotations

import numpy as np


def l2_normalize(embedding_ND: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1, in the same dtype: (N, D).

    The length is bounded below by 1e-12, so that a row of zeros stays zero instead of becoming NaN.
    """
    return embedding_ND / np.maximum(np.linalg.norm(embedding_ND, axis=1, keepdims=True), 1e-12)
