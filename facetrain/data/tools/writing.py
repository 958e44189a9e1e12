"""Writer of datasets: selected images in any format that facetrain writes, with their names, landmarks and card."""

# N images

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from facetrain.data.beside_dataset import LANDMARKS_FILE, SKIPPED_TABLE
from facetrain.data.dataset import FaceDataset
from facetrain.data.dataset_card import ImageDigest, carry_cards
from facetrain.data.formats.image_writers import LabeledImage, write_parquet, write_webdataset
from facetrain.data.formats.labels import require_names
from facetrain.data.formats.landmark_file import write_landmarks
from facetrain.data.formats.record_names import write_name_tables
from facetrain.data.formats.recordio import write_identities
from facetrain.data.identity_counts import count_images
from facetrain.data.images.header import read_header
from facetrain.data.mixture import MixtureDataset
from facetrain.data.skipped_files import SkippedFile, skipped_table
from facetrain.data.tools.file_names import FileNames, folders_are_reordered, unique_name
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.selection import Selection
from facetrain.distinct import distinct
from facetrain.errors import DataError
from facetrain.files import make_folder, new_folder, os_errors_as, require_absent
from facetrain.progress import ProgressCallback, ignore_progress


def write_folders(folder: Path, images: Iterable[LabeledImage], identities: list[str]) -> None:
    """Write a file for each image, in a folder per identity."""
    made = set[Path]()

    def write(image: LabeledImage) -> None:
        path = folder / str(image.name)
        if path.parent not in made:
            path.parent.mkdir(exist_ok=True)  # another thread may make it at the same time
            made.add(path.parent)
        path.write_bytes(image.data)

    # In threads: a network file system takes milliseconds to create a file.
    for _ in map_in_order(write, images):
        pass


@dataclass(frozen=True)
class OutputFormat:
    """Format that datasets are written in."""

    write: Callable[[Path, Iterable[LabeledImage], list[str]], None] | None
    """Takes the output, the images and the names of the identities, no two of them equal. None: RecordIO, whose writer
    needs the counts in advance."""
    needs_names: bool = False
    """Whether every image is named, also one without a name."""
    keeps_order: bool = True
    """Whether readers see the images in the order in which they were written."""
    refuses_names: bool = False
    """Whether readers refuse the names of identities that `require_names` refuses."""


FORMATS = {
    "recordio": OutputFormat(None),
    "webdataset": OutputFormat(write_webdataset, needs_names=True),
    "parquet": OutputFormat(write_parquet, refuses_names=True),
    "folder": OutputFormat(write_folders, needs_names=True, keeps_order=False, refuses_names=True),
}
"""Formats by their names on the command line."""


@dataclass(frozen=True)
class WrittenDataset:
    """Dataset that was written."""

    folder: str
    images: int
    identities: int
    skipped: list[SkippedFile] = field(default_factory=list)
    """Files and images that were left out."""
    empty_identities: int = 0
    """Identities of the source without images: they are left out, and the labels after them are renumbered."""
    lost_identities: list[str] = field(default_factory=list)
    """Names of the identities whose images were all left out; the labels after them are renumbered, too."""
    is_reordered: bool = False
    """Whether a reader numbers the identities in another order, which is that of their folders."""
    without_landmarks: list[str] = field(default_factory=list)
    """Inputs without landmarks; the output then has none."""
    resized: int = 0
    """Images whose size was changed without an alignment."""
    mixture_settings: list[str] = field(default_factory=list)
    """Keys of a mixture that say how its datasets are trained on, and that the output cannot have."""


