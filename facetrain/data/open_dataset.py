"""Where images and their identities come from, behind one small interface."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.dataset import IMAGE_SUFFIXES, FaceDataset, SubsetDataset
from facetrain.data.formats.image_list import LIST_SUFFIXES, ListDataset
from facetrain.data.formats.parquet import ParquetDataset
from facetrain.data.formats.record_index import load_catalogue
from facetrain.data.formats.recordio import RecordReader, decode_record
from facetrain.data.formats.webdataset import TarDataset
from facetrain.data.mixture import MIXTURE_SUFFIXES, open_mixture
from facetrain.errors import DataError

__all__ = ["FaceDataset", "FolderDataset", "RecordDataset", "SubsetDataset", "check_counts", "open_dataset"]


class RecordDataset:
    """A folder with train.rec and, where it need not be rebuilt, train.idx; and maybe `property`."""

    def __init__(self, folder: Path, *, name: str = "train.rec") -> None:
        """Open the folder's records, or those of another name in it."""
        path = folder / name
        self._catalogue = load_catalogue(path, path.with_suffix(".idx"))
        self._reader = RecordReader(path)
        self._check_announced()
        counted = int(self.labels.max()) + 1
        # The file beside says what train.rec holds, and nothing of other records there.
        self.num_classes = _agreed_classes(folder / "property", counted) if name == "train.rec" else counted

    @property
    def num_images(self) -> int:
        """How many records hold an image."""
        return len(self._catalogue.label)

    @property
    def labels(self) -> np.ndarray:
        """The identity of every image: int32 (num_images,), mapped from a file where there is one."""
        return self._catalogue.label

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded.

        Raises:
            DataError: no whole record stands there, or its label is not the catalogue's.
        """
        offsets = self._catalogue.offset
        offset, expected = offsets.item(number), self._catalogue.label.item(number)
        # In most files the next image's record comes next: so much is read, and nothing behind it.
        size = offsets.item(number + 1) - offset if number + 1 < len(offsets) else 0
        label, image = self._reader.image_at(offset, size) or self._unusual(number)
        if label != expected:
            raise DataError(
                f"{self.where(number)}: the label of this record is {label}, the identity records at "
                f"the end say {expected}; `facetrain data check --repair` writes a clean copy"
            )
        return image

    def _unusual(self, number: int) -> tuple[float, bytes]:
        offset = self._catalogue.offset.item(number)
        payload = self._reader.read_at(offset, self._catalogue.key(number))
        header, image = decode_record(payload, self.where(number))
        return header.label, image

    def prefetch(self, first: int, count: int) -> None:
        """Have the system fetch the stretch that holds these images."""
        offset = self._catalogue.offset[first : first + count]
        self._reader.will_read(int(offset.min()), int(offset.max() - offset.min()) + 1)

    def where(self, number: int) -> str:
        """Name the file, the key and the byte."""
        return self._reader.where(int(self._catalogue.offset[number]), self._catalogue.key(number))

    def _check_announced(self) -> None:
        announced, found = self._catalogue.announced, self._catalogue.past_key
        # Record 0 speaks in float32: above 2^24 it may be off by half the distance of two such numbers.
        if announced is not None and abs(found - announced) > np.spacing(np.float32(announced)):
            raise DataError(
                f"{self._reader.path}: record 0 announces images up to key {int(announced) - 1:,}, the last "
                "one "
                f"is {found - 1:,}; the file or its index is not whole: download it again, or remove the .idx"
            )


class FolderDataset:
    """A folder with one subfolder of images per identity, numbered in the order of their names."""

    def __init__(self, folder: Path) -> None:
        self.names = sorted(
            entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
        )
        files = [(label, path) for label, name in enumerate(self.names) for path in _images(folder / name)]
        if not files:
            raise DataError(
                f"{folder}: holds neither train.rec nor images in one subfolder per identity "
                f"({', '.join(sorted(IMAGE_SUFFIXES))})"
            )
        self._paths = [path for _, path in files]
        self.labels = np.array([label for label, _ in files], dtype=np.int64)
        self.num_images = len(files)
        self.num_classes = len(self.names)

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded."""
        try:
            return self._paths[number].read_bytes()
        except OSError as error:
            raise DataError(f"{self._paths[number]}: {error.strerror or error}") from error

    def name(self, number: int) -> str:
        """Return an image's path below the folder."""
        return f"{self._paths[number].parent.name}/{self._paths[number].name}"

    def where(self, number: int) -> str:
        """Name the file."""
        return str(self._paths[number])


def open_dataset(path: Path, *, min_images_per_identity: int = 1, root: Path | None = None) -> FaceDataset:
    """Open a dataset of any layout that is known: a folder, a list file, or a YAML file that mixes several.

    The paths of a list file begin at `root`, or at the list's own folder.

    Raises:
        DataError: there is no such folder, it holds no dataset, or the dataset contradicts itself.
    """
    path = Path(path)
    if path.suffix in MIXTURE_SUFFIXES and path.is_file():
        return open_mixture(
            path, open_dataset, lambda part, where: with_enough(part, where, min_images_per_identity)
        )
    source = ListDataset(path, root) if _is_list(path) else _open_folder(path)
    return with_enough(source, path, min_images_per_identity)


def with_enough(source: FaceDataset, path: Path, min_images_per_identity: int) -> FaceDataset:
    """Return the identities of the source at `path` that have so many images.

    Raises:
        DataError: there are none.
    """
    if min_images_per_identity == 1:
        return source
    counts = np.bincount(source.labels, minlength=source.num_classes)
    enough = np.flatnonzero(counts >= min_images_per_identity)
    if not len(enough):
        raise DataError(
            f"{path}: no identity has {min_images_per_identity} images or more; the most is {counts.max():,}"
        )
    return source if len(enough) == source.num_classes else SubsetDataset(source, enough)


def _is_list(path: Path) -> bool:
    return path.suffix.lower() in LIST_SUFFIXES and path.is_file()


def _open_folder(folder: Path) -> FaceDataset:
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder; data.train names a folder with train.rec, with one subfolder per "
            "identity, with .tar or .parquet shards, a list file, or a YAML file that mixes datasets"
        )
    if (folder / "train.rec").exists():
        return RecordDataset(folder)
    if any(folder.glob("*.tar")):
        return TarDataset(folder)
    if any(folder.glob("*.parquet")):
        return ParquetDataset(folder)
    return FolderDataset(folder)


def check_counts(
    source: FaceDataset, folder: Path, *, num_classes: int | None, num_images: int | None
) -> None:
    """Compare a source with what a config says of it.

    Raises:
        DataError: they disagree.
    """
    for name, given, found in (
        ("num_classes", num_classes, source.num_classes),
        ("num_images", num_images, source.num_images),
    ):
        if given is not None and given != found:
            raise DataError(
                f"data.{name} is {given:,}, and {folder} holds {found:,}; correct the number, leave it out, "
                "or look whether this is the right dataset"
            )


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _agreed_classes(property_path: Path, counted: int) -> int:
    if not property_path.exists():
        return counted
    text = property_path.read_text(encoding="utf-8", errors="replace").strip()
    first = text.split(",")[0].strip()
    if not first.isdigit():
        raise DataError(f"{property_path}: holds {text[:60]!r}, not `identities,height,width`")
    if int(first) < counted:
        raise DataError(
            f"{property_path}: says {int(first):,} identities, and there are labels up to {counted - 1:,}; "
            "correct it, or remove it to have the identities counted"
        )
    return int(first)
