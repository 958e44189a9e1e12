"""Rate of the loader on a dataset in an S3 store on the loopback interface, beside the same dataset on the disk."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import pytest

from benchmarks.common import memory_mib, run
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import SampleOrder, build_sampler
from facetrain.data.open_dataset import open_dataset
from facetrain.data.remote_dataset import dataset_path
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
) -> dict[str, list[float]]:
    """Return images per second of each round, both datasets in turn, the ratio of the medians, and sizes in MiB.

    `cache_share` is the bound of the cache as a share of the dataset; two windows of 1,024 images must fit.
    """
    steps = images // batch_size
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = write_records(Path(scratch, "faces"), [n // 20 for n in range(images)], size=112)
        with running_object_store(patch) as store:
            size = (folder / "train.rec").stat().st_size
            remote = DataSettings(
                train=upload(folder),
                cache=f"{scratch}/cache",
                cache_bytes=int(cache_share * size),
                shuffle="blocks",
            )
            store.latency_s = latency_s
            start = time.perf_counter()
            sources = {"disk": open_dataset(folder), "store": open_dataset(dataset_path(remote))}
            report = {"opening_s": [time.perf_counter() - start], "disk": [], "store": []}
            order = SampleOrder(seed=1, global_batch_size=batch_size, mode="blocks", window=8)
            settings = LoaderSettings(remote, batch_size, workers=workers)
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
                        for _ in range(steps):
                            next(batches)
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


if __name__ == "__main__":
    run(measure_object_store)
