"""Rate of the loader on a dataset in an S3 store on the loopback interface, beside the same dataset on the disk."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import pytest

from benchmarks.common import memory_mib, run
from facetrain.data.build import open_training_data
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import SampleOrder, build_sampler
from facetrain.data.settings import DataSettings
from tests.support.datasets import write_records
from tests.support.object_store import running_object_store, upload
from tests.support.processes import descendants
from tests.support.world import ONE_RANK


def measure_object_store(
    images: int = 6000,
    batch_size: int = 128,
    rounds: int = 4,
    latency_s: float = 0.05,
    workers: int = 1,
    cache_share: float = 2.0,
    parts: int = 16,
    pace: float = math.inf,
) -> dict[str, list[float]]:
    """Return images per second of each round, both datasets in turn, the ratio of the medians, and sizes in MiB.

    The dataset is a mixture of `parts` RecordIO datasets. `cache_share` is the bound of the cache as a share of the
    dataset; two windows of 1,024 images must fit. `pace` is the images per second that the consumer takes at most, as
    a network does.
    """
    steps = images // batch_size
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        # Parts, because moto reads a whole object to answer a request for a range of it.
        labels = [n // 20 for n in range(images // parts)]
        folders = [write_records(Path(scratch, f"part_{n}"), labels, size=112) for n in range(parts)]
        size = sum((folder / "train.rec").stat().st_size for folder in folders)
        with running_object_store(patch) as store:
            urls = [upload(folder, folder.name) for folder in folders]
            local, remote = (
                DataSettings(
                    train=_write_mixture(Path(scratch, name), paths),
                    cache=f"{scratch}/cache",
                    cache_bytes=int(cache_share * size),
                    shuffle="blocks",
                )
                for name, paths in (("disk.yaml", folders), ("store.yaml", urls))
            )
            store.latency_s = latency_s
            start = time.perf_counter()
            sources = {name: open_training_data(data) for name, data in (("disk", local), ("store", remote))}
            report = {"opening_s": [time.perf_counter() - start], "disk": [], "store": []}
            order = SampleOrder(seed=1, global_batch_size=batch_size, mode="blocks", window=8)
            settings = LoaderSettings(batch_size, workers=workers)
            with ExitStack() as stack:
                loaders = {
                    name: stack.enter_context(
                        closing(Loader(source, build_sampler(source, order), settings, ONE_RANK))
                    )
                    for name, source in sources.items()
                }
                iterators = {name: iter(loader) for name, loader in loaders.items()}
                for _ in range(rounds):
                    for name, batches in iterators.items():
                        start = time.perf_counter()
                        for step in range(1, steps + 1):
                            next(batches)
                            time.sleep(max(start + step * batch_size / pace - time.perf_counter(), 0))
                        report[name].append(steps * batch_size / (time.perf_counter() - start))
                memory = max(memory_mib(process=each) for each in descendants(os.getpid()))
            blocks = Path(scratch, "cache", "blocks").rglob("*")
            cached = sum(path.stat().st_size for path in blocks if path.is_file())
            report |= {
                "dataset_mib": [size >> 20],
                "cache_mib": [cached >> 20],
                "largest_process_mib": [memory],
            }
        # The first round fetches all blocks.
        report["ratio_after_the_first"] = [median(report["store"][1:]) / median(report["disk"][1:])]
        return report


def _write_mixture(path: Path, datasets: Sequence[Path | str]) -> str:
    path.write_text(json.dumps({"datasets": [{"path": str(dataset)} for dataset in datasets]}))
    return str(path)


if __name__ == "__main__":
    run(measure_object_store)
