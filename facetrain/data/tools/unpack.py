"""Conversion of a dataset to a folder of image files per identity."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.rewrite import WrittenDataset
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress

_SUFFIXES = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"BM": ".bmp"}


def unpack(
    folder: Path,
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write every image, its bytes unchanged, as OUTPUT/identity/number.

    The numbers have leading zeros, so that the order of the names is the order of the dataset. `progress` is called
    after every image.

    Raises:
        DataError: the dataset cannot be read, or the output cannot be written.
    """
    source = open_dataset(folder)
    identity_digits, number_digits = len(str(source.num_classes - 1)), len(str(source.num_images - 1))

    def write(number: int) -> None:
        data = source.read(number)
        name = f"{number:0{number_digits}d}{_SUFFIXES.get(data[:2], '.bin')}"
        (scratch / f"{source.labels[number]:0{identity_digits}d}" / name).write_bytes(data)

    # The threads end before the temporary folder is removed: a late write would fail, or leave a file behind.
    with (
        new_folder(output) as scratch,
        closing(map_in_order(write, range(source.num_images), workers)) as written,
    ):
        identities = np.unique(source.labels)
        for identity in identities.tolist():
            (scratch / f"{identity:0{identity_digits}d}").mkdir()
        for _ in report_progress(written, source.num_images, progress):
            pass
    return WrittenDataset(str(output), len(identities), source.num_images)
