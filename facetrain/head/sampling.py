"""Which classes take part in a step (Partial FC, arXiv 2203.15565)."""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.counter import key_of, uniform
from facetrain.head.shard import ClassShard


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

    The classes of all ranks together are parted into strata of 1/rate neighbours, at places that differ
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
