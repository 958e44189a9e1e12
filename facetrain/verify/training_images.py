"""Check whether images are in training data: neither thresholds nor accuracy on them hold for other people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.mixture import parts_of
from facetrain.data.mixture_file import MixtureFile, is_mixture
from facetrain.data.open_dataset import open_dataset
from facetrain.data.remote_dataset import object_versions
from facetrain.data.yaml_file import read_yaml
from facetrain.errors import DataError
from facetrain.files import os_errors_as
from facetrain.models.model_file import training_data
from facetrain.remote.address import is_remote, without_secrets
from facetrain.telemetry.log import warn
from facetrain.text import listed
from facetrain.verify.sets.pair_set import PairSet

HOLD_OUT_ADVICE = "hold people out for it with `facetrain data split`"
_SAMPLE = 16
"""Images that are looked for in the training data."""
_MOST_READ = 20_000
"""Training images that are read at most: those with as many bytes as an image of the sample."""
_MOST_READ_FOR_WARNING = 5_000
"""The same for a set of which only a warning comes; all such sets share the budget `_MOST_READ`."""
_MOST_FOLDERS = 2_000
"""Entries of a folder of images that an evaluation lists."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FoundImages:
    """How many images of a sample are in training data, byte for byte."""

    known: int
    examined: int
    """Images of the sample that were compared with all training images of their size."""
    sample: int
    read: int
    """Training images that were read."""

    def __str__(self) -> str:
        """Return the number, as the subject of a message."""
        return f"{self.known} of {self.examined} examined images"


def find_training_images(
    images: Sequence[bytes], train: FaceDataset, most_read: int, count_S: np.ndarray | None = None
) -> FoundImages:
    """Look for 16 images of a sequence in training data, of which at most `most_read` images are read.

    They are one of each sixteenth of the sequence: that whose number of bytes the fewest training images have.
    `count_S` is the result of `_count_alike` for the sizes of all images that will be looked for; None: counted here.

    Raises:
        DataError: an image of the training data cannot be read.
    """
    size_K = np.array([len(image) for image in images])
    count_K = (_count_alike(int(size_K.max()), train) if count_S is None else count_S)[size_K]
    sixteenths = np.array_split(np.arange(len(images)), min(_SAMPLE, len(images)))
    # At least 1: a size that no training image has would else prefer unknown images to known ones.
    sample = np.array([part[np.maximum(count_K[part], 1).argmin()] for part in sixteenths])
    sample = sample[np.argsort(count_K[sample], kind="stable")]
    # One pass compares each training image with the whole sample: no sample needs more reads than they are.
    examined = sample[np.minimum(np.cumsum(count_K[sample]), train.num_images) <= most_read]
    wanted = {images[at] for at in examined.tolist()}
    alike = list(_find_alike(size_K[examined], train))
    found = wanted.intersection(map(train.read, alike))
    known = sum(images[at] in found for at in examined.tolist())
    return FoundImages(known, len(examined), len(sample), len(alike))


def refuse_training_images(
    images: Sequence[bytes], target: str, model: Path, description: Mapping[str, Any]
) -> None:
    """Refuse images of which some are in the training data of a model, if its data can be opened here.

    Args:
        images: encoded images of the calibration.
        target: where they are from, for messages.
        model: path of the model, for messages.
        description: metadata of the model file.

    Raises:
        DataError: at least half of the examined images are in the training data, or in one dataset of a mixture; a
            few give a warning, and so do images that too many training images would have to be read for, and training
            data that are unknown or cannot be read here.
    """
    unchecked = f"that its people are not in {target} is not checked"
    paths = training_data(description)
    if not paths:  # such as an exported file
        warn(f"{model}: what it was trained on is unknown; {unchecked}")
    parts = []
    for path in paths:
        try:
            with os_errors_as(DataError, Path(path)):
                _local_places(path)  # a remote one is refused, and not downloaded
                parts += parts_of(open_dataset(path), path)
        except DataError as error:
            warn(f"{model}: was trained on {error}; {unchecked}")
    for place, part in parts:
        try:
            found = find_training_images(images, part, _MOST_READ)
        except DataError as error:
            warn(f"{model}: was trained on {error}; {unchecked}")
            continue
        if found.known and 2 * found.known >= found.examined:
            raise DataError(
                f"{target}: {found} are in {place}, on which {model} was trained; its cosines of people that it has "
                "learned are no measure for others: give people who are not in that data"
            )
        if found.known:
            warn(f"{target}: {found} are also in {place}, on which {model} was trained")
        if found.examined < found.sample:
            warn(
                f"{target}: only {found.examined} of a sample of {found.sample} images were compared with {place}, "
                f"where many images have their sizes; its people must not be among those on whom {model} was trained"
            )


