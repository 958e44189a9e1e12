"""Which classes take part in a step (Partial FC, arXiv 2203.15565)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from facetrain.counter_rng import key_of, uniform
from facetrain.head.class_centers import RowTables
from facetrain.head.class_shard import ClassShard
from facetrain.head.row_prefetch import Stage


def drawn_classes(
    shard: ClassShard,
    rate: float,
    *,
    seed: int,
    step: int,
    block: int = 1,
    device: torch.device | None = None,
) -> Tensor:
    """Draw a step's classes of this shard without knowing its batch: ascending, int64, none twice.

    The classes of all ranks together are parted into strata of 1/rate neighbors, at places that differ
    from step to step, and one class of each is drawn by a hash of (seed, step, stratum). So a class is in
    with probability `rate`, the sample does not depend on the number of ranks, its size hardly varies, and
    the work is proportional to the sample; Partial FC draws a fixed number on each rank, from a random
    number for every class.

    With `block` above 1, so many consecutive classes are drawn as one: a disk reads them together. Where
    the blocks begin differs from step to step, too, so that no two classes are always drawn together.
    """
    if rate <= 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    offset, shift = (float(x) for x in uniform(torch.arange(2), key_of(seed, step, 0)))
    begin = int(shift * block)
    first = int((shard.start + begin) // block * rate - offset) - 2
    last = int((shard.stop + begin) // block * rate - offset) + 2
    edge = torch.arange(first, last + 1, device=device)
    # In float64, which tells 2^31 classes and more apart.
    start = ((edge.double() + offset) / rate).floor().long()
    place = uniform(edge[:-1], key_of(seed, step, 1))
    drawn = start[:-1] + (place * start.diff()).long()
    classes = (drawn[:, None] * block - begin + torch.arange(block, device=device)).flatten()
    return classes[(classes >= shard.start) & (classes < shard.stop)]


class Sampler:
    """Draws the classes of each step for one shard, and remembers them until the step has come."""

    def __init__(
        self, shard: ClassShard, rate: float, *, block: int, seed: int, device: torch.device
    ) -> None:
        self._shard, self._rate, self._block, self._seed, self._device = shard, rate, block, seed, device
        self._draws: dict[int, Tensor] = {}

    def drawn(self, step: int) -> Tensor:
        """Return the classes that a step draws, whatever its batch: counted from the shard's start."""
        if step not in self._draws:
            drawn = drawn_classes(
                self._shard, self._rate, seed=self._seed, step=step, block=self._block, device=self._device
            )
            self._draws = {known: rows for known, rows in self._draws.items() if known == step - 1}
            self._draws[step] = drawn - self._shard.start
        return self._draws[step]


@dataclass(frozen=True)
class SampledClasses:
    """The classes of this rank that take part in a step."""

    tables: RowTables
    index_S: Tensor | None
    """Their rows in these tables; None: all rows."""
    class_S: Tensor | None
    """Which they are, counted from the shard's start; None: all classes."""
    place_G: Tensor
    """Where among them each sample's own class is, or −1: on another rank."""


class ClassSampler:
    """Takes all classes of a shard, or a step's sample of them: where they lie, or copied to the device."""

    def __init__(
        self,
        tables: RowTables,
        shard: ClassShard,
        device: torch.device,
        *,
        sample_rate: float,
        sample_block: int,
        seed: int,
        staged: bool,
    ) -> None:
        self._tables, self._shard = tables, shard
        self._stage = Stage(tables, device) if staged and sample_rate < 1 else None
        self._sampler: Sampler | None = None
        if sample_rate < 1:
            where = device if self._stage is None else torch.device("cpu")
            self._sampler = Sampler(shard, sample_rate, block=sample_block, seed=seed, device=where)

    def choose(self, label_G: Tensor, step: int) -> SampledClasses:
        """Find the classes that take part in a step with these labels (int64, of the whole head)."""
        here_G = (label_G >= self._shard.start) & (label_G < self._shard.stop)
        local_G = torch.where(here_G, label_G - self._shard.start, -1)
        if self._sampler is None:
            return SampledClasses(self._tables, None, None, local_G)
        drawn = self._sampler.drawn(step)
        if self._stage is not None:
            return self._bring(drawn, self._sampler.drawn(step + 1), local_G)
        class_S = torch.cat([drawn, local_G[here_G]]).unique()
        self._tables.read_ahead(class_S)
        place_G = torch.searchsorted(class_S, local_G)
        return SampledClasses(self._tables, class_S, class_S, torch.where(here_G, place_G, -1))

    def settle(self) -> None:
        """Wait until all rows are where they belong."""
        if self._stage is not None:
            self._stage.settle()

    def _bring(self, drawn: Tensor, next_drawn: Tensor, local_G: Tensor) -> SampledClasses:
        assert self._stage is not None
        here_G = local_G >= 0
        positive = local_G[here_G].unique().cpu()
        added = positive[~torch.isin(positive, drawn, assume_unique=True)]
        class_S, tables = self._stage.enter(drawn, added, next_drawn)
        class_S = class_S.to(local_G.device)
        # What was drawn is ascending, and so is what the batch added behind it, but not both together.
        order_S = class_S.argsort()
        found_G = torch.searchsorted(class_S, local_G, sorter=order_S).clamp_max(len(class_S) - 1)
        place_G = order_S[found_G] if len(class_S) else local_G
        return SampledClasses(tables, None, class_S, torch.where(here_G, place_G, -1))
