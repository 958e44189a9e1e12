"""Which classes take part in a step (Partial FC, arXiv 2203.15565)."""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.counter import key_of, uniform
from facetrain.head.shard import ClassShard


def sample_classes(shard: ClassShard, positive: Tensor, rate: float, *, seed: int, step: int) -> Tensor:
    """Choose this rank's classes for a step: ascending, counted from the shard's start, int64 (S,).

    `positive` holds classes of this shard, counted from its start: those of the batch, which are
    always in. Any other class is in with probability `rate`: see `drawn_classes`.
    """
    drawn = drawn_classes(shard, rate, seed=seed, step=step, device=positive.device) - shard.start
    return torch.cat([drawn, positive]).unique()


def drawn_classes(
    shard: ClassShard, rate: float, *, seed: int, step: int, device: torch.device | None = None
) -> Tensor:
    """Draw a step's classes of this shard without knowing its batch: ascending, int64, none twice.

    The classes of all ranks together are parted into strata of 1/rate neighbours, at places that differ
    from step to step, and one class of each is drawn by a hash of (seed, step, stratum). So a class is in
    with probability `rate`, the sample does not depend on the number of ranks, its size hardly varies, and
    the work is proportional to the sample; Partial FC draws a fixed number on each rank, from a random
    number for every class.
    """
    if rate <= 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    offset = float(uniform(torch.zeros(1, dtype=torch.int64), key_of(seed, step, 0)))
    first, last = int(shard.start * rate - offset) - 2, int(shard.stop * rate - offset) + 2
    edge = torch.arange(first, last + 1, device=device)
    # In float64, which tells 2^31 classes and more apart.
    start = ((edge.double() + offset) / rate).floor().long()
    place = uniform(edge[:-1], key_of(seed, step, 1))
    drawn = start[:-1] + (place * start.diff()).long()
    return drawn[(drawn >= shard.start) & (drawn < shard.stop)]
