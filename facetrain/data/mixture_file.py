"""YAML file of a mixture: its datasets, the weight of each, and which of its identities or images.

heads: joined                  # or separate: a head per dataset, see `DatasetHead`
datasets:
  - path: faces_emore          # relative to this file
  - path: glint360k
    weight: 0.5                # half of its images in every epoch, the other half in the next; default: 1
    identities: keep.txt       # only these identities, one number a line; `without:` excludes identities
  - path: s3://bucket/HSFace300k
    mask: mask.npy             # only these images: a NumPy array of their numbers, or of one boolean per image
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from facetrain.data.dataset import FaceDataset, ImageSubset, SubsetDataset
from facetrain.data.formats.names import MIXTURE_SUFFIXES
from facetrain.data.identity_counts import drop_small_identities
from facetrain.data.mixture import DatasetHead, MixtureDataset, images_per_epoch, parts_of
from facetrain.data.npy_file import map_npy
from facetrain.data.remote_dataset import ObjectCache, dataset_path
from facetrain.data.yaml_file import read_yaml
from facetrain.distinct import distinct
from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as, read_regular_text, sha256_of
from facetrain.remote.address import has_secrets, is_remote, without_secrets
from facetrain.settings import Settings

_LISTS = ("identities", "mask", "without")
"""Keys that name a file with a choice of identities or images."""
_Weight = Annotated[float, Field(strict=True, gt=0, le=1000)]


class MixtureEntry(Settings):
    """Dataset of a mixture."""

    path: str
    weight: _Weight = 1.0
    identities: str = ""
    without: str = ""
    mask: str = ""
    margin: dict[str, Any] = Field(default_factory=dict)
    loss_weight: _Weight = 1.0

    def place(self, mixture: Path, cache: ObjectCache) -> Path:
        """Return the local path of the dataset, relative to the YAML file; errors as `dataset_path`."""
        return dataset_path(self.path, cache) if is_remote(self.path) else mixture.parent / self.path

    @model_validator(mode="after")
    def _require_one_choice(self) -> Self:
        if self.mask and (self.identities or self.without):
            raise ValueError("give either `mask:` or a list of identities")
        return self


class MixtureFile(Settings):
    """Content of a mixture's YAML file."""

    heads: Literal["joined", "separate"] = "joined"
    datasets: Annotated[list[MixtureEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _require_heads(self) -> Self:
        own = [entry.path for entry in self.datasets if {"margin", "loss_weight"} & entry.model_fields_set]
        if own and self.heads == "joined":
            raise ValueError(f"margin and loss_weight of {own[0]} need `heads: separate` beside `datasets:`")
        return self


def is_mixture(path: Path) -> bool:
    """Return whether a path is the YAML file of a mixture."""
    return path.suffix.lower() in MIXTURE_SUFFIXES and path.is_file()


def open_mixture(
    path: Path,
    open_dataset: Callable[[Path], FaceDataset],
    min_images_per_identity: int,
    cache: ObjectCache,
) -> MixtureDataset:
    """Open the datasets of a YAML file.

    Args:
        path: the YAML file.
        open_dataset: opens one dataset.
        min_images_per_identity: identities with fewer images are left out.
        cache: for datasets in an object store.

    Raises:
        DataError: if the file is not as described above, or a dataset cannot be opened.
    """
    content: MixtureFile = read_yaml(path, MixtureFile)
    datasets, whole = [], list[FaceDataset]()
    for entry in content.datasets:
        if has_secrets(entry.path):
            raise DataError(f"{path}: {without_secrets(entry.path)}: give its credentials by the environment")
        place = entry.place(path, cache)
        if place.suffix.lower() in MIXTURE_SUFFIXES:
            raise DataError(f"{path}: {entry.path} is itself a mixture; list its datasets here")
        selected = _select_images(open_dataset(place), entry, path)
        whole.append(selected)
        # Last: the numbers in `identities:` and `without:` files are labels of the whole dataset.
        dataset = drop_small_identities(selected, place, min_images_per_identity)
        if not images_per_epoch([dataset.num_images], [entry.weight])[0]:
            raise DataError(
                f"{path}: with weight {entry.weight:g}, an epoch shows none of the {dataset.num_images:,} images of "
                f"{entry.path}; take at least {1 / dataset.num_images:.2g}, or leave out the dataset"
            )
        datasets.append(dataset)
    if content.heads == "joined" and (repeated := first_repeated(whole)) is not None:
        raise DataError(
            f"{path}: {content.datasets[repeated].path} is listed twice with the same identities, which would have two "
            "classes each; list it once, with a weight, or use `heads: separate`"
        )
    heads = [DatasetHead(entry.margin, entry.loss_weight) for entry in content.datasets]
    return MixtureDataset(
        datasets,
        [entry.weight for entry in content.datasets],
        heads if content.heads == "separate" else None,
        [_describe_entry(entry, path) for entry in content.datasets],
    )


def first_repeated(datasets: Iterable[FaceDataset]) -> int | None:
    """Return the number of the first dataset that has identities of one before it, of the same files; None: none has.

    The datasets of a mixture are compared one by one.
    """
    before = list[tuple[set[str], FaceDataset]]()
    for number, dataset in enumerate(datasets):
        parts = [(set(map(os.path.realpath, part.files)), part) for _, part in parts_of(dataset, "")]
        if any(
            not files.isdisjoint(others) and np.isin(_identities(part), _identities(other)).any()
            for files, part in parts
            for others, other in before
        ):
            return number
        before += parts
    return None


def _identities(dataset: FaceDataset) -> np.ndarray:
    """Return the identities that a dataset has of its file, int64 (N,)."""
    return dataset.identities if isinstance(dataset, ImageSubset) else distinct(dataset.labels)


def _describe_entry(entry: MixtureEntry, path: Path) -> dict[str, Any]:
    """Return path and weight of an entry, and the checksums of its lists: their names stay when they are edited."""
    described: dict[str, Any] = {"path": entry.path, "weight": entry.weight}
    for key in _LISTS:
        if name := getattr(entry, key):
            listed = path.parent / name
            with os_errors_as(DataError, listed):
                described[key] = sha256_of(listed)[:32]
    return described


def _select_images(dataset: FaceDataset, entry: MixtureEntry, path: Path) -> FaceDataset:
    """Apply `identities:` and `without:`, or `mask:`, of an entry."""
    if entry.mask:
        return ImageSubset(dataset, _read_mask(path.parent / entry.mask, dataset.num_images))
    if not entry.identities and not entry.without:
        return dataset
    selected = np.arange(dataset.num_classes)
    if entry.identities:
        selected = distinct(read_identities(path.parent / entry.identities, dataset.num_classes))
    if entry.without:
        excluded = read_identities(path.parent / entry.without, dataset.num_classes)
        selected = selected[~np.isin(selected, excluded)]
    if len(selected) == dataset.num_classes:
        return dataset
    if not np.isin(selected, dataset.labels).any():
        raise DataError(f"{path}: `identities:` and `without:` leave no identity of {entry.path}")
    return SubsetDataset(dataset, selected)


def read_identities(path: Path, num_classes: int) -> np.ndarray:
    """Return the identities that a file lists, one number a line: int64 (N,).

    Raises:
        DataError: the file cannot be read, or a number is not below `num_classes`.
    """
    try:
        text = read_regular_text(path).strip()
        if text and not text.encode().translate(None, b"0123456789 \t\r\n"):
            # Not word by word, which takes 66 s and 2.2 GB for 29 million.
            numbers = np.fromstring(text, np.int64, sep=" ")
        else:
            words = text.split()
            if wrong := next((word for word in words if not re.fullmatch("-?[0-9]+", word)), None):
                raise ValueError(f"{wrong[:60]!r} is no number")
            numbers = np.array(words, np.int64)
        outside = numbers[(numbers < 0) | (numbers >= num_classes)]
        if len(outside):
            raise ValueError(f"there is no identity {outside[0]}; they go from 0 to {num_classes - 1:,}")
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: {error_reason(error)}; write one number of an identity per line") from error
    return numbers


def _read_mask(path: Path, num_images: int) -> np.ndarray:
    """Return the numbers of the images that a .npy file selects, int64."""
    try:
        mask = map_npy(path)
        if mask.ndim != 1 or mask.dtype.kind not in "iub" or (mask.dtype == bool and len(mask) != num_images):
            raise ValueError(f"{mask.dtype} of shape {mask.shape}")
        numbers = np.flatnonzero(mask) if mask.dtype == bool else np.array(mask)
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= num_images:
            raise ValueError("no image, or a number of none")
        is_selected = np.zeros(num_images, bool)
        is_selected[numbers] = True
        if np.count_nonzero(is_selected) < len(numbers):
            raise ValueError("a number occurs twice")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {error_reason(error)}; expected a NumPy array of image numbers from 0 to {num_images - 1:,}, "
            f"or of {num_images:,} booleans"
        ) from error
    return numbers.astype(np.int64)