def write_dataset(
    selection: Selection,
    output: Path,
    *,
    to: str = "recordio",
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write selected images as a new dataset, which appears complete or not at all.

    The images keep their order. Names of images and identities are kept where the source has them, as are landmarks,
    except in a folder of image files, which readers sort by name.

    Args:
        selection: the images.
        output: the folder to write; it must not exist.
        to: a key of `FORMATS`.
        workers: number of threads that read; one per usable core if None.
        progress: called after every image.

    Raises:
        ImageError: an image is empty; or its name has no suffix of an image and its format is unknown.
        DataError: an image cannot be read, or the output exists or cannot be written; or readers of the format refuse
            the name of an identity.
    """
    require_absent(output)
    chosen, source, numbers = FORMATS[to], selection.source, selection.numbers
    names = [source.identity_name(identity) for identity in selection.identities]
    if chosen.write is not None:
        names = _distinct(names)
    if chosen.refuses_names:
        require_names(names, output)
    digest = ImageDigest()
    images = report_progress(_labeled_images(selection, chosen, digest, workers), len(numbers), progress)
    with os_errors_as(DataError, output):
        make_folder(output.parent)
    with new_folder(output) as place:
        if chosen.write is None:
            # The first record has the counts, and `property` one size: both are needed before the images are read.
            first = read_header(selection.read_image(0))
            counts = np.bincount(selection.new_label).tolist()
            labeled = ((image.label, image.data) for image in images)
            write_name_tables(place, numbers, source, names)  # first: it reads a table that may be damaged
            write_identities(place, counts, labeled, min(first.width, first.height) if first else 112)
        else:
            chosen.write(place, images, names)
        skipped = list(source.skipped if selection.skipped is None else selection.skipped)
        if skipped:
            (place / SKIPPED_TABLE).write_text(skipped_table(skipped), encoding="utf-8")
        counted = (len(names), len(numbers))
        # Readers of a folder sort its files: neither a digest nor rows of landmarks would fit their order.
        carry_cards(selection.cards, place, counted, digest if chosen.keeps_order else None)
        if selection.landmarks is not None and chosen.keeps_order:
            write_landmarks(place / LANDMARKS_FILE, selection.landmarks[numbers])
    present = count_images(source)[0]
    # Nor those whose images were all given to another one.
    lost = np.setdiff1d(
        np.setdiff1d(present, selection.identities), distinct(source.labels[numbers])
    ).tolist()
    return WrittenDataset(
        folder=str(output),
        images=len(numbers),
        identities=len(names),
        skipped=skipped,
        is_reordered=not chosen.keeps_order and folders_are_reordered(source, selection.identities),
        empty_identities=source.num_classes - len(present),
        lost_identities=[source.identity_name(identity) for identity in lost],
        without_landmarks=list(selection.without_landmarks),
        mixture_settings=_mixture_settings(source),
    )


def _distinct(names: list[str]) -> list[str]:
    """Return names of identities, the label added to one that is there already: Parquet has each name once."""
    taken = set[str]()
    return [unique_name(name, "", label, taken, ignore_case=False) for label, name in enumerate(names)]


def _mixture_settings(source: FaceDataset) -> list[str]:
    """Return the keys of mixtures in a dataset that say how their datasets are trained on."""
    if not isinstance(source, MixtureDataset):
        return []
    heads = source.heads or ()
    has = {
        "weight": any(weight != 1 for weight in source.weights),
        "heads": source.heads is not None,
        "margin": any(head.margin for head in heads),
        "loss_weight": any(head.loss_weight != 1 for head in heads),
    }
    inner = chain.from_iterable(map(_mixture_settings, source.datasets))
    return list(dict.fromkeys([*(key for key, is_given in has.items() if is_given), *inner]))


def write_parts(
    parts: dict[str, Selection],
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> list[WrittenDataset]:
    """Write several selections as the folders OUTPUT/NAME, which appear together or not at all.

    Raises:
        DataError: an image cannot be read, or the output exists or cannot be written.
    """
    with new_folder(output) as scratch:
        written = [
            write_dataset(part, scratch / name, workers=workers, progress=progress)
            for name, part in parts.items()
        ]
    return [
        # What one part does not have is in another one.
        replace(one, folder=str(output / name), lost_identities=[])
        for name, one in zip(parts, written, strict=True)
    ]


def _labeled_images(
    selection: Selection, chosen: OutputFormat, digest: ImageDigest, workers: int | None
) -> Iterator[LabeledImage]:
    """Yield the images in their order, with unique names if all of them need one, and add them to the digest."""
    source, file_names = selection.source, None
    if chosen.needs_names:
        file_names = FileNames(source, selection.identities, in_shards=chosen.keeps_order)
    for row, data in enumerate(map_in_order(selection.read_image, range(len(selection.numbers)), workers)):
        number, label = int(selection.numbers[row]), int(selection.new_label[row])
        name = None  # RecordIO has tables of names
        if file_names is not None:
            name = file_names.name(number, label, data)
        elif chosen.write is not None:
            name = source.name(number)
        digest.add(label, data)
        yield LabeledImage(name, label, data)
