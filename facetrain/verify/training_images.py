"""Check whether images are in training data: neither thresholds nor accuracy on them hold for other people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset, image_places
from facetrain.data.label_problems import parts_of
from facetrain.data.open_dataset import open_dataset
from facetrain.data.remote_dataset import object_versions
from facetrain.errors import DataError, UsageError
from facetrain.telemetry.log import warn
from facetrain.verify.sets.pair_set import PairSet

HOLD_OUT_ADVICE = "hold people out for it with `facetrain data split`"
_EXAMINED = 16
"""Images that are looked for in the training data."""
_MOST_READ = 20_000
"""Training images that are read at most: those with as many bytes as an examined image."""
_MOST_READ_FOR_WARNING = 5_000
"""The same for a set of which only a warning comes: less than a second from a local disk."""
_RECORD_BYTES, _MOST_SPARE = 32, 11
"""Bytes of a record beside its image: frame and header; up to two labels of four bytes and three bytes of padding."""


@dataclass(frozen=True)
class FoundImages:
    """How many images of a sample are in training data, byte for byte."""

    known: int
    examined: int
    num_unread: int
    """Training images that may be equal to one of the sample, and were not read."""

    def __str__(self) -> str:
        """Return the number, as the subject of a message."""
        return f"{self.known} of {self.examined} examined images"


def find_training_images(images: Sequence[bytes], train: FaceDataset, most_read: int) -> FoundImages:
    """Look for 16 evenly spaced images of a sequence in training data, of which at most `most_read` images are read.

    Raises:
        DataError: an image of the training data cannot be read.
    """
    index = np.unique(np.linspace(0, len(images) - 1, _EXAMINED).astype(int))
    examined = [images[at] for at in index.tolist()]
    wanted = set(examined)
    candidates = _candidates(wanted, train)
    found = wanted.intersection(train.read(at) for at in candidates[:most_read].tolist())
    known = sum(image in found for image in examined)
    return FoundImages(known, len(examined), max(len(candidates) - most_read, 0))


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
    try:
        train = _open_training_data(description)
        if train is None:
            return
        found = find_training_images(images, train[1], _MOST_READ)
    except DataError:
        return
    place = f"{train[0]}, on which {model} was trained"
    if 2 * found.known >= found.examined:
        raise UsageError(
            f"{target}: {found} are in {place}; its cosines of people that it has learned are no measure for others: "
            "give people who are not in that data"
        )
    if found.known:
        warn(f"{target}: {found} are also in {place}")
    if found.num_unread:
        warn(
            f"{target}: {found.num_unread:,} images of {train[0]} were not compared with its images; their people must "
            f"not be among those on whom {model} was trained"
        )


def sets_of_training_images(sets: Sequence[PairSet], train: FaceDataset, name: str) -> Iterator[str]:
    """Yield a sentence for each set with images of the training data `name`; none about data in an object store."""
    if object_versions(train):  # each image would be a request
        return
    for pairs in sets:
        for place, part in parts_of(train, name):
            try:
                found = find_training_images(pairs.images, part, _MOST_READ_FOR_WARNING)
            except DataError:  # training reports it, or leaves the image out
                continue
            if found.known:
                yield (
                    f"{pairs.name}: {found} are in {place}, and the accuracy on them says nothing about other people"
                )


def warn_of_training_images(sets: Sequence[PairSet], description: Mapping[str, Any]) -> None:
    """Warn of sets with images on which a model was trained, if its data can be opened here.

    `description` is the metadata of the model file, with the config of its run.
    """
    try:
        train = _open_training_data(description) if sets else None
    except DataError:
        return
    if train is not None:
        for remark in sets_of_training_images(sets, train[1], train[0]):
            warn(f"{remark}; {HOLD_OUT_ADVICE}")


def _open_training_data(description: Mapping[str, Any]) -> tuple[str, FaceDataset] | None:
    """Return path and dataset of a model's training data; None if they are unknown or not on this machine.

    Raises:
        DataError: the dataset cannot be read.
    """
    config = description.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    train = data.get("train") if isinstance(data, dict) else None
    if not isinstance(train, str) or not Path(train).exists():
        return None
    return train, open_dataset(Path(train))


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
