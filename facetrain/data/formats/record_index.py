"""Which record holds which image of whom: built from .idx and the records' headers once, then kept.

The catalog of 42 million images is a file of an int64 and an int32 column that is mapped into
memory, so that all processes of a machine share one copy and opening it takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from facetrain.data.column_cache import Columns, load_columns, save_columns
from facetrain.data.formats.identity_records import labels_by_ranges
from facetrain.data.formats.record_headers import Headers, read_headers
from facetrain.data.formats.recordio import RecordReader
from facetrain.errors import RecordError

_ROWS_AT_ONCE = 1 << 19
_CHUNK = 1 << 23
_MOST = 1 << 53
_REBUILD = "remove it, and it will be rebuilt from the .rec"


class Catalog:
    """The images of a RecordIO file, in the order of the index, as MXNet reads them."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._attach()

    def _attach(self) -> None:
        self.offset = self._columns.arrays["offset"]
        """int64 (images,): where in the .rec."""
        self.label = self._columns.arrays["label"]
        """int32 (images,): whose."""
        self._key = self._columns.arrays["key"]
        self._first_key = int(self._columns.facts["first_key"])
        self.announced_end: float | None = self._columns.facts["announced"]
        """The key past the images, as record 0 says it in float32; None where there is no such record."""

    def key(self, number: int) -> int:
        """Return the key of an image."""
        return int(self._key[number]) if len(self._key) else self._first_key + number

    @property
    def end_key(self) -> int:
        """The key after the greatest one of an image."""
        if len(self._key):
            return int(self._key.max()) + 1
        return self._first_key + len(self.offset)

    def __getstate__(self) -> Columns:
        """Travel to another process as columns, which know how to."""
        return self._columns

    def __setstate__(self, columns: Columns) -> None:
        """Arrive there."""
        self._columns = columns
        self._attach()


def load_catalog(rec_path: Path, idx_path: Path) -> Catalog:
    """Read or build the catalog; it is kept beside the .rec, or in ~/.cache where that folder is read-only.

    Raises:
        RecordError: the index or a record's header is wrong.
    """
    name, sources = rec_path.with_name(f".{rec_path.stem}.catalog"), [rec_path, idx_path]
    columns = load_columns(name, sources)
    if columns is None:
        columns = save_columns(name, sources, *_build(rec_path, idx_path))
    return Catalog(columns)


def read_index(rec_path: Path, idx_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and offsets, int64 (N,), in the order of the .idx; without one, by a walk through the .rec.

    Raises:
        RecordError: a line of the index is not "key, tab, offset", or a key stands twice.
    """
    if not idx_path.exists():
        offsets = np.fromiter(RecordReader(rec_path).scan_offsets(), dtype=np.int64)
        return np.arange(len(offsets), dtype=np.int64), offsets
    with idx_path.open("rb") as file:
        count = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b"")) + 1
    keys, offsets = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    filled = 0
    for numbers in _numbers(idx_path):
        keys[filled : filled + len(numbers)], offsets[filled : filled + len(numbers)] = numbers.T
        filled += len(numbers)
    keys, offsets = keys[:filled], offsets[:filled]
    if not _ascending(keys) and len(np.unique(keys)) != len(keys):
        raise RecordError(f"{idx_path}: a key stands more than once; {_REBUILD}")
    return keys, offsets


def _numbers(path: Path) -> Iterator[np.ndarray]:
    """Yield int64 (lines, 2) of stretches of an index, so that its text is never held whole."""
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            yield _parse(lines + newline, path)
            if len(rest) > 100:
                raise RecordError(f"{path}: a line of more than 100 bytes is no `key<tab>offset`; {_REBUILD}")
    yield _parse(rest, path)


def _parse(text: bytes, path: Path) -> np.ndarray:
    text = text.replace(b"\r", b"").strip()
    if not text:
        return np.empty((0, 2), dtype=np.int64)
    letters = np.frombuffer(text, dtype=np.uint8)
    between = letters[(letters == 9) | (letters == 10)]
    strange = text.translate(None, b"0123456789\t\n")
    if strange or len(between) % 2 == 0 or (between[0::2] != 9).any() or (between[1::2] != 10).any():
        raise RecordError(
            f"{path}: not an index of lines `key<tab>offset`"
            + (f" (it holds {strange[:20]!r})" if strange else "")
            + f"; {_REBUILD}"
        )
    numbers = np.fromstring(text, dtype=np.int64, sep=" ")
    if len(numbers) != len(between) + 1:
        raise RecordError(f"{path}: some of its lines do not hold two numbers each; {_REBUILD}")
    if numbers.max() >= _MOST:
        raise RecordError(f"{path}: the number {numbers.max()} is no key and no offset; {_REBUILD}")
    return np.asarray(numbers).reshape(-1, 2)


def _build(rec_path: Path, idx_path: Path) -> tuple[dict[str, np.ndarray], dict[str, float | int | None]]:
    keys, offsets = read_index(rec_path, idx_path)
    if not len(keys):
        raise RecordError(f"{rec_path}: holds no records")
    reader = RecordReader(rec_path)
    first = read_headers(reader, offsets[:1], keys[:1])
    announced = None if first.image_bytes[0] else float(first.label[0])
    label = labels_by_ranges(reader, keys, offsets) if announced is not None and _ascending(keys) else None
    if label is not None:
        keys, offsets = keys[1 : len(label) + 1], offsets[1 : len(label) + 1]
    else:
        label, images = _labels_by_records(reader, keys, offsets)
        keys, offsets = keys[images], offsets[images]
    if not len(keys):
        raise RecordError(f"{rec_path}: holds no images")
    facts = {"announced": announced, "first_key": int(keys[0])}
    consecutive = int(keys[-1]) - int(keys[0]) == len(keys) - 1 and _ascending(keys)
    return {"offset": offsets, "label": label, "key": keys[:0] if consecutive else keys}, facts


def _labels_by_records(
    reader: RecordReader, keys: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels, int32, of the records with an image, and which of all records these are: bool."""
    # A record without an image is one that describes others: record 0, and one per identity.
    # Going by that, and not by the ranges that record 0 names, holds above 2^24 images too, where
    # its float32 numbers are rounded.
    label, images = np.empty(len(keys), dtype=np.int32), np.empty(len(keys), dtype=bool)
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        headers = read_headers(reader, offsets[rows], keys[rows])
        images[rows] = headers.image_bytes > 0
        _check_labels(reader, headers, keys[rows], offsets[rows])
        label[rows] = np.where(images[rows], headers.label, 0)
    return label[images], images


def _check_labels(reader: RecordReader, headers: Headers, keys: np.ndarray, offsets: np.ndarray) -> None:
    label = headers.label
    right = np.isfinite(label) & (label >= 0) & (label < 2**31) & (label == np.floor(label))
    wrong = ~right & (headers.image_bytes > 0)
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise RecordError(
            f"{reader.location(int(offsets[bad]), int(keys[bad]))}: the label {label[bad]} is not a whole "
            "number "
            f"from 0 to 2^31 ({int(wrong.sum()):,} such labels near it); `facetrain data check` lists them "
            "all"
        )


def _ascending(keys: np.ndarray) -> bool:
    return all(
        (
            keys[start + 1 : start + 1 + _ROWS_AT_ONCE]
            > keys[start : start + _ROWS_AT_ONCE][: len(keys) - 1 - start]
        ).all()
        for start in range(0, len(keys) - 1, _ROWS_AT_ONCE)
    )
