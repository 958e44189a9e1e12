"""Score one model on some sets: what `facetrain eval` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from facetrain.checkpoint.model_file import open_model
from facetrain.distributed.world import join
from facetrain.verify.pairs import load_targets
from facetrain.verify.verifier import Metrics, Verifier


def evaluate(
    model: Path,
    targets: Sequence[str],
    data_dir: Path,
    *,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 2,
) -> tuple[str, dict[str, Metrics], bool]:
    """Return what the model is, its metrics on every set, and whether this rank is the one to tell them.

    Under torchrun all ranks share the work.

    Raises:
        ModelError: the model cannot be opened.
        PairsError: a set cannot be read.
    """
    with join(device) as world:
        sets = load_targets(targets, data_dir)
        opened = open_model(model, world.device)
        verifier = Verifier(
            sets,
            image_size=opened.image_size,
            batch_size=batch_size,
            device=world.device,
            workers=workers,
            prepare=opened.prepare,
        )
        return opened.description, dict(verifier(opened.network)), world.is_leader
