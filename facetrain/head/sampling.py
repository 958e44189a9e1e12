"""Sampling of the classes that take part in a step (Partial FC, arXiv 2203.15565)."""

# G gathered batch   S sampled classes of this rank

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from facetrain.counter_rng import key_of, uniform, uniform_array
from facetrain.head.class_centers import RowTables
from facetrain.head.class_shard import ClassShard
from facetrain.head.row_prefetch import RowPrefetcher, find
from facetrain.head.settings import HeadSettings


def draw_classes(
    shard: ClassShard,
    rate: float,
    *,
    seed: int,
    step: int,
    block: int = 1,
    device: torch.device | None = None,
) -> Tensor:
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
        return torch.empty(0, dtype=torch.int64, device=device)
    strata = _Strata.of_step(rate, block, seed, step)
    first, last = strata.around(shard)
    stratum = torch.arange(first, last + 1, device=device)
    # float64: float32 cannot distinguish neighbors among more than 2^24 classes.
    start = ((stratum.double() + strata.offset) / rate).floor().long()
    place = uniform(stratum[:-1], strata.key)
    drawn = start[:-1] + (place * start.diff()).long()
    classes = (drawn[:, None] * block - strata.begin + torch.arange(block, device=device)).flatten()
    # Classes outside the shard are in the outermost strata, which the host computes too: to select by their content,
    # it would have to wait for a GPU.
    below = int((strata.classes(np.arange(first, min(first + _EDGE, last))) < shard.start).sum())
    above = int((strata.classes(np.arange(max(last - _EDGE, first), last)) >= shard.stop).sum())
    return classes[below : len(classes) - above]


def is_drawn(classes: np.ndarray, rate: float, *, seed: int, step: int, block: int = 1) -> np.ndarray:
    """Return which of some classes (int64) `draw_classes` draws, in time proportional to their number."""
    if rate <= 0:
        return np.zeros(len(classes), dtype=bool)
    strata = _Strata.of_step(rate, block, seed, step)
    unit = (classes + strata.begin) // block
    nearest = np.floor(unit * rate - strata.offset).astype(np.int64)
    # The neighbors too: the division that finds the stratum's bounds may round the other way.
    return np.logical_or.reduce([strata.units(nearest + shift) == unit for shift in (-1, 0, 1)])


_EDGE = 6
"""Strata at each end that may reach beyond a shard: `around` adds two, and truncation and rounding one each."""


