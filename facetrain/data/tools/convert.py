"""Conversion of a dataset to another format: same bytes, order and names, and same labels if these have no gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.rewrite import WrittenDataset, write_images
from facetrain.data.tools.unpack import identity_folders, image_suffix, name_inside
from facetrain.data.unique_names import unique_name
from facetrain.errors import DataError, UsageError
from facetrain.files import make_folder, new_file, new_folder, os_errors_as
from facetrain.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class ConvertedDataset(WrittenDataset):
    """Dataset that was converted."""

    empty_identities: int
    """Identities of the source without images: they are left out, and the labels after them are renumbered."""


Writer = Callable[[Path, Iterable[LabeledImage], list[str]], None]


@dataclass(frozen=True)
class OutputFormat:
    """Format that `convert` writes."""

    write: Writer | None
    """None: RecordIO, whose writer needs the counts in advance."""
    suffix: str = ""
    """Suffix of the output if it is one file; empty for a folder."""
    needs_folders: bool = False
    """Whether every image is named IDENTITY/FILE, also one without a name."""
    has_keys: bool = False
    """Whether the name up to its first dot is the key of an image."""


FORMATS = {
    "recordio": OutputFormat(None),
    "webdataset": OutputFormat(write_webdataset, needs_folders=True, has_keys=True),
    "parquet": OutputFormat(write_parquet),
    "lmdb": OutputFormat(write_lmdb, ".lmdb"),
    "zip": OutputFormat(write_zip, ".zip", needs_folders=True),
}
"""Formats by their names on the command line."""


def convert(
    folder: Path,
    output: Path,
    to: str,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> ConvertedDataset:
    """Write a dataset in another format; the output appears complete or not at all.

    The images keep their bytes and their order. Labels are renumbered without gaps. Names of images and identities are
    kept where the source has them, as are landmarks; in webdataset and zip, images are named IDENTITY/FILE.

    Args:
        folder: the dataset.
        output: the folder, .lmdb or .zip file to write; it must not exist.
        to: a key of `FORMATS`.
        workers: number of threads that read; one per usable core if None.
        progress: called after every image.

    Raises:
        UsageError: the output has the wrong suffix.
        ImageError: in webdataset or zip, neither the name nor the bytes of an image are those of an image.
        DataError: the dataset cannot be read, or the output or a file beside it exists or cannot be written.
    """
    chosen = FORMATS[to]
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
    source = open_dataset(folder)
    _, label = np.unique(source.labels, return_inverse=True)
    digest = ImageDigest()
    if chosen.write is None:
        with new_folder(output) as scratch:
            every = np.arange(source.num_images)
            written = write_images(source, every, label, scratch, workers, progress, digest)
            carry_cards([folder], output, scratch, written, digest)
        return ConvertedDataset(str(output), *written, source.num_classes - written[0])
    images = report_progress(_images(source, label, chosen, workers), source.num_images, progress)
    identities = [identity_name(source, old) for old in np.unique(source.labels).tolist()]
    with os_errors_as(DataError, output):
        make_folder(output.parent)
    with new_file(output, DataError) if chosen.suffix else new_folder(output) as scratch:
        chosen.write(scratch, _digested(images, digest), identities)
        carry_cards([folder], output, scratch, (len(identities), source.num_images), digest)
        if (landmarks_N52 := image_landmarks(source)) is not None:
            inside = scratch / LANDMARKS_FILE if scratch.is_dir() else landmarks_path(output)
            write_landmarks(inside, landmarks_N52)
    return ConvertedDataset(
        str(output), len(identities), source.num_images, source.num_classes - len(identities)
    )


def _digested(images: Iterable[LabeledImage], digest: ImageDigest) -> Iterator[LabeledImage]:
    for image in images:
        digest.add(image.label, image.data)
        yield image


def _images(
    source: FaceDataset, label: np.ndarray, chosen: OutputFormat, workers: int | None
) -> Iterator[LabeledImage]:
    """Yield the images in order, with unique names if all of them need one."""
    named = _NamesInFolders(source, chosen.has_keys) if chosen.needs_folders else None
    for number, data in enumerate(map_in_order(source.read, range(len(label)), workers)):
        name = original_name(source, number) if named is None else named.name(number, data)
        yield LabeledImage(name, int(label[number]), data)


class _NamesInFolders:
    """Names IDENTITY/FILE of the images of a dataset, given in their order."""

    def __init__(self, source: FaceDataset, has_keys: bool) -> None:
        self._source, self._has_keys = source, has_keys
        self._folders, self._taken = identity_folders(source), set[str]()
        self._digits = len(str(source.num_images - 1))

    def name(self, number: int, data: bytes) -> str:
        """Return the name of an image; it ends with a suffix by which readers know an image."""
        digits = f"{number:0{self._digits}d}"
        file = name_inside((original_name(self._source, number) or digits).rpartition("/")[2])
        stem, suffix = file, Path(file).suffix
        if suffix.lower() in IMAGE_SUFFIXES:
            stem = file.removesuffix(suffix)
        else:
            suffix = image_suffix(self._source, number, data)
        folder = self._folders[int(self._source.labels[number])]
        if self._has_keys:
            # The suffix is no part of the key, and the key ends at the first dot.
            return unique_name(f"{folder}/{stem.replace('.', '_')}", "", digits, self._taken) + suffix
        return unique_name(f"{folder}/{stem}", suffix, digits, self._taken)
