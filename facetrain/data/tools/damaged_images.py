"""Fault-tolerant readers: each image of a dataset on its own, so that a damaged one does not hide the others."""

# N records

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from facetrain.data.dataset import identity_name, image_landmarks, original_name
from facetrain.data.formats.landmark_file import landmarks_path
from facetrain.data.formats.record_dataset import open_records
from facetrain.data.formats.record_index import read_index
from facetrain.data.formats.record_names import RecordNames
from facetrain.data.formats.recordio import RecordReader, decode_record
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError, RecordError


@dataclass(frozen=True)
class DataFault:
    """Fault of a dataset."""

    kind: str
    """A key of `check.FAULT_KINDS`."""
    message: str
    """Location and description."""


@dataclass(frozen=True)
class StoredImage:
    """Label and bytes of an image as they are stored, unchecked."""

    label: float
    data: bytes


class TolerantReader(Protocol):
    """Reader of a dataset that may be damaged."""

    faults: list[DataFault]
    """Faults of the files as a whole."""
    count: int
    """Number of records, including those that describe other records."""

    def read(self, number: int) -> StoredImage | None:
        """Return an image; None for a record that describes other records. Raises DataError."""

    def location(self, number: int) -> str:
        """Return the location of a record for messages."""

    def name(self, number: int) -> str | None:
        """Return the path that the image had in the packed dataset; None if it is unknown."""

    def identity_name(self, label: int) -> str:
        """Return the name of an identity, or its number."""

    def landmarks(self) -> np.ndarray | None:
        """Return the landmarks of every record, float32 (count, 5, 2), NaN for one without; None without a file.

        Raises:
            DataError: the landmark file does not fit, or the dataset is so damaged that its rows cannot be assigned.
        """


class TolerantDatasetReader:
    """Reader for formats with one file or one shard entry per image, in which one damaged image affects no other."""

    def __init__(self, path: Path) -> None:
        # A landmark file that does not fit is a separate fault: `check` opens the dataset as training does.
        source = open_dataset(path, with_landmarks=False)
        self._path, self._source, self.count = path, source, source.num_images
        self.faults: list[DataFault] = []
        self.location = source.location

    def read(self, number: int) -> StoredImage:
        """Return an image."""
        return StoredImage(float(self._source.labels[number]), self._source.read(number))

    def name(self, number: int) -> str | None:
        """Return the path of the image inside the dataset."""
        return original_name(self._source, number)

    def identity_name(self, label: int) -> str:
        """Return the name of an identity, or its number."""
        return identity_name(self._source, label)

    def landmarks(self) -> np.ndarray | None:
        """Return the landmarks of every image; None without landmarks."""
        return image_landmarks(open_dataset(self._path))


