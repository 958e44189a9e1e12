"""Snapshots for tests of checkpoints: the values of a row encode its class and step."""

from __future__ import annotations

import torch

from facetrain.checkpoint.snapshot import ClassRows, Snapshot
from facetrain.head.class_shard import shard_classes


def snapshot(step: int, *, rank: int = 0, world_size: int = 1, num_classes: int = 11, **options) -> Snapshot:
    shard = shard_classes(num_classes, rank, world_size)
    classes = torch.arange(shard.start, shard.stop, dtype=torch.float32)
    return Snapshot(
        step=step,
        rows=(ClassRows(*shard, {"weight": classes[:, None].repeat(1, 4) + step, "steps": classes}),),
        num_classes=num_classes,
        rank_state={"cpu": torch.tensor([rank], dtype=torch.uint8)},
        **({"meta": {"note": "a"}, "replicated": _replicated(step)} | options),
    )


def _replicated(step: int) -> dict[str, torch.Tensor]:
    return {"backbone.w": torch.full((3,), float(step)), "optimizer.w": torch.ones(3)}
