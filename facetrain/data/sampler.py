"""In which order images are seen: a pure function of the seed and the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset, consecutive_ranges
from facetrain.data.mixture import MixtureDataset
from facetrain.errors import DataError

_ROUNDS = 4


def permute(index: np.ndarray, length: int, key: int) -> np.ndarray:
    """Map positions int64 (N,) below `length` to as many different ones: a keyed permutation.

    A Feistel network on the next even number of bits, walked again while it leads outside (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002): there is no table, and 42 million images
    need no memory.
    """
    half = max((max(length - 1, 1).bit_length() + 1) // 2, 1)
    keys = [np.uint64(key_of(key, turn)) for turn in range(_ROUNDS)]
    position = _feistel(np.asarray(index).astype(np.uint64), half, keys)
    outside = np.flatnonzero(position >= length)
    while len(outside):
        position[outside] = _feistel(position[outside], half, keys)
        outside = outside[position[outside] >= length]
    return position.astype(np.int64)


def permute_stretches(index: np.ndarray, length: int, key: int, stretch: int) -> np.ndarray:
    """As `permute`, but stretches of neighbors stay together; those behind the last whole one stay where they are."""
    number, rest = np.divmod(np.asarray(index), stretch)
    whole = number < length // stretch
    out = np.array(index)
    out[whole] = permute(number[whole], length // stretch, key) * stretch + rest[whole]
    return out


def _feistel(position: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = position >> bits, position & mask
    for key in keys:
        left, right = right, left ^ (_hash(right, key) & mask)
    return left << bits | right


def _hash(number: np.ndarray, key: np.uint64) -> np.ndarray:
    # SplitMix64's finalizer; `counter.hash64` does the same in torch, five times slower for a batch.
    z = number ^ key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class GlobalSampler:
    """The images of every global batch, whatever the number of ranks, workers and restarts.

    `full`: every epoch is a permutation of all images. `blocks`: stretches of `block` neighboring
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
        block: int = 128,
        window: int = 1024,
    ) -> None:
        if num_images < global_batch_size:
            raise DataError(
                f"{num_images:,} images do not fill one global batch of {global_batch_size:,}; "
                "set train.batch_size lower, or use more data"
            )
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

    def ranges_to_prefetch(self, step: int, *, first: bool) -> Iterator[tuple[int, int]]:
        """Yield (number, count) of the stretches that will be read after those that are being read.

        They are those of the next window whenever a step enters one; at the `first` step also those of
        its own. None in `full` mode, where no two images that follow one another are neighbors.
        """
        if self._mode == "full":
            return
        epoch, within = divmod(step, self.steps_per_epoch)
        start, end = within * self.global_batch_size, (within + 1) * self.global_batch_size
        entered = range(-(-start // self._window), -(-end // self._window))
        windows = {window + 1 for window in entered} | ({start // self._window} if first else set())
        per_window = self._window // self._block
        whole = self.num_images // self._block
        for window in sorted(windows):
            block = np.arange(window * per_window, min((window + 1) * per_window, whole))
            for number in permute(block, whole, key_of(self._seed, epoch, 2)).tolist():
                yield number * self._block, self._block

    def _by_blocks(self, position: np.ndarray, epoch: int) -> np.ndarray:
        whole = self.num_images // self._block * self._block
        # The images behind the last whole block come last; they are few.
        number = position.copy()
        for window in np.unique(position[position < whole] // self._window).tolist():
            start, end = window * self._window, min((window + 1) * self._window, whole)
            inside = (position >= start) & (position < end)
            local = permute(position[inside] - start, end - start, key_of(self._seed, epoch, 1, window))
            number[inside] = start + local
        return permute_stretches(number, self.num_images, key_of(self._seed, epoch, 2), self._block)


class MixtureSampler(GlobalSampler):
    """The order over several datasets, of each of which an epoch shows `weight` times its images.

    Part i of an epoch's images continues where the epoch before left that dataset: a weight of 0.5
    shows one half and then the other, each pass over a dataset in another permutation. With `blocks`,
    a pass permutes stretches of neighbors, and so does the epoch: what is read together lies together.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        global_batch_size: int,
        mode: str = "full",
        block: int = 128,
        window: int = 1024,
    ) -> None:
        self._counts = np.array(counts)
        self._shares = images_per_epoch(counts, weights)
        super().__init__(
            int(self._shares.sum()),
            seed=seed,
            global_batch_size=global_batch_size,
            mode=mode,
            block=block,
            window=window,
        )
        self._starts = np.cumsum(self._shares) - self._shares
        self._offsets = np.cumsum(self._counts) - self._counts

    def batch(self, step: int) -> np.ndarray:
        """Return the numbers of the step's images, int64 (global_batch_size,)."""
        return self._images(super().batch(step), self.epoch(step))

    def ranges_to_prefetch(self, step: int, *, first: bool) -> Iterator[tuple[int, int]]:
        """Yield the stretches as they lie in the datasets."""
        for start, count in super().ranges_to_prefetch(step, first=first):
            yield from consecutive_ranges(self._images(np.arange(start, start + count), self.epoch(step)))

    def _images(self, position: np.ndarray, epoch: int) -> np.ndarray:
        """Return the numbers of the images that stand at positions of the epoch, before these are mixed."""
        number = np.empty_like(position)
        part = np.searchsorted(self._starts, position, side="right") - 1
        for each in np.unique(part).tolist():
            rows, count = np.flatnonzero(part == each), int(self._counts[each])
            turn, place = np.divmod(epoch * self._shares[each] + position[rows] - self._starts[each], count)
            for pass_ in np.unique(turn).tolist():
                here = turn == pass_
                key = key_of(self._seed, 3, each, pass_)
                number[rows[here]] = self._offsets[each] + self._passed(place[here], count, key)
        return number

    def _passed(self, place: np.ndarray, count: int, key: int) -> np.ndarray:
        if self._mode == "full":
            return permute(place, count, key)
        return permute_stretches(place, count, key, self._block)


def images_per_epoch(counts: Sequence[int], weights: Sequence[float]) -> np.ndarray:
    """Return how many images an epoch shows of each dataset, int64."""
    return np.rint(np.array(counts) * np.array(weights)).astype(np.int64)


def epoch_size(source: FaceDataset) -> int:
    """Return how many images an epoch shows: all of them, or as many as a mixture's weights say."""
    if isinstance(source, MixtureDataset):
        return int(images_per_epoch(source.counts, source.weights).sum())
    return source.num_images


def build_sampler(
    source: FaceDataset, *, seed: int, global_batch_size: int, mode: str = "full"
) -> GlobalSampler:
    """Return the order for a source: weighted for a mixture."""
    if isinstance(source, MixtureDataset):
        return MixtureSampler(
            source.counts, source.weights, seed=seed, global_batch_size=global_batch_size, mode=mode
        )
    return GlobalSampler(source.num_images, seed=seed, global_batch_size=global_batch_size, mode=mode)
