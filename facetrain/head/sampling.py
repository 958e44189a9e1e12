"""Sampling of the classes that take part in a step (Partial FC, arXiv 2203.15565)."""

# G gathered batch   S sampled classes of this rank

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from facetrain.counter_rng import key_of, uniform_array
from facetrain.device.page_locked import to_device
from facetrain.distinct import distinct
from facetrain.head.class_centers import RowTables
from facetrain.head.class_shard import ClassShard
from facetrain.head.row_prefetch import RowPrefetcher, find


class Stage(NamedTuple):
    """Consecutive steps in which a head samples with the same rate, and has the same expectations."""

    first_step: int
    sample_rate: float
    """Fraction of the classes that take part in a step."""
    expectations: str = "off"
    """Second anchor of each class, see `head.expectations`: `moving`, `fixed` or `off`."""


def draw_classes(shard: ClassShard, rate: float, *, seed: int, step: int, block: int = 1) -> np.ndarray:
    """Draw a step's classes of this shard, independent of its batch: class numbers, ascending, int64, unique.

    The classes of all ranks together are divided into strata of 1/rate neighbors, whose bounds differ from step
    to step, and one class of each stratum is drawn by a hash of (seed, step, stratum). Every class is drawn with
    probability `rate`, the sample does not depend on the number of ranks, its size varies by a few classes, and
    the work is proportional to the sample. Partial FC instead draws a random number for every class and keeps a
    fixed number of classes on each rank.

    With `block` > 1, blocks of consecutive classes are drawn as one, because a disk reads neighbors together.
    The bounds of the blocks also differ from step to step, so no two classes are always drawn together.
    """
    if rate <= 0 or not shard.size:
        return np.empty(0, np.int64)
    offset, shift = uniform_array(np.arange(2), key_of(seed, step, 0)).tolist()
    # Classes before the first block that belong to it.
    begin = int(shift * block)
    first, last = (int((bound + begin) // block * rate - offset) for bound in shard)
    # Two strata more on each side: the division above may round the other way than the product below.
    stratum = np.arange(first - 2, last + 3)
    # Stratum i has the blocks from ⌊(i + offset)/rate⌋ on.
    start = np.floor((stratum + offset) / rate).astype(np.int64)
    place = uniform_array(stratum[:-1], key_of(seed, step, 1))
    drawn = start[:-1] + (place * np.diff(start)).astype(np.int64)
    classes = (drawn[:, None] * block - begin + np.arange(block)).ravel()
    return classes[np.searchsorted(classes, shard.start) : np.searchsorted(classes, shard.stop)]


@dataclass(frozen=True)
class SampledClasses:
    """Classes of this rank that take part in a step."""

    tables: RowTables
    index_S: Tensor | None
    """Their rows in `tables`, where the tables are; None: all rows."""
    position_G: Tensor
    """Position of each sample's target class among the S; −1 if the class is on another rank."""
    target_row_G: Tensor | None = None
    """Rows of the target classes on the host, if the tables are there; any row if the class is on another rank."""
    host_index_S: np.ndarray | None = None
    """`index_S` on the host."""

    @property
    def size(self) -> int:
        """Number of these classes, S."""
        # Without an index, all rows: the chunks are then slices, which need no copy.
        return len(self.tables.by_name["weight"].data) if self.index_S is None else len(self.index_S)


class ClassSampler:
    """Selects the classes of each step: a sample with the batch's classes in it, or all classes of the shard.

    Never waits for the device: the sizes of all tensors are computed on the host, from the labels there. With
    `prefetch`, the rows of sampled classes are copied to the device one step ahead.
    """

    def __init__(
        self,
        tables: RowTables,
        shard: ClassShard,
        device: torch.device,
        rate: float,
        *,
        seed: int,
        block: int,
        prefetch: bool,
    ) -> None:
        self._tables, self._shard, self.device = tables, shard, device
        self._rate, self._block, self._seed = rate, block, seed
        self._prefetcher = RowPrefetcher(tables, device) if prefetch and self._rate < 1 else None
        self._worker: ThreadPoolExecutor | None = None
        self._draws: dict[int, Future[np.ndarray]] = {}
        """Draws of this step and the next ones."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a head draws for itself: threads cannot be copied.
        return self.__dict__ | {"_worker": None, "_draws": {}}

    @property
    def reads_labels(self) -> bool:
        """Whether `sample` needs the labels on the host."""
        return self._rate < 1 or self._tables.on_host

    def sample(self, label_G: Tensor, step: int) -> SampledClasses:
        """Return the classes that take part in a step with these labels (int64, of the whole head).

        The labels are on the host if `reads_labels`, else anywhere.
        """
        if not self.reads_labels:
            label_G = to_device(label_G, self.device)
            is_local_G = (label_G >= self._shard.start) & (label_G < self._shard.stop)
            return SampledClasses(
                self._tables, None, torch.where(is_local_G, label_G - self._shard.start, -1)
            )
        local = label_G.numpy() - self._shard.start
        local[(local < 0) | (local >= self._shard.size)] = -1
        # From tables in host memory, the targets are read by index there.
        target_row_G = torch.from_numpy(np.maximum(local, 0)) if self._tables.on_host else None
        if self._rate >= 1:
            # All classes: the chunks are read as slices.
            return SampledClasses(self._tables, None, to_device(local, self.device), target_row_G)
        # The classes of the batch always take part: a sample without its target class has no loss.
        positive = distinct(local[local >= 0])
        # Draws of steps that are over; a second micro-batch of this step uses its draw again.
        self._draws = {known: drawn for known, drawn in self._draws.items() if known >= step}
        if self.device.type == "cuda":
            # There the host is free to draw while the device works; on a CPU it would take the time from the step.
            for ahead in range(step, step + 3):
                self._begin_draw(ahead)
        if self._prefetcher is not None:
            return self._prefetched(self._prefetcher, step, local, positive)
        drawn = self._begin_draw(step).result()
        added = positive[find(drawn, positive) < 0]
        # Not by a sort: the sample is long, and the classes that it lacks are few.
        class_S = np.insert(drawn, np.searchsorted(drawn, added), added)
        self._tables.read_ahead(torch.from_numpy(class_S))
        position = np.where(local < 0, -1, np.searchsorted(class_S, local))
        index_S = to_device(class_S, self._tables.device)
        return SampledClasses(
            self._tables, index_S, to_device(position, self.device), target_row_G, host_index_S=class_S
        )

    def flush(self) -> None:
        """Wait until all changed rows are written to the tables."""
        if self._prefetcher is not None:
            self._prefetcher.flush()

    def _begin_draw(self, step: int) -> Future[np.ndarray]:
        """Draw the classes of a step, counted from the shard's start, without knowing its batch; return at once."""
        if step not in self._draws:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="draw")
            self._draws[step] = self._worker.submit(self._draw, step)
        return self._draws[step]

    def _draw(self, step: int) -> np.ndarray:
        drawn = draw_classes(self._shard, self._rate, seed=self._seed, step=step, block=self._block)
        return drawn - self._shard.start

    def _prefetched(
        self, prefetcher: RowPrefetcher, step: int, local: np.ndarray, positive: np.ndarray
    ) -> SampledClasses:
        # A draw does not depend on the batch, so the rows of the next step can be read during this one.
        drawn, next_drawn = (self._begin_draw(number).result() for number in (step, step + 1))
        added = positive[find(drawn, positive) < 0]
        tables = prefetcher.step_rows(*map(torch.from_numpy, (drawn, added, next_drawn)))
        # The added classes follow the drawn ones.
        place = find(drawn, local)
        position = np.where(place < 0, len(drawn) + np.searchsorted(added, local), place)
        position[local < 0] = -1
        return SampledClasses(tables, None, to_device(position, self.device))
