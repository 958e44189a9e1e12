"""Bytes that a rank sends for the head in one step, at two numbers of classes, beside the formula.

Start it on several ranks: `torchrun --nproc-per-node 2 -m benchmarks.head_traffic`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.common import run
from benchmarks.head import MarginHeadStep
from facetrain.distributed import collectives
from facetrain.distributed.world import join
from facetrain.errors import UsageError

FEW_CLASSES, MANY_CLASSES = 1_000, 20_000
"""Two sizes of the head: the bytes must be the same for both."""


def measure_head_traffic(batch_size: int = 256, embedding_size: int = 512) -> dict[str, Any] | None:
    """Return the bytes of each collective for `batch_size` embeddings over all ranks; None on other ranks."""
    with join("cpu") as world:
        if batch_size % world.size:
            raise UsageError(
                f"--batch-size {batch_size}: cannot be divided among {world.size} ranks; "
                f"use a multiple of {world.size}"
            )
        local_batch = batch_size // world.size
        few, many = (
            _bytes_sent(classes, embedding_size, local_batch) for classes in (FEW_CLASSES, MANY_CLASSES)
        )
        formula = passed_bytes(world.size, local_batch, embedding_size)
        report = {"ranks": world.size, "few_classes": few, "many_classes": many, "formula": formula}
        return report if world.is_leader else None


def passed_bytes(ranks: int, local_batch: int, embedding_size: int) -> dict[str, int]:
    """Return the bytes that a rank passes to each kind of collective of the head in a step."""
    global_batch = ranks * local_batch
    return {
        # Embeddings in float32 and labels in int64; then three float32 statistics per row of the global batch.
        "all_gather": local_batch * (4 * embedding_size + 8) + 12 * global_batch,
        "reduce_scatter": 4 * global_batch * embedding_size,
    }


def _bytes_sent(classes: int, embedding_size: int, local_batch: int) -> dict[str, int]:
    step = MarginHeadStep(classes, embedding_size, "cpu", folder=Path())
    with collectives.measured_traffic() as sent:
        step(torch.randn(local_batch, embedding_size, requires_grad=True), torch.zeros(local_batch).long())
    return dict(sent)


if __name__ == "__main__":
    run(measure_head_traffic)
