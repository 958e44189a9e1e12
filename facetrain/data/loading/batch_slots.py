"""Shared memory that the reading processes fill with batches. Imports no torch."""

from __future__ import annotations

import numpy as np

from facetrain.data.shared_array import SharedArray


class BatchSlots:
    """Buffers of the batches that are read ahead; one slot holds this rank's images of one step.

    A reading process that gets them as an argument fills the same memory.
    """

    def __init__(self, slots: int, rows: int, image_size: int) -> None:
        self._index = SharedArray((slots, rows), "int64")
        self._image = SharedArray((slots, rows, image_size, image_size, 3), "uint8")

    @property
    def index(self) -> np.ndarray:
        """Dataset index of each image, int64 (slots, rows)."""
        return self._index.array

    @property
    def image(self) -> np.ndarray:
        """Pixels, uint8 (slots, rows, image_size, image_size, 3)."""
        return self._image.array
