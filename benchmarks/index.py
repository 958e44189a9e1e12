"""Open a dataset of WebFace42M's size: time and memory, without and with the kept catalog.

The .rec has real headers and 4 bytes for each image (1.8 GB); nothing else depends on the images.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from facetrain.data.formats.record_headers import _RAW
from facetrain.data.formats.recordio import MAGIC

_STRETCH = 1 << 20


def write(folder: Path, images: int, identities: int) -> None:
    starts = 1 + np.arange(identities + 1) * images // identities
    past = images + 1
    with (folder / "train.rec").open("wb") as file:
        file.write(_records(1, first=past, second=past + identities))
        for start in range(1, past, _STRETCH):
            key = np.arange(start, min(start + _STRETCH, past))
            label = np.searchsorted(starts, key, side="right") - 1
            file.write(_records(len(key), image=True, id=key, label=label))
        file.write(_records(identities, first=starts[:-1], second=starts[1:]))
    with (folder / "train.idx").open("w") as file:
        for start in range(0, past + identities, _STRETCH):
            keys = range(start, min(start + _STRETCH, past + identities))
            file.write("".join(f"{key}\t{key * _RAW.itemsize}\n" for key in keys))


def _records(count: int, *, image: bool = False, **columns: object) -> bytes:
    records = np.zeros(count, dtype=_RAW)
    records["magic"], records["word"], records["flag"] = MAGIC, _RAW.itemsize - 8, 0 if image else 2
    for name, values in columns.items():
        records[name] = values
    return records.tobytes()


def open_once(folder: Path) -> None:
    from facetrain.data.open_dataset import open_dataset

    before, since = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    source = open_dataset(folder)
    seconds = time.perf_counter() - since
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {
        "images": source.num_images,
        "identities": source.num_classes,
        "seconds": round(seconds, 2),
        "peak_mib": round(peak / 1024),
        "peak_mib_before": round(before / 1024),
    }
    print(json.dumps(report))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=42_474_557)
    parser.add_argument("--identities", type=int, default=2_059_906)
    parser.add_argument("--open", type=Path, help="only open this folder")
    options = parser.parse_args(argv)
    if options.open:
        open_once(options.open)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), options.images, options.identities)
        for _ in range(2):  # processes of their own, so that each has its own peak
            subprocess.run([sys.executable, __file__, "--open", scratch], check=True)


if __name__ == "__main__":
    main()