class TolerantRecordReader:
    """Reader of all records of a .rec: those that its index lists, and those that a scan of the file finds.

    The scan stops at a damaged record, and the index may lack records; together they find what can be read.
    """

    def __init__(self, path: Path) -> None:
        """Open a .rec file, or the train.rec of a folder."""
        rec_path = path / "train.rec" if path.is_dir() else path
        idx_path = rec_path.with_suffix(".idx")
        self._path, self._paths = path, (rec_path, idx_path)
        self.faults: list[DataFault] = []
        self._reader = RecordReader(rec_path)
        # The tables of names belong to train.rec; other record files in the folder have their own images.
        self._names = RecordNames(rec_path.parent) if rec_path.name == "train.rec" else None
        scanned = self._scan()
        if idx_path.exists():
            key, indexed = self._read_index(rec_path, idx_path)
            missing = np.setdiff1d(scanned, indexed)
            if len(missing):
                self._add_fault(
                    "index",
                    f"{idx_path}: {len(missing):,} of {len(scanned):,} records are not in the index; rebuild it with "
                    "`facetrain data index --overwrite`",
                )
            self._offset_N = np.union1d(scanned, indexed)
            self._key_N = np.full(len(self._offset_N), -1)
            self._key_N[np.searchsorted(self._offset_N, indexed)] = key
        else:
            self._offset_N, self._key_N = scanned, np.arange(len(scanned))
        self.count = len(self._offset_N)

    def read(self, number: int) -> StoredImage | None:
        """Return an image; None for a record that describes other records.

        Raises:
            DataError: the record is damaged or has no image.
        """
        payload = self._reader.read_at(int(self._offset_N[number]), self._key(number))
        header, data = decode_record(payload, self.location(number))
        if data:
            return StoredImage(header.label, data)
        if header.flag:
            return None
        raise RecordError(f"{self.location(number)}: the record has no image")

    def location(self, number: int) -> str:
        """Return the file, the key and the byte offset, and the name of the image that was packed."""
        place = self._reader.location(int(self._offset_N[number]), self._key(number))
        name = self.name(number)
        return place if name is None else f"{place} ({name})"

    def name(self, number: int) -> str | None:
        """Return the path that the image had in the packed dataset; None if names.csv does not have it."""
        key = self._key(number)
        with contextlib.suppress(DataError):  # a table of another file is no fault of the images
            return None if key is None or self._names is None else self._names.image(key)
        return None

    def identity_name(self, label: int) -> str:
        """Return the name that identities.csv has for an identity, or its number."""
        with contextlib.suppress(DataError):
            return (self._names and self._names.identity(label)) or str(label)
        return str(label)

    def landmarks(self) -> np.ndarray | None:
        """Return the landmarks of every record; NaN for one that the index lacks."""
        if not landmarks_path(self._path).is_file():
            return None
        landmarks_N52 = image_landmarks(open_dataset(self._path))
        if landmarks_N52 is None:
            return None
        # The rows are in the order of the index, the records in the order of the file.
        of_records = np.full((self.count, *landmarks_N52.shape[1:]), np.nan, np.float32)
        of_records[np.searchsorted(self._offset_N, open_records(self._paths[0]).columns.arrays["offset"])] = (
            landmarks_N52
        )
        return of_records

    def _key(self, number: int) -> int | None:
        key = int(self._key_N[number])
        return None if key < 0 else key

    def _add_fault(self, kind: str, message: str) -> None:
        self.faults.append(DataFault(kind, message))

    def _scan(self) -> np.ndarray:
        """Return the offsets of the records before the first damaged one, ascending int64."""
        offsets: list[int] = []
        try:
            for offset in self._reader.scan_offsets():
                offsets.append(offset)
        except RecordError as error:
            self._add_fault("record", str(error))
        return np.array(offsets, dtype=np.int64)

    def _read_index(self, rec_path: Path, idx_path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and distinct ascending offsets inside the file, int64 each."""
        try:
            keys, offsets = read_index(rec_path, idx_path)
        except RecordError as error:
            self._add_fault("index", str(error))
            return np.empty(0, np.int64), np.empty(0, np.int64)
        offsets, first = np.unique(offsets, return_index=True)
        if len(offsets) < len(keys):
            repeated = len(keys) - len(offsets)
            self._add_fault("index", f"{idx_path}: {repeated:,} keys point to the record of another key")
        keys, inside = keys[first], offsets < self._reader.size
        if not inside.all():
            # One fault for all of them: a dataset that is half downloaded can lack millions.
            lost = int(np.argmin(inside))
            self._add_fault(
                "record",
                f"{rec_path}: {int((~inside).sum()):,} records of the index are past the end of the file, which has "
                f"{self._reader.size:,} bytes; the first of them is key {keys[lost]} at byte {offsets[lost]:,}; the "
                "file is truncated, or the index belongs to another file: download it again",
            )
        return keys[inside], offsets[inside]


def open_tolerant(path: Path) -> TolerantReader:
    """Open a dataset of any format that may be damaged.

    Raises:
        DataError: there is no dataset.
    """
    if (path / "train.rec").exists() or (path.suffix == ".rec" and path.is_file()):
        return TolerantRecordReader(path)
    return TolerantDatasetReader(path)
