"""The faces of a gallery that are most like each probe."""

# Q probes   G gallery entries   D embedding   K kept

from __future__ import annotations

import numpy as np

_AT_ONCE = 1 << 24
"""Similarities held at once: 64 MiB."""


def nearest(probe_QD: np.ndarray, gallery_GD: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the gallery that are most alike, best first, and their cosine: (Q, K) each.

    Embeddings have length 1; K is `count`, or the gallery's size where that is less.
    """
    kept = min(count, len(gallery_GD))
    entry_QK = np.empty((len(probe_QD), kept), np.int64)
    cosine_QK = np.empty((len(probe_QD), kept), np.float32)
    step = max(1, _AT_ONCE // max(len(gallery_GD), 1))
    for start in range(0, len(probe_QD), step):
        part = slice(start, start + step)
        cosine_qG = probe_QD[part] @ gallery_GD.T
        best_qK = np.argpartition(-cosine_qG, kept - 1, axis=1)[:, :kept]
        order_qK = np.argsort(-np.take_along_axis(cosine_qG, best_qK, 1), axis=1, kind="stable")
        entry_QK[part] = np.take_along_axis(best_qK, order_qK, 1)
        cosine_QK[part] = np.take_along_axis(cosine_qG, entry_QK[part], 1)
    return entry_QK, cosine_QK