@dataclass(frozen=True)
class _Strata:
    """Strata of one step: stratum i has the units from ⌊(i + offset)/rate⌋ on; a unit is a block of classes."""

    rate: float
    block: int
    offset: float
    begin: int
    """Classes before the first unit that belong to it."""
    key: int

    @classmethod
    def of_step(cls, rate: float, block: int, seed: int, step: int) -> _Strata:
        offset, shift = uniform_array(np.arange(2), key_of(seed, step, 0)).tolist()
        return cls(rate, block, offset, int(shift * block), key_of(seed, step, 1))

    def around(self, shard: ClassShard) -> tuple[int, int]:
        """Return strata [first, last) that contain all classes of a shard."""
        # Two strata more on each side: strata are cut at the shard's bounds at the end.
        first = int((shard.start + self.begin) // self.block * self.rate - self.offset) - 2
        return first, int((shard.stop + self.begin) // self.block * self.rate - self.offset) + 2

    def units(self, stratum: np.ndarray) -> np.ndarray:
        """Return the unit that each stratum draws: the numbers of `draw_classes`, on the host."""
        start, stop = (np.floor((stratum + end + self.offset) / self.rate).astype(np.int64) for end in (0, 1))
        return start + (uniform_array(stratum, self.key) * (stop - start)).astype(np.int64)

    def classes(self, stratum: np.ndarray) -> np.ndarray:
        """Return the classes that some strata draw."""
        return (self.units(stratum)[:, None] * self.block - self.begin + np.arange(self.block)).flatten()


@dataclass(frozen=True)
class SampledClasses:
    """Classes of this rank that take part in a step."""

    tables: RowTables
    index_S: Tensor | None
    """Their rows in `tables`; None: all rows."""
    class_S: Tensor | None
    """The classes, counted from the shard's start; None: all classes."""
    position_G: Tensor
    """Position of each sample's target class among the S; −1 if the class is on another rank."""
    target_row_G: Tensor | None = None
    """Rows of the target classes on the host, if the tables are there; any row if the class is on another rank."""


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
        settings: HeadSettings,
        *,
        seed: int,
        prefetch: bool,
    ) -> None:
        self._tables, self._shard, self._device = tables, shard, device
        self._rate, self._block, self._seed = settings.sample_rate, settings.classes_per_block, seed
        self._prefetcher = RowPrefetcher(tables, device) if prefetch and self._rate < 1 else None
        # On a GPU the host is free to draw while the device works; on a CPU it would take the time from the step.
        ahead = self._prefetcher is not None and device.type == "cuda"
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="draw") if ahead else None
        self._draws: dict[int, Future[Tensor]] = {}
        """Draws on the host, by step."""

    @property
    def reads_labels(self) -> bool:
        """Whether `sample` needs the labels on the host."""
        return self._rate < 1 or self._tables.on_host

    def sample(self, label_G: Tensor, step: int) -> SampledClasses:
        """Return the classes that take part in a step with these labels (int64, of the whole head).

        The labels are on the host if `reads_labels`, else on the device.
        """
        if not self.reads_labels:
            is_local_G = (label_G >= self._shard.start) & (label_G < self._shard.stop)
            return SampledClasses(
                self._tables, None, None, torch.where(is_local_G, label_G - self._shard.start, -1)
            )
        local = label_G.numpy() - self._shard.start
        local[(local < 0) | (local >= self._shard.size)] = -1
        if self._rate >= 1:
            rows = torch.from_numpy(np.maximum(local, 0))
            return SampledClasses(self._tables, None, None, to_device(local, self._device), rows)
        positive = np.unique(local[local >= 0])
        if self._prefetcher is not None:
            return self._prefetched(self._prefetcher, step, local, positive)
        known = is_drawn(
            positive + self._shard.start, self._rate, seed=self._seed, step=step, block=self._block
        )
        drawn = self._draw(step, self._device)
        class_S = torch.cat([drawn, to_device(positive[~known], self._device)]).sort().values
        self._tables.read_ahead(class_S)
        local_G = to_device(local, self._device)
        position_G = torch.where(local_G < 0, -1, torch.searchsorted(class_S, local_G))
        return SampledClasses(self._tables, class_S, class_S, position_G)

    def flush(self) -> None:
        """Wait until all changed rows are written to the tables."""
        if self._prefetcher is not None:
            self._prefetcher.flush()

    def _draw(self, step: int, device: torch.device) -> Tensor:
        """Return the classes that a step draws without knowing its batch, counted from the shard's start."""
        drawn = draw_classes(
            self._shard, self._rate, seed=self._seed, step=step, block=self._block, device=device
        )
        return drawn - self._shard.start

    def _draw_on_host(self, step: int) -> Future[Tensor]:
        """Return the draw of a step, begun before or now."""
        if step not in self._draws:
            if self._worker is not None:
                self._draws[step] = self._worker.submit(self._draw, step, torch.device("cpu"))
            else:
                self._draws[step] = Future()
                self._draws[step].set_result(self._draw(step, torch.device("cpu")))
        return self._draws[step]

    def _prefetched(
        self, prefetcher: RowPrefetcher, step: int, local: np.ndarray, positive: np.ndarray
    ) -> SampledClasses:
        self._draws = {known: drawn for known, drawn in self._draws.items() if step <= known <= step + 2}
        drawn, next_drawn = (self._draw_on_host(number).result() for number in (step, step + 1))
        if self._worker is not None:
            self._draw_on_host(step + 2)
        place = find(drawn.numpy(), positive)
        added = positive[place < 0]
        index_S, tables = prefetcher.step_rows(drawn, torch.from_numpy(added), next_drawn)
        # The added classes follow the drawn ones.
        place = np.where(place < 0, len(drawn) + np.searchsorted(added, positive), place)
        position = np.full(len(local), -1)
        position[local >= 0] = place[np.searchsorted(positive, local[local >= 0])]
        class_S = to_device(index_S.numpy(), self._device)
        return SampledClasses(tables, None, class_S, to_device(position, self._device))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
