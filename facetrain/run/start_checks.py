"""Checks before the first step: what cannot end well is refused now, and not after hours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.mixture import MixtureDataset
from facetrain.data.remote_dataset import remarks_on_reading
from facetrain.data.tools.photo_shapes import describe_photos
from facetrain.errors import DataError, RunError
from facetrain.head.head_group import head_parts
from facetrain.training.state import TrainState

HIGHEST_LR = {"sgd": 10.0, "adamw": 0.1}
"""Rates that cannot be meant. Published rates are at most 0.4 (SGD, 4,096 images) and 0.001 (AdamW)."""


class LabelProblem(NamedTuple):
    """Fault in the labels of a dataset that training does not report."""

    message: str
    advice: str
    first_label: int = 0
    """Smallest label."""
    is_shifted: bool = False
    """Whether every label from the first to the last has an image, so that only the beginning is wrong."""
    is_empty: bool = False
    """Whether most identities have no image."""


def check_start(
    config: Config, folder: Path, source: FaceDataset, state: TrainState, steps: int
) -> list[str]:
    """Check disk, labels, images and learning rate before the first step; return the warnings. For the leader only.

    Args:
        config: config of the run.
        folder: run folder, which may not exist yet.
        source: training data.
        state: state of the run, as it will be saved.
        steps: steps that the run still takes.

    Raises:
        DataError: most identities have no image, and the config does not state their number.
        RunError: the disk cannot hold a checkpoint.
    """
    return [
        *_check_identities(config, source),
        *(f"{config.data.train}: {photos}" for photos in [describe_photos(source)] if photos),
        *remarks_on_reading(source, config.data),
        *_check_learning_rate(config),
        *check_free_space(config, folder, checkpoint_bytes(config, state), steps),
    ]


def find_label_problem(source: FaceDataset) -> LabelProblem | None:
    """Return what is wrong with the labels of a dataset, or None if every identity has enough images."""
    classes = source.num_classes
    present, counts = count_images(source)
    first, missing, single = int(present[0]), classes - len(present), int((counts == 1).sum())
    is_empty = missing > classes / 2
    if missing and first > 0:
        is_shifted = first == missing
        remark = f", but every label from {first:,} to {classes - 1:,} has an image" if is_shifted else ""
        return LabelProblem(
            f"no image has the label 0{remark}: the labels begin at {first:,}",
            f"subtract {first:,} from all labels: labels must begin at 0, and the center of an empty class only repels",
            first,
            is_shifted,
            is_empty,
        )
    if missing:
        return LabelProblem(
            f"{missing:,} labels below the highest have no image",
            "their class centers cannot learn: check the labels with `facetrain data check`",
            is_empty=is_empty,
        )
    if single > classes / 2:
        return LabelProblem(
            f"{single:,} of {classes:,} identities have one image", "consider data.min_images_per_identity: 2"
        )
    return None


def count_images(source: FaceDataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels that have images, ascending, and the numbers of their images."""
    if source.num_classes > 2 * source.num_images:
        # A damaged label can be so large that the counts of all labels below it fill the memory.
        return np.unique(source.labels, return_counts=True)
    counts = np.bincount(source.labels, minlength=source.num_classes)
    present = np.flatnonzero(counts)
    return present, counts[present]


def checkpoint_bytes(config: Config, state: TrainState) -> int:
    """Return the size of a checkpoint: backbone and optimizer once, the class centers of all ranks."""
    weights = sum(tensor.nbytes for tensor in state.backbone.state_dict().values())
    trained = sum(weight.nbytes for weight in state.backbone.parameters() if weight.requires_grad)
    rows = 0.0
    for part in head_parts(state.head):
        start, stop = part.shard
        local = sum(table.nbytes for table in part.head.row_state().values())
        # The other ranks' tables are not here, and shards differ by one class at most.
        rows += local / max(stop - start, 1) * part.head.num_classes
    return weights + trained * config.optim.moments + round(rows)


def _check_identities(config: Config, source: FaceDataset) -> Iterator[str]:
    """Yield the problems of the labels of each dataset."""
    parts = source.datasets if isinstance(source, MixtureDataset) else [source]
    for number, part in enumerate(parts, start=1):
        place = f"{config.data.train}, dataset {number}" if len(parts) > 1 else config.data.train
        problem = find_label_problem(part)
        if problem is None:
            continue
        # A dataset with chosen images (`mask:`) may have many empty classes: the number shows that it is meant.
        if problem.is_empty and config.data.num_classes is None:
            raise DataError(
                f"{place}: {part.num_images:,} images of {part.num_classes:,} identities: {problem.message}; "
                f"{problem.advice}, or set data.num_classes to {source.num_classes} if that is meant"
            )
        yield f"{place}: {problem.message}; {problem.advice}"


def _check_learning_rate(config: Config) -> Iterator[str]:
    highest = HIGHEST_LR[config.optim.name]
    if config.optim.lr > highest:
        yield (
            f"optim.lr: {config.optim.lr:g} is above {highest:g}, with which {config.optim.name} does not learn; "
            "`facetrain doctor` compares it with the published rates"
        )


def check_free_space(config: Config, folder: Path, size: int, steps: int) -> Iterator[str]:
    """Yield a warning if the disk cannot hold all checkpoints, of `size` bytes each, that a run of `steps` steps keeps.

    Raises:
        RunError: the disk cannot hold one checkpoint.
    """
    if not steps:
        return
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    # Of the folder that exists: the run folder is created later.
    free = shutil.disk_usage(existing).free
    advice = "free some space, set run.dir to a larger disk"
    if free < size:
        raise RunError(
            f"{folder}: a checkpoint takes {size / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB free; {advice}"
        )
    # The next checkpoint is written before the oldest is removed.
    kept = config.checkpoint.keep + (config.checkpoint.best_metric is not None)
    count = min(kept + 1, -(-steps // config.checkpoint.every_steps))
    if free < size * count:
        yield (
            f"{folder}: {count} checkpoints of {size / 1e6:,.1f} MB are written, and the disk has {free / 1e6:,.1f} "
            f"MB free; {advice}, or lower checkpoint.keep"
        )
