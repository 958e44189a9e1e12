"""Which record holds which image of whom: built from .idx and the records' headers once, then kept.

The catalogue of 42 million images is a file of three int64 columns that is mapped into memory, so
that all ranks of a machine share one copy and opening it takes no time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.recordio import RecordReader, decode_record, read_headers
from facetrain.errors import RecordError

_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Catalogue:
    """The images of a RecordIO file, in the order of their keys; int64 columns of one length."""

    key: np.ndarray
    offset: np.ndarray
    label: np.ndarray
    announced: tuple[float, float] | None
    """What record 0 says, where there is such a record: past the images, past the identity records."""


def load_catalogue(rec_path: Path, idx_path: Path) -> Catalogue:
    """Read or build the catalogue; it is kept beside the .rec where that folder can be written.

    The order of images is that of the index, as MXNet reads them.

    Raises:
        RecordError: the index or a record's header is wrong.
    """
    cache = _cache_path(rec_path, idx_path)
    if cache.exists():
        kept = _read_cache(cache)
        if kept is not None:
            return kept
    catalogue = _build(rec_path, idx_path)
    _write_cache(cache, catalogue)
    return catalogue


def read_index(rec_path: Path, idx_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and offsets, int64 (N,); without an .idx, by walking through the .rec.

    Raises:
        RecordError: a line of the index is not "key, tab, offset", or a key stands twice.
    """
    if not idx_path.exists():
        reader = RecordReader(rec_path)
        offsets = np.fromiter(reader.scan_offsets(), dtype=np.int64)
        reader.close()
        return np.arange(len(offsets), dtype=np.int64), offsets
    text = idx_path.read_bytes()
    lines = text.count(b"\n") + (not text.endswith(b"\n") and bool(text.strip()))
    try:
        numbers = np.array(text.split(), dtype=np.int64) if lines < 1000 else _parse_numbers(text)
    except (ValueError, OverflowError, DeprecationWarning) as error:
        raise RecordError(f"{idx_path}: not an index of lines `key<tab>offset` ({error})") from error
    if len(numbers) != 2 * lines:
        raise RecordError(
            f"{idx_path}: {lines:,} lines hold {len(numbers):,} numbers, not two each; "
            "remove it, and it will be rebuilt from the .rec"
        )
    keys, offsets = numbers[0::2].copy(), numbers[1::2].copy()
    if np.any(np.diff(keys) <= 0) and len(np.unique(keys)) != len(keys):
        raise RecordError(
            f"{idx_path}: a key stands more than once; remove it, and it will be rebuilt from the .rec"
        )
    return keys, offsets


def _parse_numbers(text: bytes) -> np.ndarray:
    numbers = np.fromstring(text, dtype=np.int64, sep=" ")  # type: ignore[call-overload]
    return np.asarray(numbers)


def _build(rec_path: Path, idx_path: Path) -> Catalogue:
    keys, offsets = read_index(rec_path, idx_path)
    if not len(keys):
        raise RecordError(f"{rec_path}: holds no records")
    label = np.empty(len(keys))
    image_bytes = np.empty(len(keys), dtype=np.int64)
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        fields = read_headers(rec_path, offsets[rows], keys[rows])
        label[rows], image_bytes[rows] = fields.label, fields.image_bytes
    # A record without a picture is one that describes others: record 0, and one per identity.
    # Going by that, and not by the ranges that record 0 names, holds above 2^24 images too, where
    # its float32 numbers are rounded.
    images = image_bytes > 0
    _check_labels(rec_path, keys[images], offsets[images], label[images])
    return Catalogue(
        key=keys[images],
        offset=offsets[images],
        label=label[images].astype(np.int64),
        announced=_announced(rec_path, int(offsets[0]), bool(images[0])),
    )


def _check_labels(rec_path: Path, keys: np.ndarray, offsets: np.ndarray, labels: np.ndarray) -> None:
    wrong = ~(np.isfinite(labels) & (labels >= 0) & (labels < 2**31) & (labels == np.floor(labels)))
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise RecordError(
            f"{rec_path}: key {keys[bad]} at byte {offsets[bad]:,}: the label {labels[bad]} is not a whole number "
            f"from 0 to 2^31 ({int(wrong.sum()):,} such labels in all)"
        )


def _announced(rec_path: Path, offset: int, is_image: bool) -> tuple[float, float] | None:
    if is_image:
        return None
    reader = RecordReader(rec_path)
    header, _ = decode_record(reader.read_at(offset, 0), f"{rec_path}: key 0 at byte {offset}")
    reader.close()
    return (header.labels[0], header.labels[1]) if len(header.labels) == 2 else None


def _cache_path(rec_path: Path, idx_path: Path) -> Path:
    facts = [(p.stat().st_size, p.stat().st_mtime_ns) if p.exists() else None for p in (rec_path, idx_path)]
    mark = hashlib.sha256(repr(("catalogue 1", facts)).encode()).hexdigest()[:16]
    return rec_path.with_name(f".{rec_path.stem}.{mark}.catalogue.npy")


def _read_cache(path: Path) -> Catalogue | None:
    try:
        columns = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    if columns.dtype != np.int64 or columns.ndim != 2 or columns.shape[0] != 3 or columns.shape[1] < 2:
        return None
    past_images, past_identities = columns[:2, 0].tolist()
    announced = (float(past_images), float(past_identities)) if past_images >= 0 else None
    return Catalogue(columns[0, 1:], columns[1, 1:], columns[2, 1:], announced)


def _write_cache(path: Path, catalogue: Catalogue) -> None:
    columns = np.empty((3, len(catalogue.key) + 1), dtype=np.int64)
    columns[:, 0] = [*(int(number) for number in catalogue.announced or (-1, -1)), 0]
    columns[:, 1:] = catalogue.key, catalogue.offset, catalogue.label
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    # Keeping it is a convenience: a dataset on a read-only disk is catalogued at every start.
    with contextlib.suppress(OSError):
        try:
            with scratch.open("wb") as file:
                np.save(file, columns, allow_pickle=False)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
