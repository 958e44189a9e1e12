"""Training batches of one rank: read and decoded ahead by processes, copied ahead to the device."""

# B local batch   G global batch   H height   W width   C channels

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.landmark_file import without_gaps
from facetrain.data.loading.device_prefetch import EXTRA_SLOTS, build_prefetcher
from facetrain.data.loading.reader import BatchSlots
from facetrain.data.loading.reader_pool import REQUEST_ROWS, ReaderPool
from facetrain.data.loading.sampler import GlobalSampler
from facetrain.device.profiler_ranges import profiler_range
from facetrain.distributed.world import World

_STEPS_AHEAD = 3
_REQUESTS_AHEAD = 3
"""Requests queued for each reading process, whatever the batch size, so that none waits for work."""
_MOST_IMAGES = 1 << 40
"""Images of a dataset, at most."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank."""

    step: int
    epoch: int
    image_BHWC: Tensor
    """RGB, uint8 (B, H, W, 3), on the device."""
    label_B: Tensor
    """int64 (B,), on the device."""
    sample_B: Tensor
    """Dataset index of each image, int64 (B,), on the host. For a replaced bad image, the index of the bad one."""
    host_label_B: Tensor
    """`label_B` on the host."""
    read_B: Tensor
    """`sample_B` with the index of the replacement for each bad image."""
    landmarks_B52: Tensor | None = None
    """Landmarks before augmentation, as fractions of the sides, float32 (B, 5, 2), on the host; None: not loaded."""
    repeat_B: Tensor | None = None
    """How often the epoch has shown each image before, int64 (B,), on the host; None: never."""

    @property
    def draw_B(self) -> Tensor:
        """Number on which the random draws of each image depend, int64 (B,), on the host: unique within an epoch."""
        return self.sample_B if self.repeat_B is None else self.sample_B + _MOST_IMAGES * self.repeat_B


@dataclass(frozen=True)
class LoaderSettings:
    """Batch size, reading options and number of reading processes of a `Loader`."""

    local_batch_size: int
    """Images per rank and micro-batch."""
    image_size: int = 112
    """Side of the images in pixels."""
    accumulate: int = 1
    """Micro-batches per step."""
    workers: int = 2
    """Reading processes; 0 reads in the training process."""
    skip_bad: bool = False
    """Replace images that cannot be read, instead of ending the run."""
    landmarks: bool = False
    """Load the landmarks of the images, which the dataset must have."""


class Loader:
    """Iterator over the steps of a rank; each step is a tuple of `accumulate` micro-batches.

    Micro-batch a of rank r holds rows [(a·W + r)·B, (a·W + r + 1)·B) of the global batch, with W ranks and B
    images per micro-batch. So the images of a step, and the order in which gradients are accumulated, are the
    same for any number of ranks.

    Every rank replaces bad images by itself, without communication, and all ranks stay in step.

    Args:
        dataset: images and labels.
        sampler: images of every global batch.
        settings: sizes and reading options.
        world: this rank, the number of ranks, and the device of the batches.
        start_step: first step, after a resume the step of the checkpoint.
        stop_step: step to stop before; None: endless.
        skipped: set to which messages about replaced bad images are added; None: a new one.
    """

    def __init__(
        self,
        dataset: FaceDataset,
        sampler: GlobalSampler,
        settings: LoaderSettings,
        world: World,
        *,
        start_step: int = 0,
        stop_step: int | None = None,
        skipped: set[str] | None = None,
    ) -> None:
        self.skipped: set[str] = set() if skipped is None else skipped
        """Messages about the bad images that were replaced so far."""
        self.wait_s = 0.0
        """Seconds that training has waited for batches."""
        self._dataset, self._sampler, self._settings = dataset, sampler, settings
        self._read_landmarks = dataset.landmark_reader() if settings.landmarks else None
        self._next_step, self._stop_step = start_step, stop_step
        self._is_first_step = True
        first_A1 = (
            np.arange(settings.accumulate)[:, None] * world.size + world.rank
        ) * settings.local_batch_size
        self._rows_N = (first_A1 + np.arange(settings.local_batch_size)).ravel()
        """Rows of this rank in a global batch. The order of the others' images is not computed."""
        rows = len(self._rows_N)
        self.steps_ahead = max(
            _STEPS_AHEAD, math.ceil(_REQUESTS_AHEAD * settings.workers * REQUEST_ROWS / rows)
        )
        """Steps that are read ahead of the next one."""
        self._slots = BatchSlots(self.steps_ahead + EXTRA_SLOTS, rows, settings.image_size)
        self._pool = ReaderPool(dataset, self._slots, workers=settings.workers, skip_bad=settings.skip_bad)
        self._prefetcher = build_prefetcher(self._slots.image, world.device)
        self._free = deque(range(len(self._slots.image)))
        self._pending: deque[tuple[int, int, np.ndarray, np.ndarray | None]] = deque()
        self._submit_steps()  # reading starts while the rest of the run is still being built

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        """Yield the micro-batches of one step after the other.

        Raises:
            DataError: if an image cannot be read or decoded and `bad_records` is `error`.
            RunError: if a reading process has ended.
        """
        while self._pending:
            start = time.perf_counter()
            with profiler_range("data"):
                step, slot, sample, repeat = self._pending.popleft()
                self.skipped.update(self._pool.wait(slot))
                self._prefetcher.wait_for_transfers()  # of earlier steps, whose slots are filled again below
                image = self._prefetcher.slot_to_device(slot)
                # Labels of the images in the slot: a replacement may show another identity than the bad image.
                read = self._slots.index[slot].copy()  # the slot is filled again while the batch is in use
                label = self._dataset.labels[read].astype(np.int64)
                label_on_device = self._prefetcher.to_device(label)
                landmarks = None
                if self._read_landmarks is not None:
                    landmarks = torch.from_numpy(without_gaps(self._read_landmarks(read)))
                self._free.append(slot)
                self._submit_steps()
            self.wait_s += time.perf_counter() - start
            whole = Batch(
                step,
                self._sampler.epoch(step),
                image,
                label_on_device,
                torch.from_numpy(sample),
                torch.from_numpy(label),
                torch.from_numpy(read),
                landmarks,
                None if repeat is None else torch.from_numpy(repeat),
            )
            yield self._split(whole)

    def close(self) -> None:
        """End the reading processes and release the page-locked memory; can be called twice."""
        self._pending.clear()
        self._pool.close()
        self._prefetcher.close()

    def _split(self, whole: Batch) -> tuple[Batch, ...]:
        # Views: one transfer to the device per step is faster than one per micro-batch.
        size = self._settings.local_batch_size
        parts = {name: value.split(size) for name, value in vars(whole).items() if isinstance(value, Tensor)}
        return tuple(
            replace(whole, **{name: part[number] for name, part in parts.items()})
            for number in range(self._settings.accumulate)
        )

    def _submit_steps(self) -> None:
        """Have the pool read further steps, until `steps_ahead` steps are pending."""
        while len(self._pending) < self.steps_ahead and self._next_step != self._stop_step:
            ranges = self._sampler.ranges_to_prefetch(self._next_step, is_first_step=self._is_first_step)
            for first, count in ranges:
                self._dataset.prefetch(first, count)
            self._is_first_step = False
            sample, repeat = self._sampler.batch(self._next_step, self._rows_N)
            # On the CPU, a batch that the caller still holds is a view of its slot.
            slot = next(slot for slot in self._free if self._prefetcher.is_free(slot))
            self._free.remove(slot)
            self._pool.submit(slot, sample)
            self._pending.append((self._next_step, slot, sample, repeat))
            self._next_step += 1
