"""Order of the training images: a pure function of the seed and the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from facetrain.counter_rng import key_of, mix_array
from facetrain.data.dataset import FaceDataset, consecutive_ranges
from facetrain.data.mixture import MixtureDataset, images_per_epoch
from facetrain.errors import DataError

_FEISTEL_ROUNDS = 4
# Purposes of the random keys, beside (seed, epoch) for the full shuffle. Changing one changes the order of images.
_KEY_WINDOW, _KEY_BLOCKS, _KEY_MIXTURE = 1, 2, 3


def permute(position: np.ndarray, length: int, key: int) -> np.ndarray:
    """Map positions to their images under a keyed permutation of range(length): int64 (N,) -> int64 (N,).

    A Feistel network on the next even number of bits, repeated while the result is not below `length`
    ("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no table,
    so the memory does not depend on `length`.
    """
    half_bits = max((max(length - 1, 1).bit_length() + 1) // 2, 1)
    keys = [np.uint64(key_of(key, number)) for number in range(_FEISTEL_ROUNDS)]
    value = _feistel(np.asarray(position).astype(np.uint64), half_bits, keys)
    # The even number of bits makes the domain at most four times as large: few passes are needed.
    outside = np.flatnonzero(value >= length)
    while len(outside):
        value[outside] = _feistel(value[outside], half_bits, keys)
        outside = outside[value[outside] >= length]
    return value.astype(np.int64)


def sample_numbers(count: int, total: int) -> np.ndarray:
    """Return up to `count` different numbers below `total` in a random order, always the same: int64 (N,)."""
    return permute(np.arange(min(count, total)), total, key_of(0))


def permute_blocks(position: np.ndarray, length: int, key: int, block: int) -> np.ndarray:
    """Permute blocks of `block` neighbors as a whole; the shorter last one is put between any two of the others."""
    position, whole = np.asarray(position), length // block
    # At a fixed place at the end, it would always be the part that does not fill the last batch.
    rest_start = key_of(key, _FEISTEL_ROUNDS) % (whole + 1) * block
    rest_end = rest_start + length - whole * block
    number, offset = np.divmod(position - np.where(position < rest_end, 0, rest_end - rest_start), block)
    out = position - rest_start + whole * block
    in_whole_block = (position < rest_start) | (position >= rest_end)
    out[in_whole_block] = permute(number[in_whole_block], whole, key) * block + offset[in_whole_block]
    return out


def _feistel(value: np.ndarray, half_bits: int, keys: list[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (mix_array(right ^ key) & mask)
    return left << shift | right


@dataclass(frozen=True)
class SampleOrder:
    """Order in which a run, or a stage of it, goes through a dataset."""

    seed: int
    global_batch_size: int
    """Images per step, over all ranks and micro-batches."""
    mode: str = "full"
    """`full` permutes all images. `blocks` permutes blocks of neighboring images, and then images within windows of
    blocks, so that a disk reads whole blocks."""
    block: int = 128
    """Images per block."""
    window: int = 1024
    """Blocks per window."""
    first_step: int = 0
    """Step at which the first epoch begins."""
    first_epoch: int = 0
    """Number of that epoch. A run in stages has an order for each of them."""


class GlobalSampler:
    """Dataset indices of every global batch, independent of the number of ranks, workers and restarts.

    Images that do not fill the last batch of an epoch are left out; they are different in each epoch.

    Raises:
        DataError: if the dataset is smaller than one global batch.
    """

    def __init__(self, num_images: int, order: SampleOrder) -> None:
        global_batch_size = order.global_batch_size
        if num_images < global_batch_size:
            raise DataError(
                f"{num_images:,} images do not fill one global batch of {global_batch_size:,}; "
                "use a smaller batch, or more data"
            )
        self.num_images = num_images
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = num_images // global_batch_size
        self._seed, self._mode = order.seed, order.mode
        self._first_step, self._first_epoch = order.first_step, order.first_epoch
        self._block, self._window_images = order.block, order.block * order.window

    def epoch(self, step: int) -> int:
        """Return the epoch of a step, from 0."""
        return self._epoch_and_place(step)[0]

    def batch(self, step: int, rows_N: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the dataset indices of a step, or of some rows of its global batch, int64 (N,).

        Also return how often the epoch has shown each of these images before, int64 (N,); None: never.
        """
        epoch, within = self._epoch_and_place(step)
        rows_N = np.arange(self.global_batch_size) if rows_N is None else rows_N
        position = within * self.global_batch_size + rows_N
        if self._mode == "full":
            return permute(position, self.num_images, key_of(self._seed, epoch)), None
        return self._shuffled_in_blocks(position, epoch), None

    def ranges_to_prefetch(self, step: int, *, is_first_step: bool) -> Iterator[tuple[int, int]]:
        """Yield (first index, count) of the ranges to read in advance.

        When a step enters a window, these are the blocks of the next window; at the first step of an epoch, and after a
        start or resume, those of the current window and of the next one. Yields nothing in `full` mode, which reads
        single images.
        """
        if self._mode == "full":
            return
        epoch, within = self._epoch_and_place(step)
        start, end = within * self.global_batch_size, (within + 1) * self.global_batch_size
        entered = range(-(-start // self._window_images), -(-end // self._window_images))
        windows = {window + 1 for window in entered}
        if is_first_step or not within:
            present = start // self._window_images
            windows |= {present, present + 1}
        for window in sorted(windows):
            start, end = self._window(window)
            yield from consecutive_ranges(self._shuffled_blocks(np.arange(start, end), epoch))

    def _epoch_and_place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the number of steps before it in that epoch."""
        epoch, within = divmod(step - self._first_step, self.steps_per_epoch)
        return self._first_epoch + epoch, within

    def _window(self, number: int) -> tuple[int, int]:
        """Return the first position of a window, and the one after its last."""
        start = number * self._window_images
        return start, min(start + self._window_images, self.num_images)

    def _shuffled_in_blocks(self, position: np.ndarray, epoch: int) -> np.ndarray:
        shuffled = position.copy()
        for window in np.unique(position // self._window_images).tolist():
            start, end = self._window(window)
            inside = (position >= start) & (position < end)
            key = key_of(self._seed, epoch, _KEY_WINDOW, window)
            shuffled[inside] = start + permute(position[inside] - start, end - start, key)
        return self._shuffled_blocks(shuffled, epoch)

    def _shuffled_blocks(self, position: np.ndarray, epoch: int) -> np.ndarray:
        return permute_blocks(position, self.num_images, key_of(self._seed, epoch, _KEY_BLOCKS), self._block)


class MixtureSampler(GlobalSampler):
    """Order of images of several datasets; an epoch shows `weight` times the images of each.

    A dataset continues where the previous epoch stopped: with weight 0.5, one epoch shows one half and the
    next epoch the other half. Every pass over a dataset has a new permutation. In `blocks` mode, a pass
    permutes blocks of neighbors, and the epoch permutes these blocks again, so that a disk reads whole blocks.

    Args:
        counts: images of each dataset.
        weights: passes over each dataset per epoch.
        order: as for `GlobalSampler`.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], order: SampleOrder) -> None:
        self._counts = np.array(counts)
        self._per_epoch = images_per_epoch(counts, weights)
        super().__init__(int(self._per_epoch.sum()), order)
        self._first_position = np.cumsum(self._per_epoch) - self._per_epoch
        self._first_index = np.cumsum(self._counts) - self._counts

    def batch(self, step: int, rows_N: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """As `GlobalSampler.batch`.

        In an epoch that begins within a pass, every image of the next pass counts as shown before.
        """
        position, _ = super().batch(step, rows_N)
        index, repeat = self._index_and_repeats(position, self.epoch(step))
        return index, repeat if repeat.any() else None

    def ranges_to_prefetch(self, step: int, *, is_first_step: bool) -> Iterator[tuple[int, int]]:
        """Yield (first index, count) of the ranges to read in advance, as they are in the datasets."""
        ranges = super().ranges_to_prefetch(step, is_first_step=is_first_step)
        # Of all ranges at once: of each of a thousand blocks by itself, it would take ten times as long.
        if positions := [np.arange(start, start + count) for start, count in ranges]:
            index, _ = self._index_and_repeats(np.concatenate(positions), self.epoch(step))
            yield from consecutive_ranges(index)

    def _index_and_repeats(self, position: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Map positions in the unshuffled epoch (all of dataset 0, then of dataset 1, …) to dataset indices.

        Also return the number of passes that the epoch has begun before each of them.
        """
        index, repeat = np.empty_like(position), np.empty_like(position)
        dataset_of = np.searchsorted(self._first_position, position, side="right") - 1
        for dataset in np.unique(dataset_of).tolist():
            rows = np.flatnonzero(dataset_of == dataset)
            count, begin = int(self._counts[dataset]), epoch * int(self._per_epoch[dataset])
            # Of the endless sequence of passes over the dataset.
            pass_of, within = np.divmod(begin + position[rows] - self._first_position[dataset], count)
            repeat[rows] = pass_of - begin // count
            for number in np.unique(pass_of).tolist():
                in_pass = pass_of == number
                key = key_of(self._seed, _KEY_MIXTURE, dataset, number)
                inner = within[in_pass]
                index[rows[in_pass]] = self._first_index[dataset] + (
                    permute(inner, count, key)
                    if self._mode == "full"
                    else permute_blocks(inner, count, key, self._block)
                )
        return index, repeat


def epoch_size(dataset: FaceDataset) -> int:
    """Return the number of images per epoch: all images, or the weighted number of a mixture."""
    if isinstance(dataset, MixtureDataset):
        return int(images_per_epoch(dataset.counts, dataset.weights).sum())
    return dataset.num_images


def build_sampler(dataset: FaceDataset, order: SampleOrder) -> GlobalSampler:
    """Return the sampler of a dataset; a `MixtureSampler` for a mixture.

    Raises:
        DataError: if an epoch is smaller than one global batch.
    """
    if isinstance(dataset, MixtureDataset):
        return MixtureSampler(dataset.counts, dataset.weights, order)
    return GlobalSampler(dataset.num_images, order)
