"""Opening of datasets: detects the format of a path, and checks the counts against the config."""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

from facetrain.data.beside_dataset import TRAINING_SET
from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.base import Format
from facetrain.data.formats.image_folder import folders_with_images
from facetrain.data.formats.image_list import open_list
from facetrain.data.formats.landmark_file import landmarks_path, open_landmarks, require_file_names
from facetrain.data.formats.names import DATASET_SUFFIXES, SUFFIXES
from facetrain.data.identity_counts import drop_small_identities
from facetrain.data.mixture import parts_of
from facetrain.data.mixture_file import is_mixture, open_mixture
from facetrain.data.remote_dataset import (
    DEFAULT_CACHE,
    ObjectCache,
    fetched_again,
    forget_description,
)
from facetrain.errors import DataError
from facetrain.files import allow_open_files, os_errors_as
from facetrain.text import count_text, listed, printable, shell_path

FORMATS: tuple[Format, ...] = tuple(
    replace(import_module(f"facetrain.data.formats.{name}").FORMAT, suffixes=suffixes)
    for name, suffixes in SUFFIXES.items()
)
"""Readers of all formats, in the order of precedence."""


def open_dataset(
    path: str | os.PathLike[str],
    *,
    min_images_per_identity: int = 1,
    root: Path | None = None,
    with_landmarks: bool = True,
    cache: ObjectCache = DEFAULT_CACHE,
) -> FaceDataset:
    """Open a dataset in any format of `FORMATS`, or a YAML file that mixes datasets.

    Args:
        path: a folder or a file.
        min_images_per_identity: identities with fewer images are left out.
        root: folder that the paths of a list file are relative to; default: the folder of the list.
        with_landmarks: False: the landmark file is neither read nor checked, because it is about to be replaced.
        cache: cache of remote datasets in a mixture.

    Raises:
        DataError: if the folder does not exist, contains no dataset, or the dataset is inconsistent.
    """
    allow_open_files()  # a catalog of images keeps two open
    path = path if isinstance(path, Path) else Path(path)
    format = None if is_mixture(path) else _format_of(path)
    if root is not None and (format is None or format.open is not open_list):
        raise DataError(
            f"{path}: --images is the folder of the paths in a list file, and this is none; remove it"
        )
    if format is None:
        try:
            return open_mixture(
                path,
                partial(open_dataset, with_landmarks=with_landmarks),
                min_images_per_identity,
                cache,
            )
        except DataError as error:
            # The paths in the file come from other people, and are in the messages of all formats.
            raise type(error)(printable(str(error))) from error
    try:
        dataset = open_list(path, root) if format.open is open_list else format.open(path)
    except DataError:
        again = fetched_again(path)  # an answer of a store may have been damaged on its way
        if again is None:
            raise
        path = again
        try:
            dataset = format.open(path)
        except DataError:
            forget_description(path)  # the next command fetches all of it again
            raise
    if with_landmarks and (landmarks := landmarks_path(path)).is_file():
        dataset.landmark_file = landmarks
        open_landmarks(landmarks, dataset.num_images)  # an error now, not in the middle of a run
        require_file_names(landmarks, dataset.digest_file_names)
    return drop_small_identities(dataset, path, min_images_per_identity)


def _format_of(path: Path) -> Format:
    if path.is_file():
        name = path.name.lower()
        for format in FORMATS:
            if name.endswith(format.suffixes):
                return format
        if name.endswith(".zip"):
            raise DataError(
                f"{path}: a zip archive; unpack it, and give the folder: unzip {shell_path(path)} -d FOLDER"
            )
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{printable(str(path))}: no such folder or file")
        parts = [part for format in FORMATS for part in format.parts]
        raise DataError(
            f"{printable(str(path))}: not a dataset, which is a folder with {', '.join(parts)} or one subfolder per "
            f"identity, or a file {' '.join(sorted(DATASET_SUFFIXES))}"
        )
    recognized = _format_of_folder(path)
    if recognized is None:
        return FORMATS[-1]
    format, part = recognized
    # A single backup in a folder of photos would hide them all; beside a train.rec, there may be other images.
    if part != TRAINING_SET and len(identities := folders_with_images(path, 2)) == 2:
        raise DataError(
            f"{path}: has {printable(part)}, and images in folders such as {listed(sorted(identities))}; only one of "
            "the two can be the dataset: move the other one out of the folder"
        )
    return format


