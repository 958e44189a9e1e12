"""Reconstruction of the .idx file of a .rec file."""

from __future__ import annotations

import os
from pathlib import Path

from facetrain.data.formats.recordio import RecordReader
from facetrain.errors import DataError
from facetrain.files import os_errors_as
from facetrain.progress import ProgressCallback, ignore_progress


def rebuild_index(
    rec_path: Path, *, overwrite: bool = False, progress: ProgressCallback = ignore_progress
) -> int:
    """Write the .idx next to a .rec: one scan of the file, keys from 0; return the number of records.

    An existing .idx is replaced only when the new one is complete.

    Args:
        rec_path: the .rec file.
        overwrite: replace an existing .idx.
        progress: called after every record, with the byte offset of the record and the size of the file.

    Raises:
        DataError: an index exists and `overwrite` is false, or the .rec is damaged; the message names the byte.
    """
    idx_path = rec_path.with_suffix(".idx")
    if idx_path.exists() and not overwrite:
        raise DataError(f"{idx_path}: already exists; replace it with --overwrite")
    reader = RecordReader(rec_path)
    scratch = idx_path.with_name(f".{idx_path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with os_errors_as(DataError, idx_path):
            with scratch.open("w", encoding="ascii") as file:
                for count, offset in enumerate(reader.scan_offsets(), start=1):
                    file.write(f"{count - 1}\t{offset}\n")
                    progress(offset, reader.size)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, idx_path)
    finally:
        scratch.unlink(missing_ok=True)
    return count