def sets_of_training_images(sets: Sequence[PairSet], train: FaceDataset, name: str) -> Iterator[str]:
    """Yield a sentence for each set with images of the training data `name`, and one for those that are not compared.

    None about data in an object store.
    """
    if not sets or object_versions(train):  # each image would be a request
        return
    largest = max(len(image) for pairs in sets for image in pairs.images)
    counted = []
    for place, part in parts_of(train, name):
        with suppress(DataError):  # such as a file of another user, whose catalog anybody may read
            counted.append((place, part, _count_alike(largest, part)))
    left = _MOST_READ
    unknown = []
    for pairs in sets:
        for place, part, count_S in counted:
            try:
                found = find_training_images(pairs.images, part, min(_MOST_READ_FOR_WARNING, left), count_S)
            except DataError:  # training reports it, or leaves the image out
                continue
            left -= found.read
            if not found.examined:
                unknown.append(pairs.name)
            if found.known:
                yield (
                    f"{pairs.name}: {found} are in {place}, and the accuracy on them says nothing about other people"
                )
    if unknown:
        yield (
            f"{listed(dict.fromkeys(unknown))}: not compared with all images of {name}, of which too many would have "
            "to be read"
        )


def warn_of_training_images(sets: Sequence[PairSet], descriptions: Iterable[Mapping[str, Any]]) -> None:
    """Warn of sets with images on which one of several models was trained, if its data can be opened here at once.

    `descriptions` are the metadata of the model files. A folder with very many entries is not opened, with a warning:
    all of them would be listed.
    """
    for path in training_data(*descriptions) if sets else ():
        with suppress(DataError, OSError):  # such as a folder of another user, who has trained the model
            many = next((place for place in _local_places(path) if _has_many_entries(place)), None)
            if many is not None:
                warn(
                    f"{many}: has more than {_MOST_FOLDERS:,} entries, so its images are not compared with those of "
                    "the sets; `facetrain doctor` does it"
                )
                continue
            for remark in sets_of_training_images(sets, open_dataset(path), path):
                warn(f"{remark}; {HOLD_OUT_ADVICE}")


def _local_places(path: str) -> list[Path]:
    """Return the paths of the datasets of a mixture, or the path of another dataset.

    Raises:
        DataError: one of them is remote and would be downloaded, or the file of the mixture is damaged.
        OSError: the operating system does not tell what is at the path.
    """
    places = [path]
    if is_mixture(Path(path)):
        content: MixtureFile = read_yaml(Path(path), MixtureFile)
        places = [
            each.path if is_remote(each.path) else f"{Path(path).parent / each.path}"
            for each in content.datasets
        ]
    if remote := next(filter(is_remote, places), None):
        raise DataError(f"{without_secrets(remote)}, which is not downloaded for this")
    return [Path(place) for place in places]


def _has_many_entries(folder: Path) -> bool:
    return folder.is_dir() and any(islice(folder.iterdir(), _MOST_FOLDERS, None))


def _count_alike(largest: int, train: FaceDataset) -> np.ndarray:
    """Return how many training images may have 0, 1, … `largest` bytes; all if no size is known: int64 (S,)."""
    end = largest + 1
    begins_less_ends = np.zeros(end + 2, np.int64)
    for range_B2 in _size_ranges(train, end):
        if range_B2 is None:
            return np.full(end, train.num_images)
        for column, change in ((range_B2[:, 0], 1), (range_B2[:, 1] + 1, -1)):
            begins_less_ends += change * np.bincount(column, minlength=len(begins_less_ends))
    return begins_less_ends.cumsum()[:end]


def _find_alike(size_K: np.ndarray, train: FaceDataset) -> Iterator[int]:
    """Yield the indices of training images that may have one of K numbers of bytes; all if no size is known."""
    if not len(size_K):
        return
    end = int(size_K.max()) + 1
    wanted_below = np.zeros(end + 2, np.int64)
    wanted_below[np.unique(size_K) + 1] = 1
    wanted_below = wanted_below.cumsum()
    for number, range_B2 in enumerate(_size_ranges(train, end)):
        if range_B2 is None:
            yield from range(train.num_images)
            return
        is_alike_B = wanted_below[range_B2[:, 1] + 1] > wanted_below[range_B2[:, 0]]
        yield from (number * _CHUNK + np.flatnonzero(is_alike_B)).tolist()


def _size_ranges(train: FaceDataset, end: int) -> Iterator[np.ndarray | None]:
    """Yield the ranges of the sizes of all training images, up to `end` bytes, in chunks (B, 2); None: unknown."""
    for start in range(0, train.num_images, _CHUNK):
        range_B2 = train.sizes(np.arange(start, min(start + _CHUNK, train.num_images)))
        yield None if range_B2 is None else range_B2.clip(0, end)
