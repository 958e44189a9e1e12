"""Head traffic benchmark: bytes that each rank sends in one step, beside the formula of docs/head.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from facetrain.bench.head import MarginHeadStep
from facetrain.distributed import collectives
from facetrain.distributed.world import join
from facetrain.errors import UsageError

FEW_CLASSES, MANY_CLASSES = 1_000, 20_000
"""Two sizes of the head: the bytes must be the same for both."""


def measure_head_traffic(*, embedding_size: int, global_batch_size: int) -> dict[str, Any] | None:
    """Return the bytes per collective at two numbers of classes, and by the formula; None on other ranks.

    Collective; runs on the CPU.

    Raises:
        UsageError: the batch cannot be divided among the ranks.
    """
    with join("cpu") as world:
        if global_batch_size % world.size:
            raise UsageError(
                f"--batch-size: {global_batch_size} embeddings cannot be divided among {world.size} ranks; "
                f"use a multiple of {world.size}"
            )
        local_batch = global_batch_size // world.size
        few, many = (
            _bytes_sent(classes, embedding_size, local_batch) for classes in (FEW_CLASSES, MANY_CLASSES)
        )
        # Embeddings in float32 and labels in int64; then three float32 statistics per row of the global batch.
        formula = {
            "all_gather": local_batch * (4 * embedding_size + 8) + 12 * global_batch_size,
            "reduce_scatter": 4 * global_batch_size * embedding_size,
        }
        report = {"ranks": world.size, "few_classes": few, "many_classes": many, "formula": formula}
        return report if world.is_leader else None


def _bytes_sent(classes: int, embedding_size: int, local_batch: int) -> dict[str, int]:
    step = MarginHeadStep(classes, embedding_size, "cpu", Path())
    with collectives.measured_traffic() as sent:
        step(torch.randn(local_batch, embedding_size, requires_grad=True), torch.zeros(local_batch).long())
    return dict(sent)
