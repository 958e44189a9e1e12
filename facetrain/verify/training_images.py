"""Check of the images of a calibration: thresholds from images that the model was trained on are far too low."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset, image_places
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError, UsageError
from facetrain.telemetry.log import warn

_EXAMINED = 16
"""Images that are looked for in the training data."""
_MOST_READ = 20_000
"""Training images that are read at most: those with as many bytes as an examined image."""
_RECORD_BYTES, _MOST_SPARE = 32, 11
"""Bytes of a record beside its image: frame and header; up to two labels of four bytes and three bytes of padding."""


def refuse_training_images(
    images: Sequence[bytes], target: str, model: Path, description: Mapping[str, Any]
) -> None:
    """Refuse images of which some are in the training data of a model, if its data can be opened here.

    Args:
        images: encoded images of the calibration.
        target: where they are from, for messages.
        model: path of the model, for messages.
        description: metadata of the model file, with the config of its run.

    Raises:
        UsageError: at least half of the examined images are training images; a few give a warning.
    """
    config = description.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    train = data.get("train") if isinstance(data, dict) else None
    if not isinstance(train, str) or not Path(train).exists():
        return
    examined = [
        images[at] for at in np.unique(np.linspace(0, len(images) - 1, _EXAMINED).astype(int)).tolist()
    ]
    try:
        known, num_unread = _known_images(examined, open_dataset(Path(train)))
    except DataError:
        return
    if 2 * known >= len(examined):
        raise UsageError(
            f"{target}: {known} of {len(examined)} examined images are in {train}, on which {model} was trained; its "
            "cosines of people that it has learned are no measure for others: give people who are not in that data"
        )
    if known:
        warn(
            f"{target}: {known} of {len(examined)} examined images are also in {train}, on which {model} was trained"
        )
    if num_unread:
        warn(
            f"{target}: {num_unread:,} images of {train} were not compared with its images; their people must not be "
            f"among those on whom {model} was trained"
        )


def _known_images(examined: Sequence[bytes], train: FaceDataset) -> tuple[int, int]:
    """Return how many of the encoded images are in a dataset, byte for byte, and how many like them were not read."""
    wanted = set(examined)
    candidates = _candidates(wanted, train)
    found = wanted.intersection(train.read(index) for index in candidates[:_MOST_READ].tolist())
    return sum(image in found for image in examined), max(len(candidates) - _MOST_READ, 0)


def _candidates(wanted: set[bytes], train: FaceDataset) -> np.ndarray:
    """Return the indices of images that may have as many bytes as a wanted one, those of rare sizes first: int (N,)."""
    place_N2 = image_places(train, np.arange(train.num_images))
    if place_N2 is None:
        return np.arange(train.num_images)
    size_N = place_N2[:, 1]
    # A record has no size in the catalog, but ends where the next one begins.
    record_N = np.append(np.diff(place_N2[:, 0]), 0)
    is_unknown_N = (size_N == 0) & (record_N <= 0)
    alike = []
    for size in {len(image) for image in wanted}:
        spare_N = record_N - _RECORD_BYTES - size
        is_record_N = (size_N == 0) & (spare_N >= 0) & (spare_N <= _MOST_SPARE)
        alike.append(np.flatnonzero((size_N == size) | is_record_N | is_unknown_N))
    index = np.concatenate(sorted(alike, key=len))
    return index[np.sort(np.unique(index, return_index=True)[1])]
