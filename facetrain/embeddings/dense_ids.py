"""Numbering of keys by whole numbers from 0, equal for equal keys."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def dense_ids(keys: Sequence[Hashable]) -> np.ndarray:
    """Return an id for each key, equal for equal keys, from 0 in order of first appearance: int64 (N,)."""
    seen: dict[Hashable, int] = {}
    return np.fromiter((seen.setdefault(key, len(seen)) for key in keys), np.int64, len(keys))
