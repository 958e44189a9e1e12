"""InsightFace training sets: a folder with train.rec, and optionally train.idx and `property`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np

from facetrain.data.formats.record_index import load_catalog
from facetrain.data.formats.record_names import RecordNames
from facetrain.data.formats.recordio import RecordReader, decode_record
from facetrain.errors import DataError
from facetrain.files import error_reason, read_regular_text


class RecordDataset:
    """Images of a RecordIO file, in the order of its index.

    Without an .idx, the file is scanned once. `property` ("identities,height,width") may announce more
    identities than there are labels, never fewer.

    Raises:
        DataError: if the file or its index is damaged, or `property` contradicts the labels.
    """

    def __init__(self, folder: Path, *, name: str = "train.rec") -> None:
        path = folder / name
        self._catalog = load_catalog(path, path.with_suffix(".idx"))
        self._reader = RecordReader(path)
        self._names = RecordNames(folder) if name == "train.rec" else None
        self._check_announced_count()
        num_labels = int(self.labels.max()) + 1
        # `property` describes train.rec; other record files in the folder have their own labels.
        self.num_classes = (
            _announced_classes(folder / "property", num_labels) if name == "train.rec" else num_labels
        )

    @property
    def num_images(self) -> int:
        """Number of records with an image."""
        return len(self._catalog.label)

    @property
    def labels(self) -> np.ndarray:
        """Identity of every image: int32 (num_images,), memory-mapped from the catalog file."""
        return self._catalog.label

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            DataError: if the record is damaged, or its label differs from the catalog's.
        """
        offsets = self._catalog.offset
        offset, expected = offsets.item(index), self._catalog.label.item(index)
        # In most files, the record of image i + 1 follows that of image i: read exactly up to it.
        size = offsets.item(index + 1) - offset if index + 1 < len(offsets) else 0
        label, image = self._reader.image_at(offset, size) or self._read_any_record(index)
        if label != expected:
            raise DataError(
                f"{self.location(index)}: the label of this record is {label}, but the identity records at "
                f"the end of the file say {expected}; `facetrain data check --repair` writes a clean copy"
            )
        return image

    def _read_any_record(self, index: int) -> tuple[float, bytes]:
        """Read a record that the fast path refuses: long, split into parts, or damaged."""
        payload = self._reader.read_at(self._catalog.offset.item(index), self._catalog.key(index))
        header, image = decode_record(payload, self.location(index))
        return header.label, image

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read the part of the file that holds these images."""
        offset = self._catalog.offset[first : first + count]
        self._reader.prefetch_bytes(int(offset.min()), int(offset.max() - offset.min()) + 1)

    def location(self, index: int) -> str:
        """Return the file, the key and the byte offset, and the name of the image that was packed."""
        place = self._reader.location(int(self._catalog.offset[index]), self._catalog.key(index))
        with contextlib.suppress(
            DataError
        ):  # a message about the image is worth more than one about its name
            if (name := self.name(index)) is not None:
                place += f" ({name})"
        return place

    def name(self, index: int) -> str | None:
        """Return the path that the image had in the packed dataset; None if names.csv does not have it.

        Raises:
            DataError: if names.csv belongs to another file.
        """
        return None if self._names is None else self._names.image(self._catalog.key(index))

    def identity_name(self, label: int) -> str:
        """Return the name that identities.csv has for an identity, or its number."""
        return (self._names and self._names.identity(label)) or str(label)

    def _check_announced_count(self) -> None:
        announced, found = self._catalog.announced_end, self._catalog.end_key
        # Record 0 stores the key as float32: above 2^24 it is rounded by up to half a unit in the last place.
        if announced is not None and abs(found - announced) > np.spacing(np.float32(announced)):
            raise DataError(
                f"{self._reader.path}: record 0 announces images up to key {int(announced) - 1:,}, but the "
                f"last one is {found - 1:,}; the file or its index is incomplete: download it again, or "
                "remove the .idx"
            )


def _announced_classes(property_path: Path, num_labels: int) -> int:
    """Return the number of identities in `property`, or `num_labels` if there is no such file."""
    try:
        text = read_regular_text(property_path).strip()
    except FileNotFoundError:
        return num_labels
    except OSError as error:
        raise DataError(f"{property_path}: {error_reason(error)}") from error
    first = text.split(",")[0].strip()
    if not re.fullmatch("[0-9]{1,18}", first):
        raise DataError(f"{property_path}: contains {text[:60]!r}; expected `identities,height,width`")
    if int(first) < num_labels:
        raise DataError(
            f"{property_path}: announces {int(first):,} identities, but there are labels up to "
            f"{num_labels - 1:,}; correct the file, or remove it to count the identities"
        )
    return int(first)
