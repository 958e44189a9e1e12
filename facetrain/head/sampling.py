"""Which classes take part in a step (Partial FC, arXiv 2203.15565)."""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.counter import hash64, key_of
from facetrain.head.shard import ClassShard

_AT_ONCE = 1 << 20


def sample_classes(shard: ClassShard, positive: Tensor, rate: float, *, seed: int, step: int) -> Tensor:
    """Choose this rank's classes for a step: ascending, counted from the shard's start, int64 (S,).

    `positive` holds classes of this shard, counted from its start: those of the batch, which are
    always in. Any other class is in with probability `rate`. That is decided by a hash of (seed, step,
    class), so the sample of all ranks together does not depend on how many they are; Partial FC draws a
    fixed number on each rank instead, which has the same expectation.
    """
    chosen = torch.zeros(shard.size, dtype=torch.bool, device=positive.device)
    if rate > 0:
        # 63 bits of the hash are enough, and compare as signed numbers do.
        below = int(rate * 2**63)
        key = key_of(seed, step)
        for start in range(shard.start, shard.stop, _AT_ONCE):
            classes = torch.arange(start, min(start + _AT_ONCE, shard.stop), device=positive.device)
            drawn = hash64(classes, key) & (2**63 - 1)
            chosen[start - shard.start : start - shard.start + len(classes)] = drawn < below
    chosen[positive] = True
    return chosen.nonzero()[:, 0]
