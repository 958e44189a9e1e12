"""Writer of datasets: selected images in any format that facetrain writes, with their names, landmarks and card."""

# N images

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name, image_landmarks, original_name
from facetrain.data.dataset_card import ImageDigest, card_path, carry_cards
from facetrain.data.formats.image_writers import (
    LabeledImage,
    write_lmdb,
    write_parquet,
    write_webdataset,
    write_zip,
)
from facetrain.data.formats.landmark_file import LANDMARKS_FILE, landmarks_path, write_landmarks
from facetrain.data.formats.record_names import most_frequent_identities, write_name_tables
from facetrain.data.formats.record_writer import write_identities
from facetrain.data.images.header import encoded_image_size
from facetrain.data.skipped_files import SkippedFile
from facetrain.data.tools.file_names import FileNames
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.errors import DataError, ImageError, UsageError
from facetrain.files import make_folder, new_file, new_folder, os_errors_as
from facetrain.progress import ProgressCallback, ignore_progress


def write_folders(folder: Path, images: Iterable[LabeledImage], identities: list[str]) -> None:
    """Write a file for each image, in a folder per identity."""
    made = set[str]()

    def named() -> Iterator[LabeledImage]:
        for image in images:
            assert image.name is not None, "an image in a folder has a name"
            identity = image.name.partition("/")[0]
            if identity not in made:
                (folder / identity).mkdir()
                made.add(identity)
            yield image

    # In threads: a network file system takes milliseconds to create a file.
    with closing(
        map_in_order(lambda image: (folder / str(image.name)).write_bytes(image.data), named())
    ) as written:
        for _ in written:
            pass


@dataclass(frozen=True)
class OutputFormat:
    """Format that datasets are written in."""

    write: Callable[[Path, Iterable[LabeledImage], list[str]], None] | None
    """Takes the output, the images and the names of the identities. None: RecordIO, whose writer needs the counts in
    advance."""
    suffix: str = ""
    """Suffix of the output if it is one file; empty for a folder."""
    needs_folders: bool = False
    """Whether every image is named IDENTITY/FILE, also one without a name."""
    has_keys: bool = False
    """Whether the name up to its first dot is the key of an image."""
    keeps_order: bool = True
    """Whether readers see the images in the order in which they were written."""


FORMATS = {
    "recordio": OutputFormat(None),
    "webdataset": OutputFormat(write_webdataset, needs_folders=True, has_keys=True),
    "parquet": OutputFormat(write_parquet),
    "lmdb": OutputFormat(write_lmdb, ".lmdb"),
    "zip": OutputFormat(write_zip, ".zip", needs_folders=True),
    "folder": OutputFormat(write_folders, needs_folders=True, keeps_order=False),
}
"""Formats by their names on the command line."""


@dataclass(frozen=True, kw_only=True)
class DatasetSize:
    """Place and size of a dataset."""

    folder: str
    images: int
    identities: int
    skipped: list[SkippedFile] = field(default_factory=list)
    """Files and images that were left out."""


@dataclass(frozen=True, kw_only=True)
class WrittenDataset(DatasetSize):
    """Dataset that was written."""

    empty_identities: int = 0
    """Identities of the source without images: they are left out, and the labels after them are renumbered."""
    without_landmarks: list[str] = field(default_factory=list)
    """Inputs without landmarks; the output then has none."""


@dataclass(frozen=True)
class Selection:
    """Images of a dataset in the order in which they are written, and their labels."""

    source: FaceDataset
    numbers: np.ndarray
    """Numbers of the images in the dataset, int64 (N,)."""
    label: np.ndarray
    """Labels, int64 (N,); the writer renumbers them without gaps."""
    read: Callable[[int], bytes] | None = None
    """Returns an image as it is written, by its number in the dataset; None: `source.read`."""
    landmarks: np.ndarray | None = None
    """Landmarks of all images of the dataset, complete when the last image was read; None: the dataset's landmarks."""

    @cached_property
    def new_label(self) -> np.ndarray:
        """Labels without gaps, int64 (N,)."""
        return np.unique(self.label, return_inverse=True)[1]

    @cached_property
    def identities(self) -> list[int]:
        """Identity in the dataset of each new label: corrected labels mix identities, and the most frequent counts."""
        return most_frequent_identities(self.source, self.numbers, self.new_label)

    def read_image(self, row: int) -> bytes:
        """Return the image in a row as it is written.

        Raises:
            ImageError: it is empty: a record without bytes is no image for the reader, and later ones would shift.
        """
        number = int(self.numbers[row])
        data = (self.read or self.source.read)(number)
        if not data:
            raise ImageError(
                f"{self.source.location(number)}: the image is empty; leave out such images with "
                "`facetrain data check DATASET --repair DIR`"
            )
        return data


