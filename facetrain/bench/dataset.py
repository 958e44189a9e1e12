"""Dataset benchmarks: opening a dataset of WebFace42M's size, and how well block shuffling mixes identities.

A dataset is opened twice, without and with the cached index: time and memory are measured. The record file has real
headers and 8 bytes for each image (1.8 GB in all), because opening a dataset reads headers only.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.bench.failed_process import failure_reason
from facetrain.data.formats.record_headers import RAW_HEADER
from facetrain.data.formats.recordio import MAGIC
from facetrain.data.loading.sampler import GlobalSampler
from facetrain.errors import RunError

_RECORDS_AT_A_TIME = 1 << 20


def measure_dataset_index(*, images: int, identities: int) -> dict[str, Any]:
    """Write a dataset, open it twice, and return both reports: `first` without the cached index, `again` with it.

    Raises:
        RunError: a process that opens the dataset failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        write_dataset(Path(scratch), images, identities)
        # Separate processes, because a peak of memory is that of a whole process.
        return {name: _open_in_new_process(Path(scratch)) for name in ("first", "again")}


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


def _open_in_new_process(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "facetrain.bench.dataset", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = failure_reason(done)
        raise RunError(f"bench index: the dataset could not be opened: {reason}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _measure_open(folder: Path) -> dict[str, Any]:
    from facetrain.data.open_dataset import open_dataset

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    source = open_dataset(folder)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "images": source.num_images,
        "identities": source.num_classes,
        "seconds": round(seconds, 2),
        "peak_mib": round(peak / 1024),
        "peak_mib_before": round(before / 1024),
    }


def measure_shuffle(
    *, images: int, images_per_identity: int, batch_size: int, steps: int
) -> dict[str, dict[str, float]]:
    """Return the statistics of batches under `full` and `blocks`, means over `steps` batches of one epoch."""
    return {
        mode: _batch_statistics(images, images_per_identity, batch_size, mode, steps)
        for mode in ("full", "blocks")
    }


def _batch_statistics(
    images: int, images_per_identity: int, batch_size: int, mode: str, steps: int
) -> dict[str, float]:
    order = GlobalSampler(images, seed=1, global_batch_size=batch_size, mode=mode)
    identities, pairs, shared = [], [], []
    for step in np.linspace(0, order.steps_per_epoch - 2, steps).astype(int).tolist():
        before = np.unique(order.batch(step) // images_per_identity)
        identity, count = np.unique(order.batch(step + 1) // images_per_identity, return_counts=True)
        identities.append(len(identity))
        pairs.append((count * (count - 1) // 2).sum())
        shared.append(len(np.intersect1d(before, identity)))
    return {
        "identities_per_batch": float(np.mean(identities)),
        "same_identity_pairs_per_batch": float(np.mean(pairs)),
        "identities_shared_with_the_batch_before": float(np.mean(shared)),
    }


if __name__ == "__main__":
    print(json.dumps(_measure_open(Path(sys.argv[1]))))
