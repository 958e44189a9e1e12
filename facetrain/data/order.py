"""In which order images are seen: a pure function of the seed and the step."""

from __future__ import annotations

import numpy as np
import torch

from facetrain.counter import hash64, key_of

_ROUNDS = 4


def permute(index: np.ndarray, length: int, key: int) -> np.ndarray:
    """Map positions int64 (N,) below `length` to as many different ones: a keyed permutation, without a table.

    A Feistel network on the next even number of bits, walked again while it leads outside (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002): 42 million images need no memory.
    """
    half = max((max(length - 1, 1).bit_length() + 1) // 2, 1)
    position = np.asarray(index, dtype=np.int64).copy()
    outside = np.arange(len(position))
    while len(outside):
        position[outside] = _feistel(position[outside], half, key)
        outside = outside[position[outside] >= length]
    return position


def _feistel(position: np.ndarray, half: int, key: int) -> np.ndarray:
    mask = (1 << half) - 1
    left, right = position >> half, position & mask
    for turn in range(_ROUNDS):
        mixed = hash64(torch.from_numpy(np.ascontiguousarray(right)), key_of(key, turn)).numpy()
        left, right = right, left ^ (mixed & mask)
    return left << half | right


class GlobalOrder:
    """The images of every global batch, whatever the number of ranks, workers and restarts.

    `full`: every epoch is a permutation of all images. `blocks`: stretches of `block` neighbouring
    images follow one another in permuted order and are permuted within windows of `window` stretches,
    so that reading is sequential within a stretch.
    """

    def __init__(
        self,
        num_images: int,
        *,
        seed: int,
        global_batch_size: int,
        mode: str = "full",
        block: int = 512,
        window: int = 64,
    ) -> None:
        self.num_images = num_images
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = num_images // global_batch_size
        self._seed, self._mode = seed, mode
        self._block, self._window = block, block * window

    def epoch(self, step: int) -> int:
        """Return the epoch (0-based) that a step belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Return the numbers of the step's images, int64 (global_batch_size,)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        position = np.arange(within * self.global_batch_size, (within + 1) * self.global_batch_size)
        if self._mode == "full":
            return permute(position, self.num_images, key_of(self._seed, epoch))
        return self._by_blocks(position, epoch)

    def _by_blocks(self, position: np.ndarray, epoch: int) -> np.ndarray:
        whole = self.num_images // self._block * self._block
        # The images behind the last whole block come last; they are few.
        number = position.copy()
        for window in np.unique(position[position < whole] // self._window).tolist():
            start, end = window * self._window, min((window + 1) * self._window, whole)
            inside = (position >= start) & (position < end)
            local = permute(position[inside] - start, end - start, key_of(self._seed, epoch, 1, window))
            number[inside] = start + local
        inside = number < whole
        block, rest = np.divmod(number[inside], self._block)
        number[inside] = (
            permute(block, whole // self._block, key_of(self._seed, epoch, 2)) * self._block + rest
        )
        return number
