"""Records → a folder of images per identity, and the index of a .rec that has lost it."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np

from facetrain.data.formats.recordio import RecordReader
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.parallel import Progress, counted, in_order, new_folder, silent
from facetrain.errors import DataError

_SUFFIXES = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"BM": ".bmp"}


def unpack(
    folder: Path, output: Path, *, workers: int | None = None, progress: Progress = silent
) -> tuple[int, int]:
    """Write every image, its bytes unchanged, as OUTPUT/identity/number; return (identities, images).

    Raises:
        DataError: the dataset cannot be read, or the output not be written.
    """
    source = open_dataset(folder)
    letters = len(str(source.num_classes - 1)), len(str(source.num_images - 1))

    def write(number: int) -> None:
        data = source.read(number)
        name = f"{number:0{letters[1]}d}{_SUFFIXES.get(data[:2], '.bin')}"
        (scratch / f"{source.labels[number]:0{letters[0]}d}" / name).write_bytes(data)

    # Closed before the folder aside is cleared: a writer still at work would make it anew.
    with (
        new_folder(output) as scratch,
        closing(in_order(write, range(source.num_images), workers)) as written,
    ):
        identities = np.unique(source.labels)
        for identity in identities.tolist():
            (scratch / f"{identity:0{letters[0]}d}").mkdir()
        for _ in counted(written, source.num_images, progress):
            pass
    return len(identities), source.num_images


def index(rec_path: Path, *, overwrite: bool = False, progress: Progress = silent) -> int:
    """Write the .idx beside a .rec by one walk through it, keys from 0; return how many records there are.

    Raises:
        DataError: there is an index already, or the .rec is damaged; the message names the byte.
    """
    idx_path = rec_path.with_suffix(".idx")
    if idx_path.exists() and not overwrite:
        raise DataError(f"{idx_path}: is there already; --overwrite replaces it")
    reader = RecordReader(rec_path)
    scratch = idx_path.with_name(f".{idx_path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with scratch.open("w", encoding="ascii") as file:
            for count, offset in enumerate(reader.scan_offsets(), start=1):
                file.write(f"{count - 1}\t{offset}\n")
                progress(offset, reader.size)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, idx_path)
    except OSError as error:
        raise DataError(f"{error.filename or idx_path}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return count
