"""The images of a dataset that may be damaged: every one is asked for itself, and none stops the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.record_index import read_index
from facetrain.data.formats.recordio import RecordReader, decode_record
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import RecordError


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a dataset."""

    kind: str
    """One of the keys of `check.KINDS`."""
    said: str
    """Where, and what was found."""


@dataclass(frozen=True)
class Suspect:
    """An image as it lies there."""

    label: float
    data: bytes


class Suspects(Protocol):
    """A dataset of which nothing is believed."""

    faults: list[Fault]
    """What is wrong with the files as a whole."""
    count: int

    def read(self, number: int) -> Suspect | None:
        """Return an image; None for a record that only describes others. Raises DataError."""

    def location(self, number: int) -> str:
        """Say where it lies."""


class SourceSuspects:
    """Images of a source whose files tell each image's place by themselves."""

    def __init__(self, source: FaceDataset) -> None:
        self._source, self.count = source, source.num_images
        self.faults: list[Fault] = []
        self.location = source.location

    def read(self, number: int) -> Suspect:
        """Return an image."""
        return Suspect(float(self._source.labels[number]), self._source.read(number))


class RecordSuspects:
    """All records that can be found in a .rec: by its index, and by walking through it."""

    def __init__(self, folder: Path) -> None:
        rec_path, idx_path = folder / "train.rec", folder / "train.idx"
        self.faults: list[Fault] = []
        self._reader = RecordReader(rec_path)
        walked = self._walk()
        keys, indexed = self._indexed(rec_path, idx_path) if idx_path.exists() else (walked[:0], walked[:0])
        if idx_path.exists():
            missing = np.setdiff1d(walked, indexed)
            if len(missing):
                self.faults.append(
                    Fault("index", f"{idx_path}: {len(missing):,} of {len(walked):,} records are not in it")
                )
        self._offset = np.union1d(walked, indexed)
        self.count = len(self._offset)
        self._key = np.full(self.count, -1)
        self._key[np.searchsorted(self._offset, indexed)] = keys
        if not idx_path.exists():
            self._key = np.arange(self.count)

    def read(self, number: int) -> Suspect | None:
        """Return an image; None for a record that describes others.

        Raises:
            DataError: no whole record stands there, or it has neither an image nor the form of a description.
        """
        payload = self._reader.read_at(int(self._offset[number]), self._name(number))
        header, data = decode_record(payload, self.location(number))
        if data:
            return Suspect(header.label, data)
        if header.flag:
            return None
        raise RecordError(f"{self.location(number)}: the record has no image")

    def location(self, number: int) -> str:
        """Name the file, the key and the byte."""
        return self._reader.location(int(self._offset[number]), self._name(number))

    def _name(self, number: int) -> int | None:
        key = int(self._key[number])
        return None if key < 0 else key

    def _walk(self) -> np.ndarray:
        found: list[int] = []
        try:
            for offset in self._reader.scan_offsets():
                found.append(offset)
        except RecordError as error:
            self.faults.append(Fault("record", str(error)))
        return np.array(found, dtype=np.int64)

    def _indexed(self, rec_path: Path, idx_path: Path) -> tuple[np.ndarray, np.ndarray]:
        try:
            keys, offsets = read_index(rec_path, idx_path)
        except RecordError as error:
            self.faults.append(Fault("index", str(error)))
            return np.empty(0, np.int64), np.empty(0, np.int64)
        offsets, first = np.unique(offsets, return_index=True)
        if len(offsets) < len(keys):
            twice = len(keys) - len(offsets)
            self.faults.append(
                Fault("index", f"{idx_path}: {twice:,} keys stand for a record of another key")
            )
        keys, inside = keys[first], offsets < self._reader.size
        if not inside.all():
            # One fault, not one for each: of a dataset that is half downloaded, millions are not there.
            lost = int(np.argmin(inside))
            self.faults.append(
                Fault(
                    "record",
                    f"{rec_path}: {int((~inside).sum()):,} records of the index lie past the end of the file, "
                    f"which has {self._reader.size:,} bytes, the first of them key {keys[lost]} at byte "
                    f"{offsets[lost]:,}; the file is cut off, or the index belongs to another: download it again",
                )
            )
        return keys[inside], offsets[inside]


def open_suspects(folder: Path) -> Suspects:
    """Open a dataset of any layout for examination.

    Raises:
        DataError: there is none.
    """
    if (folder / "train.rec").exists():
        return RecordSuspects(folder)
    return SourceSuspects(open_dataset(folder))
