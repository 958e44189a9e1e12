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
    train = (description.get("config") or {}).get("data", {}).get("train")
    if not isinstance(train, str) or not Path(train).exists():
        return
    examined = [
        images[at] for at in np.unique(np.linspace(0, len(images) - 1, _EXAMINED).astype(int)).tolist()
    ]
    try:
        known = _known_images(examined, open_dataset(Path(train)))
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


def _known_images(examined: Sequence[bytes], train: FaceDataset) -> int:
    """Return how many of the encoded images are in a dataset, byte for byte."""
    wanted = set(examined)
    found = set()
    for index in _candidates(wanted, train)[:_MOST_READ].tolist():
        data = train.read(index)
        if data in wanted:
            found.add(data)
    return sum(image in found for image in examined)


def _candidates(wanted: set[bytes], train: FaceDataset) -> np.ndarray:
    """Return the indices of images that have as many bytes as a wanted one, int (N,)."""
    every_N = np.arange(train.num_images)
    places_N2 = image_places(train, every_N)
    sizes = [len(image) for image in wanted]
    if places_N2 is not None and places_N2[:, 1].any():
        return np.flatnonzero(np.isin(places_N2[:, 1], sizes))
    return every_N  # single files, whose sizes are in no catalog
