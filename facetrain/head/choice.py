"""Which of a rank's classes take part in a step, and where their rows are while it runs."""

# G gathered batch   K this rank's classes   S sampled of K

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from facetrain.head.placement import RowTables
from facetrain.head.sampling import Sampler
from facetrain.head.shard import ClassShard
from facetrain.head.stage import Stage


@dataclass(frozen=True)
class Choice:
    """The classes of this rank that take part in a step."""

    tables: RowTables
    index_S: Tensor | None
    """Their rows in these tables; None: all rows."""
    class_S: Tensor | None
    """Which they are, counted from the shard's start; None: all classes."""
    place_G: Tensor
    """Where among them each sample's own class is, or −1: on another rank."""


class Chooser:
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

    def choose(self, label_G: Tensor, step: int) -> Choice:
        """Find the classes that take part in a step with these labels (int64, of the whole head)."""
        here_G = (label_G >= self._shard.start) & (label_G < self._shard.stop)
        local_G = torch.where(here_G, label_G - self._shard.start, -1)
        if self._sampler is None:
            return Choice(self._tables, None, None, local_G)
        drawn = self._sampler.drawn(step)
        if self._stage is not None:
            return self._bring(drawn, self._sampler.drawn(step + 1), local_G)
        class_S = torch.cat([drawn, local_G[here_G]]).unique()
        self._tables.read_ahead(class_S)
        place_G = torch.searchsorted(class_S, local_G)
        return Choice(self._tables, class_S, class_S, torch.where(here_G, place_G, -1))

    def settle(self) -> None:
        """Wait until all rows are where they belong."""
        if self._stage is not None:
            self._stage.settle()

    def _bring(self, drawn: Tensor, next_drawn: Tensor, local_G: Tensor) -> Choice:
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
        return Choice(tables, None, class_S, torch.where(here_G, place_G, -1))