def select(source: FaceDataset, numbers: np.ndarray | None = None) -> Selection:
    """Select images by their numbers, all if None, with their labels."""
    numbers = np.arange(source.num_images) if numbers is None else numbers
    return Selection(source, numbers, source.labels[numbers])


def write_dataset(
    selection: Selection,
    output: Path,
    sources: Sequence[Path],
    *,
    to: str = "recordio",
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write selected images as a new dataset, which appears complete or not at all.

    The images keep their bytes and their order. Names of images and identities are kept where the source has them, as
    are landmarks, except in a folder of image files, which readers sort by name.

    Args:
        selection: the images.
        output: the folder, .lmdb or .zip file to write; it must not exist.
        sources: datasets that the images come from, whose cards are carried along.
        to: a key of `FORMATS`.
        workers: number of threads that read; one per usable core if None.
        progress: called after every image.

    Raises:
        UsageError: the output has the wrong suffix.
        ImageError: an image is empty; or its name has no suffix of an image and its format is unknown.
        DataError: an image cannot be read, or the output or a file beside it exists or cannot be written.
    """
    chosen = FORMATS[to]
    _require_free(output, to, chosen)
    with os_errors_as(DataError, output):
        make_folder(output.parent)
    with new_file(output, DataError) if chosen.suffix else new_folder(output) as place:
        return write_into(place, selection, output, sources, to=to, workers=workers, progress=progress)


def write_into(
    place: Path,
    selection: Selection,
    output: Path,
    sources: Sequence[Path],
    *,
    to: str = "recordio",
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write selected images as `write_dataset`, at a temporary place that will become `output`."""
    chosen, source, numbers = FORMATS[to], selection.source, selection.numbers
    names = [identity_name(source, identity) for identity in selection.identities]
    digest = ImageDigest()
    images = _digested(
        report_progress(_labeled_images(selection, chosen, workers), len(numbers), progress), digest
    )
    if chosen.write is None:
        size = encoded_image_size(selection.read_image(0))
        labeled = ((image.label, image.data) for image in images)
        write_identities(
            place, np.bincount(selection.new_label).tolist(), labeled, min(size) if size else 112
        )
        write_name_tables(place, numbers, source, selection.identities)
    else:
        chosen.write(place, images, names)
    carry_cards(sources, output, place, (len(names), len(numbers)), digest if chosen.keeps_order else None)
    landmarks_N52 = image_landmarks(source) if selection.landmarks is None else selection.landmarks
    if landmarks_N52 is not None and chosen.keeps_order:
        inside = landmarks_path(output) if chosen.suffix else place / LANDMARKS_FILE
        write_landmarks(inside, landmarks_N52[numbers])
    empty = source.num_classes - len(np.unique(source.labels))
    return WrittenDataset(
        folder=str(output), images=len(numbers), identities=len(names), empty_identities=empty
    )


def _require_free(output: Path, to: str, chosen: OutputFormat) -> None:
    """Check the suffix of an output, and that neither it nor a file that would belong to it exists."""
    if chosen.suffix and output.suffix != chosen.suffix:
        raise UsageError(
            f"--output {output}: the format {to} is one file; its name must end in {chosen.suffix}"
        )
    if output.exists():
        raise DataError(f"{output}: already exists; remove it or choose another name")
    for beside, content in ((landmarks_path(output), "landmarks"), (card_path(output), "dataset card")):
        if chosen.suffix and beside.exists():
            raise DataError(
                f"{beside}: already exists, and would become the {content} of the new dataset; remove it or choose "
                "another name for the output"
            )


def _labeled_images(
    selection: Selection, chosen: OutputFormat, workers: int | None
) -> Iterator[LabeledImage]:
    """Yield the images in their order, with unique names if all of them need one."""
    source, file_names = selection.source, None
    if chosen.needs_folders:
        file_names = FileNames(
            source, selection.identities, has_keys=chosen.has_keys, has_true_suffix=not chosen.keeps_order
        )
    for row, data in enumerate(map_in_order(selection.read_image, range(len(selection.numbers)), workers)):
        number, label = int(selection.numbers[row]), int(selection.new_label[row])
        name = None  # RecordIO has tables of names
        if file_names is not None:
            name = file_names.name(number, label, data)
        elif chosen.write is not None:
            name = original_name(source, number)
        yield LabeledImage(name, label, data)


def _digested(images: Iterable[LabeledImage], digest: ImageDigest) -> Iterator[LabeledImage]:
    for image in images:
        digest.add(image.label, image.data)
        yield image
