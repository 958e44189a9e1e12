"""Batches for one rank, read and decoded ahead by threads.

Reading and decoding leave Python's lock alone, so threads use all cores without copying images
between processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from facetrain.data.dataset import FaceSource
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.order import GlobalOrder
from facetrain.errors import DataError, ImageError

AHEAD = 3
"""Steps that are read ahead of the one in training."""
_TRIES = 100


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank. Images and labels are on the device, the numbers of the images on the host."""

    step: int
    epoch: int
    image_BHWC: Tensor
    label_B: Tensor
    sample_B: Tensor


class Loader:
    """Yield, for every step, this rank's micro-batches.

    Micro-batch a of rank r holds rows [(a·W + r)·B, (a·W + r + 1)·B) of the global batch, so that the
    images of a step, and which of them are added up first, are the same for any number of ranks.
    """

    def __init__(
        self,
        source: FaceSource,
        order: GlobalOrder,
        *,
        rank: int,
        world_size: int,
        local_batch_size: int,
        accumulate: int = 1,
        workers: int = 2,
        image_size: int = 112,
        device: torch.device | None = None,
        bad_records: str = "error",
        start_step: int = 0,
        stop_step: int | None = None,
    ) -> None:
        self.skipped: list[str] = []
        self.wait_s = 0.0
        self._source, self._order = source, order
        self._rank, self._world_size = rank, world_size
        self._batch_size, self._accumulate = local_batch_size, accumulate
        self._size = image_size
        self._device = device or torch.device("cpu")
        self._skip = bad_records == "skip"
        self._steps = iter(range(start_step, stop_step)) if stop_step is not None else None
        self._next_step = start_step
        self._workers = max(workers, 1)
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="decode")
        self._pending: deque[tuple[int, _Raw, list[Future[None]]]] = deque()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        """Yield the micro-batches of one step after the other.

        Raises:
            DataError: an image cannot be read or decoded, and bad records are not to be skipped.
        """
        while True:
            while len(self._pending) < AHEAD and self._submit():
                pass
            if not self._pending:
                return
            step, raw, futures = self._pending.popleft()
            since = time.perf_counter()
            for future in futures:
                future.result()
            batches = self._send(step, raw)
            self.wait_s += time.perf_counter() - since
            yield batches

    def close(self) -> None:
        """Stop the threads; what they were reading is thrown away."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _submit(self) -> bool:
        step = next(self._steps, None) if self._steps is not None else self._next_step
        if step is None:
            return False
        self._next_step = step + 1
        sample = self._mine(self._order.batch(step))
        raw = _Raw.empty(sample, self._size, pinned=self._stream is not None)
        # A few slices a worker: enough to even out slow images, few enough to cost nothing.
        slices = np.array_split(np.arange(len(sample)), min(4 * self._workers, len(sample)))
        self._pending.append((step, raw, [self._pool.submit(self._fill, raw, rows) for rows in slices]))
        return True

    def _mine(self, number_G: np.ndarray) -> np.ndarray:
        grid = number_G.reshape(self._accumulate, self._world_size, self._batch_size)
        return np.ascontiguousarray(grid[:, self._rank]).reshape(-1)

    def _fill(self, raw: _Raw, rows: np.ndarray) -> None:
        for row in rows:
            raw.image[row], raw.label[row] = self._load(int(raw.sample[row]))

    def _load(self, number: int) -> tuple[np.ndarray, int]:
        """Return an image and its label; where bad ones are skipped, those of the next good one."""
        for other in range(number, number + _TRIES):
            other %= self._source.num_images
            try:
                image = decode_rgb(self._source.read(other), where=self._source.where(other))
                return resize_square(image, self._size), int(self._source.labels[other])
            except ImageError as error:
                if not self._skip:
                    raise
                if str(error) not in self.skipped:
                    self.skipped.append(str(error))
        raise DataError(
            f"{self._source.where(number)}: this and the {_TRIES - 1} images after it cannot be decoded"
        )

    def _send(self, step: int, raw: _Raw) -> tuple[Batch, ...]:
        image, label = torch.from_numpy(raw.image), torch.from_numpy(raw.label)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                image = raw.pinned[0].to(self._device, non_blocking=True)
                label = raw.pinned[1].to(self._device, non_blocking=True)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            for tensor in (image, label):
                tensor.record_stream(torch.cuda.current_stream(self._device))
        sample = torch.from_numpy(raw.sample)
        epoch = self._order.epoch(step)
        parts = zip(*(tensor.split(self._batch_size) for tensor in (image, label, sample)), strict=True)
        return tuple(Batch(step, epoch, *part) for part in parts)


@dataclass(frozen=True)
class _Raw:
    """The host's memory for one step; on CUDA the arrays look into pinned tensors."""

    sample: np.ndarray
    image: np.ndarray
    label: np.ndarray
    pinned: tuple[Tensor, Tensor]

    @classmethod
    def empty(cls, sample: np.ndarray, size: int, *, pinned: bool) -> _Raw:
        image = torch.empty(len(sample), size, size, 3, dtype=torch.uint8, pin_memory=pinned)
        label = torch.empty(len(sample), dtype=torch.int64, pin_memory=pinned)
        return cls(sample, image.numpy(), label.numpy(), (image, label))