def _format_of_folder(folder: Path) -> tuple[Format, str] | None:
    """Return the format that a folder has a part of, and the name of the part; None if it has none."""
    with os_errors_as(DataError, folder):
        names = os.listdir(folder)  # once: a folder of identities has up to a million of them
    for format in FORMATS:
        for part in format.parts:
            is_part = re.compile(fnmatch.translate(part), re.IGNORECASE).match
            for name in filter(is_part, names):
                if not name.startswith("."):
                    return format, name
    return None


def is_dataset_folder(folder: Path) -> bool:
    """Return whether a folder is a dataset even with images directly in it: it has a part of one, or two identities.

    Raises:
        DataError: the folder cannot be read.
    """
    # One subfolder with images, such as the figures of a description, does not make a folder of identities.
    return _format_of_folder(folder) is not None or len(folders_with_images(folder, 2)) == 2


def require_landmarks(dataset: FaceDataset, name: str, backbone: str) -> None:
    """Check that all images of a training set have landmarks, for a backbone that takes them.

    Raises:
        DataError: the dataset, or one of a mixture, has no landmark file; or its numbers are not landmarks.
    """
    for place, part in parts_of(dataset, name):
        if part.landmark_reader() is None:
            raise DataError(
                f"{place} has no landmarks, which backbone {backbone} needs; write them with `facetrain data "
                "landmarks DATASET --detector yunet`, or train another backbone"
            )


def require_aligned(dataset: FaceDataset, name: str) -> None:
    """Check that no list says of its images that they are photos.

    Raises:
        DataError: a list, or one of a mixture, has such images.
    """
    for place, part in parts_of(dataset, name):
        points = part.photo_landmarks
        x_P = np.empty(0) if points is None else points[:, 0, 0][~np.isnan(points[:, 0, 0])]  # of P photos
        if len(x_P):
            detector = "" if np.isfinite(x_P).all() else " --detector yunet"
            raise DataError(
                f"{place}: {count_text(len(x_P), 'image is', 'images are')} not aligned (flag 0; aligned ones have 1); "
                f"align them: facetrain data pack {shell_path(name)} --output FOLDER{detector}"
            )


def open_aligned(path: Path) -> FaceDataset:
    """Open a dataset of aligned faces.

    Raises:
        DataError: as `open_dataset` and `require_aligned`.
    """
    dataset = open_dataset(path)
    require_aligned(dataset, str(path))
    return dataset


def check_counts(
    dataset: FaceDataset, folder: Path, *, num_classes: int | None, num_images: int | None
) -> None:
    """Compare the counts of a dataset with the counts of the config; None skips a check.

    Raises:
        DataError: if they differ; the message names all that do, and the options for another dataset.
    """
    expected = {"num_classes": num_classes, "num_images": num_images}
    counted = {"num_classes": dataset.num_classes, "num_images": dataset.num_images}
    wrong = [key for key, count in expected.items() if count not in (None, counted[key])]
    first = int(dataset.labels.min())
    labels = f" (its labels begin at {first}, not at 0)" if first and "num_classes" in wrong else ""
    if wrong:
        stated = " and ".join(f"data.{key} is {expected[key]:,}" for key in wrong)
        found = " and ".join(f"{counted[key]:,}" for key in wrong)
        options = " ".join(f"--set data.{key}=null" for key in wrong)
        raise DataError(
            f"{stated}, but {folder} contains {found}{labels}; correct the config, or for another dataset add {options}"
        )
