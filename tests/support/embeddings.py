"""Rows of a file of embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.embeddings.embedding_files import open_embeddings


def load_rows(path: Path) -> np.ndarray:
    """Return all rows of a file, float32 (N, D)."""
    return np.concatenate([rows for _, rows in open_embeddings(path).blocks()])
