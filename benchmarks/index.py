"""Time and memory to open a dataset of WebFace42M's size, without and with the cached catalog.

The record file has real headers and 8 bytes for each image (1.8 GB in all), because opening a dataset reads headers
only.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import in_new_process, memory_mib, run
from facetrain.data.formats.record_headers import RAW_HEADER
from facetrain.data.formats.recordio import MAGIC
from facetrain.data.open_dataset import open_dataset

_RECORDS_AT_A_TIME = 1 << 20


def measure_index(images: int = 42_474_557, identities: int = 2_059_906) -> dict[str, Any]:
    """Write a dataset and open it twice: `first` without the cached catalog, `again` with it."""
    with tempfile.TemporaryDirectory() as scratch:
        write_dataset(Path(scratch), images, identities)
        return {name: in_new_process(_measure_open, Path(scratch)) for name in ("first", "again")}


def write_dataset(folder: Path, images: int, identities: int) -> None:
    """Write `train.rec` and `train.idx` in InsightFace's layout: record 0, images, identity records."""
    starts = 1 + np.arange(identities + 1) * images // identities
    past = images + 1
    with (folder / "train.rec").open("wb") as file:
        file.write(_records(1, first=past, second=past + identities))
        for start in range(1, past, _RECORDS_AT_A_TIME):
            key = np.arange(start, min(start + _RECORDS_AT_A_TIME, past))
            label = np.searchsorted(starts, key, side="right") - 1
            file.write(_records(len(key), image=True, id=key, label=label))
        file.write(_records(identities, first=starts[:-1], second=starts[1:]))
    with (folder / "train.idx").open("w") as file:
        for start in range(0, past + identities, _RECORDS_AT_A_TIME):
            keys = range(start, min(start + _RECORDS_AT_A_TIME, past + identities))
            file.write("".join(f"{key}\t{key * RAW_HEADER.itemsize}\n" for key in keys))


def _records(count: int, *, image: bool = False, **columns: object) -> bytes:
    records = np.zeros(count, dtype=RAW_HEADER)
    # A record's length counts what follows the magic number and the length itself, 4 bytes each. An image of
    # 8 bytes is as long as the two labels of an identity record, so all records have the same size.
    records["magic"], records["word"], records["flag"] = MAGIC, RAW_HEADER.itemsize - 8, 0 if image else 2
    for name, values in columns.items():
        records[name] = values
    return records.tobytes()


def _measure_open(folder: Path) -> dict[str, Any]:
    before, start = memory_mib(), time.perf_counter()
    source = open_dataset(folder)
    return {
        "images": source.num_images,
        "identities": source.num_classes,
        "seconds": round(time.perf_counter() - start, 2),
        "peak_mib": memory_mib(),
        "peak_mib_before": before,
    }


if __name__ == "__main__":
    run(measure_index)
