"""Sampling of the classes that take part in a step (Partial FC, arXiv 2203.15565)."""

# G gathered batch   S sampled classes of this rank

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from facetrain.counter_rng import key_of, uniform
from facetrain.head.class_centers import RowTables
from facetrain.head.class_shard import ClassShard
from facetrain.head.row_prefetch import RowPrefetcher


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
    if rate <= 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    offset, shift = (float(x) for x in uniform(torch.arange(2), key_of(seed, step, 0)))
    begin = int(shift * block)
    # Two strata more on each side: strata are cut at the shard's bounds at the end.
    first = int((shard.start + begin) // block * rate - offset) - 2
    last = int((shard.stop + begin) // block * rate - offset) + 2
    stratum = torch.arange(first, last + 1, device=device)
    # float64: float32 cannot distinguish neighbors among more than 2^24 classes.
    start = ((stratum.double() + offset) / rate).floor().long()
    place = uniform(stratum[:-1], key_of(seed, step, 1))
    drawn = start[:-1] + (place * start.diff()).long()
    classes = (drawn[:, None] * block - begin + torch.arange(block, device=device)).flatten()
    return classes[(classes >= shard.start) & (classes < shard.stop)]


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


class ClassSampler:
    """Selects the classes of each step: a sample with the batch's classes in it, or all classes of the shard.

    With `prefetch`, the rows of sampled classes are copied to the device one step ahead.
    """

    def __init__(
        self,
        tables: RowTables,
        shard: ClassShard,
        device: torch.device,
        *,
        sample_rate: float,
        sample_block: int,
        seed: int,
        prefetch: bool,
    ) -> None:
        self._tables, self._shard = tables, shard
        self._rate, self._block, self._seed = sample_rate, sample_block, seed
        self._prefetcher = RowPrefetcher(tables, device) if prefetch and sample_rate < 1 else None
        self._draw_device = device if self._prefetcher is None else torch.device("cpu")
        self._draws: dict[int, Tensor] = {}
        """Draws of the last step and the next one, by step."""

    def sample(self, label_G: Tensor, step: int) -> SampledClasses:
        """Return the classes that take part in a step with these labels (int64, of the whole head)."""
        is_local_G = (label_G >= self._shard.start) & (label_G < self._shard.stop)
        local_G = torch.where(is_local_G, label_G - self._shard.start, -1)
        if self._rate >= 1:
            return SampledClasses(self._tables, None, None, local_G)
        drawn = self._drawn(step)
        if self._prefetcher is not None:
            return self._prefetched(self._prefetcher, drawn, self._drawn(step + 1), local_G)
        class_S = torch.cat([drawn, local_G[is_local_G]]).unique()
        self._tables.read_ahead(class_S)
        position_G = torch.searchsorted(class_S, local_G)
        return SampledClasses(self._tables, class_S, class_S, torch.where(is_local_G, position_G, -1))

    def flush(self) -> None:
        """Wait until all changed rows are written to the tables."""
        if self._prefetcher is not None:
            self._prefetcher.flush()

    def _drawn(self, step: int) -> Tensor:
        """Return the classes that a step draws without knowing its batch, counted from the shard's start."""
        if step not in self._draws:
            drawn = draw_classes(
                self._shard,
                self._rate,
                seed=self._seed,
                step=step,
                block=self._block,
                device=self._draw_device,
            )
            self._draws = {known: rows for known, rows in self._draws.items() if known == step - 1}
            self._draws[step] = drawn - self._shard.start
        return self._draws[step]

    @staticmethod
    def _prefetched(
        prefetcher: RowPrefetcher, drawn: Tensor, next_drawn: Tensor, local_G: Tensor
    ) -> SampledClasses:
        is_local_G = local_G >= 0
        positive = local_G[is_local_G].unique().cpu()
        added = positive[~torch.isin(positive, drawn, assume_unique=True)]
        class_S, tables = prefetcher.step_rows(drawn, added, next_drawn)
        class_S = class_S.to(local_G.device)
        # Drawn and added classes are ascending, but the added ones follow the drawn ones.
        order_S = class_S.argsort()
        found_G = torch.searchsorted(class_S, local_G, sorter=order_S).clamp_max(len(class_S) - 1)
        position_G = order_S[found_G] if len(class_S) else local_G
        return SampledClasses(tables, None, class_S, torch.where(is_local_G, position_G, -1))
