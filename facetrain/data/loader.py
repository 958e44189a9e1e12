"""Batches for one rank, read and decoded ahead by processes, and copied ahead to the device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from facetrain.data.dataset import FaceDataset, SupportsPrefetch
from facetrain.data.device_decode import DeviceDecoder, build_decoder
from facetrain.data.device_prefetch import HOLDS, build_prefetcher
from facetrain.data.reader import Filler, Slots
from facetrain.data.reader_pool import TASK_ROWS, ReaderPool
from facetrain.data.sampler import GlobalSampler
from facetrain.profiling import profiler_range

_STEPS_AHEAD = 3
_TASKS_AHEAD = 3
"""So many tasks are waiting for each process, whatever the size of the batch."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank: images and labels on the device, the images' numbers on the host."""

    step: int
    epoch: int
    image_BHWC: Tensor
    label_B: Tensor
    sample_B: Tensor


class Loader:
    """Yield, for every step, this rank's micro-batches.

    Micro-batch a of rank r holds rows [(a·W + r)·B, (a·W + r + 1)·B) of the global batch, so that the
    images of a step, and which of them are added up first, are the same for any number of ranks.

    `workers` processes read and decode; 0 does it in this process when a batch is asked for. With
    `bad_records="skip"`, an image that cannot be read or decoded gives way to the one with the next
    number (after the last, the first): no rank has to tell another, and all stay in step. With
    `decode` gpu or dali, JPEGs that need no resizing become pixels a batch at once, on the device.
    """

    def __init__(
        self,
        source: FaceDataset,
        order: GlobalSampler,
        *,
        rank: int,
        world_size: int,
        local_batch_size: int,
        accumulate: int = 1,
        workers: int = 2,
        image_size: int = 112,
        device: torch.device | None = None,
        bad_records: str = "error",
        decode: str = "cpu",
        start_step: int = 0,
        stop_step: int | None = None,
    ) -> None:
        self.skipped: list[str] = []
        """What was skipped so far, each bad record once."""
        self.wait_s = 0.0
        """Seconds that training has waited for images."""
        self._source, self._order = source, order
        # Looked up once: whether a source has the method is asked of every attribute of the protocol.
        self._prefetch = source.prefetch if isinstance(source, SupportsPrefetch) else None
        self._rank, self._world_size = rank, world_size
        self._batch_size, self._accumulate = local_batch_size, accumulate
        self._next_step, self._stop_step = start_step, stop_step
        self._is_first = True
        rows = local_batch_size * accumulate
        self._ahead = max(_STEPS_AHEAD, math.ceil(_TASKS_AHEAD * workers * TASK_ROWS / rows))
        self._slots = Slots(self._ahead + HOLDS, rows, image_size)
        skip = bad_records == "skip"
        self._decoder: DeviceDecoder | None = None
        in_batches = decode != "cpu"
        if in_batches:
            filler, where = Filler(source, self._slots, skip=skip), device or torch.device("cpu")
            decoder = build_decoder(decode, where, batch_size=rows, threads=max(workers, 1))
            self._decoder = DeviceDecoder(self._slots, filler, where, decoder)
        self._pool = ReaderPool(source, self._slots, workers=workers, skip=skip, leave_jpeg=in_batches)
        self._sender = build_prefetcher(self._slots.image, device)
        self._free = deque(range(len(self._slots.image)))
        self._pending: deque[tuple[int, int, np.ndarray]] = deque()
        self._submit()  # the first batches are read while the run still makes itself ready

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        """Yield the micro-batches of one step after the other.

        Raises:
            DataError: an image cannot be read or decoded, and bad records are not to be skipped.
        """
        while self._pending:
            since = time.perf_counter()
            with profiler_range("data"):
                step, slot, sample = self._pending.popleft()
                self._note(self._pool.wait(slot))
                self._sender.begin()
                image = self._images(slot)
                # A good image that stands for a bad one brings its own label.
                label = self._sender.send(self._source.labels[self._slots.number[slot]].astype(np.int64))
                self._free.append(slot)
                self._submit()
            self.wait_s += time.perf_counter() - since
            whole = Batch(step, self._order.epoch(step), image, label, torch.from_numpy(sample))
            yield (whole,) if self._accumulate == 1 else self._split(whole)

    def close(self) -> None:
        """End the reading processes; what they were reading is thrown away."""
        self._pending.clear()
        self._pool.close()
        self._sender.close()

    def _split(self, whole: Batch) -> tuple[Batch, ...]:
        tensors = whole.image_BHWC, whole.label_B, whole.sample_B
        parts = zip(*(tensor.split(self._batch_size) for tensor in tensors), strict=True)
        return tuple(Batch(whole.step, whole.epoch, *part) for part in parts)

    def _images(self, slot: int) -> Tensor:
        if self._decoder is None:
            return self._sender.send_images(slot)
        image_BHWC = self._sender.run(partial(self._decoder, slot))
        self._note(self._decoder.skipped)
        return image_BHWC

    def _note(self, skipped: Sequence[str]) -> None:
        self.skipped += (message for message in skipped if message not in self.skipped)

    def _submit(self) -> None:
        while len(self._pending) < self._ahead and self._next_step != self._stop_step:
            if self._prefetch is not None:
                for stretch in self._order.ranges_to_prefetch(self._next_step, first=self._is_first):
                    self._prefetch(*stretch)
            self._is_first = False
            sample = self._mine(self._order.batch(self._next_step))
            slot = next(slot for slot in self._free if self._sender.has_done(slot))
            self._free.remove(slot)
            self._pool.submit(slot, sample)
            self._pending.append((self._next_step, slot, sample))
            self._next_step += 1

    def _mine(self, number_G: np.ndarray) -> np.ndarray:
        grid = number_G.reshape(self._accumulate, self._world_size, self._batch_size)
        return np.ascontiguousarray(grid[:, self._rank]).reshape(-1)
