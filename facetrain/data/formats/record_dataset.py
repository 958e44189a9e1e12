"""InsightFace training sets: a folder with train.rec, and optionally train.idx and `property`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import numpy as np

from facetrain.data.beside_dataset import PROPERTY_FILE, TRAINING_SET
from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, files_in
from facetrain.data.formats.record_index import build_catalog
from facetrain.data.formats.record_names import RecordNames
from facetrain.data.formats.recordio import RecordReader, damage_advice, decode_record
from facetrain.errors import DataError, RecordError
from facetrain.files import error_reason, read_regular_text
from facetrain.text import listed, printable

_LEAST_BESIDE = 32
"""Bytes of a record beside its image: frame and header."""
_MOST_PADDING = 3


class RecordDataset(CatalogDataset):
    """Images of a RecordIO file, in the order of its index; the columns are those of `build_catalog`."""

    file_type = RecordReader

    def __init__(self, path: Path, files: Sequence[Path], columns: Columns) -> None:
        super().__init__(path, files, columns)
        keys, announced = columns.arrays["key"], columns.value("announced")
        end = int(keys.max()) + 1 if len(keys) else self._first_key + self.num_images
        # Record 0 stores the key as float32: above 2^24 it is rounded by up to half a unit in the last place.
        if announced is not None and abs(end - announced) > np.spacing(np.float32(announced)) / 2:
            raise DataError(
                f"{files[0]}: record 0 announces images up to key {int(announced) - 1:,}, but the last one is "
                f"{end - 1:,}; {damage_advice(files[0])}"
            )
        # The tables and `property` describe train.rec; other record files in the folder have their own labels.
        self._names = None
        if files[0].name == TRAINING_SET:
            num_labels = self.num_classes
            self.num_classes = _announced_classes(files[0].with_name(PROPERTY_FILE), num_labels)
            self._names = RecordNames(files[0].parent, end - 1, range(num_labels - 1, self.num_classes))

    def _read(self, index: int) -> bytes:
        offsets = self.columns.arrays["offset"]
        offset, expected = offsets.item(index), self.labels.item(index)
        # In most files, the record of image i + 1 follows the record of image i: read exactly up to it.
        size = offsets.item(index + 1) - offset if index + 1 < len(offsets) else 0
        found = self._reader.image_at(offset, size)
        if found is None:  # the record is long, split into parts, or damaged
            payload = self._reader.read_at(offset, self._key(index))
            header, data = decode_record(payload, self._place(index))
            found = header.label, data
        label, image = found
        if label != expected:
            raise DataError(
                f"{self.location(index)}: the label of this record is {label}, but the identity records at "
                f"the end of the file say {expected}; `facetrain data check --repair` writes a clean copy"
            )
        return image

    def sizes(self, index: np.ndarray) -> np.ndarray:
        """Return the ranges of the sizes of B images, int64 (B, 2): a record ends where the next one begins."""
        end_B = self._ends(index)
        record_B = end_B - self.columns.arrays["offset"][index]
        # Identity records may follow the last image.
        least_B = np.where(end_B < self._reader.size, record_B - self._most_beside, 0)
        return np.stack([least_B, record_B - _LEAST_BESIDE], axis=1)

    def name(self, index: int) -> str | None:
        """Return the path that the image had in the packed dataset; None if names.csv does not have it.

        Raises:
            DataError: if names.csv belongs to another file.
        """
        name = None if self._names is None else self._names.image(self._key(index))
        return None if name is None else printable(name)

    def _place(self, index: int) -> str:
        return self._reader.location(int(self.columns.arrays["offset"][index]), self._key(index))

    def _extents(self, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start = self.columns.arrays["offset"][rows]
        return np.zeros(len(start), np.int64), start, self._ends(rows.start + np.arange(len(start)))

    def _ends(self, index: np.ndarray) -> np.ndarray:
        """Return where the record after each of B images begins, or the file ends: int64 (B,)."""
        offset_N, start_N = self.columns.arrays["offset"], self._starts
        after_B = index + 1 if start_N is offset_N else np.searchsorted(start_N, offset_N[index]) + 1
        return np.where(after_B < len(start_N), start_N.take(after_B, mode="clip"), self._reader.size)

    @cached_property
    def _starts(self) -> np.ndarray:
        """First bytes of the images' records in ascending order, int64 (N,): the next image may be anywhere."""
        offset_N = self.columns.arrays["offset"]
        return offset_N if (offset_N[1:] > offset_N[:-1]).all() else np.sort(offset_N)

    def _key(self, index: int) -> int:
        keys = self.columns.arrays["key"]
        return keys.item(index) if len(keys) else self._first_key + index

    def _stored_names(self) -> Iterator[str]:
        return map(printable, self._names.identities() if self._names else ())

    @cached_property
    def _first_key(self) -> int:
        return self.columns.value("first_key")

    @cached_property
    def _most_beside(self) -> int:
        """Most bytes of a record beside its image, if no image has more labels than the first one, or than two."""
        labels = 2
        with suppress(RecordError):  # a damaged image is reported where it is read
            header, _ = decode_record(
                self._reader.read_at(self.columns.arrays["offset"].item(0)), self._place(0)
            )
            labels = max(header.flag, labels)
        return _LEAST_BESIDE + 4 * labels + _MOST_PADDING

    @cached_property
    def _reader(self) -> RecordReader:
        return cast(RecordReader, self.opened(0))


def open_records(path: Path) -> RecordDataset:
    """Open a .rec file, or the train.rec of a folder. Without an .idx, the file is scanned once.

    `property` ("identities,height,width") may announce more identities than there are labels, never fewer.

    Raises:
        DataError: if the file or its index is damaged, or `property` contradicts the labels.
    """
    rec = _records_of(path) if path.is_dir() else path
    idx = rec.with_suffix(".idx")
    columns = cached_columns(catalog_path(rec), [rec, idx], partial(build_catalog, rec, idx))
    return RecordDataset(path, [rec], columns)


FORMAT = Format("RecordIO", open_records, parts=(TRAINING_SET, "*.rec"))


def _records_of(folder: Path) -> Path:
    """Return train.rec, or the only .rec of a folder, as im2rec writes it with any name."""
    found = files_in(folder, (".rec",))
    if len(found) > 1 and folder / TRAINING_SET not in found:
        raise DataError(f"{folder}: has {listed(path.name for path in found)}; give one of the files")
    return folder / TRAINING_SET if len(found) != 1 else found[0]


def _announced_classes(property_path: Path, num_labels: int) -> int:
    """Return the number of identities in `property`, or `num_labels` if there is no such file."""
    try:
        text = read_regular_text(property_path).strip()
    except FileNotFoundError:
        return num_labels
    except OSError as error:
        raise DataError(f"{property_path}: {error_reason(error)}") from error
    first = text.split(",")[0].strip()
    if not re.fullmatch("[0-9]{1,18}", first) or int(first) < num_labels:
        raise DataError(
            f"{property_path}: contains {text[:60]!r}; expected `identities,height,width` with at least the "
            f"{num_labels:,} identities of the labels: correct the file, or remove it to count the identities"
        )
    return int(first)
