"""Records of a `.rec` that may be damaged: each on its own, so that a damaged one does not hide the others."""

# N records

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.formats.record_index import read_index
from facetrain.data.formats.record_names import RecordNames
from facetrain.data.formats.recordio import RecordReader, decode_record
from facetrain.errors import DataError, RecordError


@dataclass(frozen=True)
class DataFault:
    """Fault of a dataset."""

    kind: str
    """A key of `check.FAULT_KINDS`."""
    message: str
    """Location and description."""


def is_record_file(path: Path) -> bool:
    """Return whether a dataset is a folder with train.rec, or a .rec file."""
    return (path / "train.rec").exists() or (path.suffix == ".rec" and path.is_file())


class DamagedRecords:
    """Dataset of all records of a .rec: those that its index lists, and those that a scan of the file finds.

    The scan stops at a damaged record, and the index may lack records; together they find what can be read.
    """

    num_classes = 2**31
    """Bound of the labels, which are known only when the records have been read."""

    def __init__(self, path: Path) -> None:
        """Open a .rec file, or the train.rec of a folder."""
        self._path = path / "train.rec" if path.is_dir() else path
        idx_path = self._path.with_suffix(".idx")
        self.faults: list[DataFault] = []
        """Faults of the files as a whole."""
        self._reader = RecordReader(self._path)
        # The tables of names belong to train.rec; other record files in the folder have their own images.
        self._names = RecordNames(self._path.parent) if self._path.name == "train.rec" else None
        self._offset_N = scanned = self._scan()
        self._key_N = np.arange(len(scanned))
        if idx_path.exists():
            key, indexed = self._read_index(idx_path)
            missing = np.setdiff1d(scanned, indexed)
            if len(missing):
                self._add_fault(
                    "index",
                    f"{idx_path}: {len(missing):,} of {len(scanned):,} records are not in the index; remove it: "
                    "facetrain reads a .rec without an index",
                )
            self._offset_N = np.union1d(scanned, indexed)
            self._key_N = np.full(len(self._offset_N), -1)
            self._key_N[np.searchsorted(self._offset_N, indexed)] = key
        self.num_images = len(self._offset_N)
        """Number of records, including those that describe other records."""
        self.labels = np.zeros(self.num_images, np.int64)
        """Labels of the records that were checked; 0 before."""

    def stored(self, number: int) -> tuple[float, bytes] | None:
        """Return the label and the bytes of an image, unchecked; None for a record that describes other records.

        Raises:
            DataError: the record is damaged or has no image.
        """
        payload = self._reader.read_at(int(self._offset_N[number]), self._key(number))
        header, data = decode_record(payload, self.location(number))
        if data:
            return header.label, data
        if header.flag:
            return None
        raise RecordError(f"{self.location(number)}: the record has no image")

    def read(self, index: int) -> bytes:
        """Return the bytes of an image that was checked."""
        stored = self.stored(index)
        if stored is None:
            raise DataError(f"{self.location(index)}: the record changed during the check; run it again")
        return stored[1]

    def location(self, index: int) -> str:
        """Return the file, the key and the byte offset, and the name of the image that was packed."""
        place = self._reader.location(int(self._offset_N[index]), self._key(index))
        name = self.name(index)
        return place if name is None else f"{place} ({name})"

    def name(self, index: int) -> str | None:
        """Return the path that the image had in the packed dataset; None if names.csv does not have it."""
        key = self._key(index)
        with contextlib.suppress(DataError):  # a table of another file is no fault of the images
            return None if key is None or self._names is None else self._names.image(key)
        return None

    def identity_name(self, label: int) -> str:
        """Return the name that identities.csv has for an identity, or its number."""
        with contextlib.suppress(DataError):
            names = self._names.identities if self._names else []
            return names[label] if 0 <= label < len(names) else str(label)
        return str(label)

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

    def _read_index(self, idx_path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and distinct ascending offsets inside the file, int64 each."""
        try:
            keys, offsets = read_index(self._path, idx_path)
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
                f"{self._path}: {int((~inside).sum()):,} records of the index are past the end of the file, which has "
                f"{self._reader.size:,} bytes; the first of them is key {keys[lost]} at byte {offsets[lost]:,}; the "
                "file is truncated, or the index belongs to another file: download it again",
            )
        return keys[inside], offsets[inside]
