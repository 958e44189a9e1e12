"""Which checkpoints stay."""

from __future__ import annotations

import math
from pathlib import Path

from facetrain.checkpoint.commit import complete_steps, step_folder, take_away
from facetrain.checkpoint.manifest import read_manifest
from facetrain.errors import CheckpointError


def steps_to_remove(folder: Path, *, keep: int, best_metric: str | None) -> list[int]:
    """Return the steps beyond the last `keep` (1 or more), but for the best by a metric."""
    steps = complete_steps(folder)
    old = steps[:-keep]
    best = _best(folder, steps, best_metric) if best_metric else None
    return [step for step in old if step != best]


def remove_checkpoint(folder: Path, step: int) -> None:
    """Remove the checkpoint of a step."""
    take_away(step_folder(folder, step))


def _best(folder: Path, steps: list[int], metric: str) -> int | None:
    values: dict[int, float] = {}
    for step in steps:
        try:
            value = read_manifest(step_folder(folder, step)).metrics[metric]
        except (CheckpointError, KeyError):
            continue
        if math.isfinite(value):
            values[step] = value
    # Of equals the newest: it has seen more.
    return max(values, key=lambda step: (values[step], step), default=None)
