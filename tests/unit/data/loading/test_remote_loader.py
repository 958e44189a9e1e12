"""Batches of a dataset in an object store, compared with those of the same dataset on the disk."""

from dataclasses import replace

import pytest
import torch

from facetrain.data import object_blocks
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import SampleOrder, build_sampler
from facetrain.data.open_dataset import open_dataset
from facetrain.data.settings import DataSettings
from facetrain.remote import filesystem
from tests.support.datasets import write_records
from tests.support.object_store import upload
from tests.support.world import ONE_RANK
from tests.unit.data.test_remote_dataset import block_bytes, open_remote

LIMIT = 60_000
ORDER = SampleOrder(seed=9, global_batch_size=12, mode="blocks", block=4, window=3)


@pytest.fixture
def datasets(object_store, tmp_path, monkeypatch):
    """The dataset on the disk, and in a slow store whose requests fail now and then, with a cache for a third of it."""
    monkeypatch.setattr(object_blocks, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(filesystem, "FIRST_WAIT_S", 0.001)
    folder = write_records(tmp_path / "faces", [n // 10 for n in range(200)])
    remote = open_remote(upload(folder), tmp_path / "cache", cache_bytes=LIMIT)
    assert remote.opened(0).size > 2 * LIMIT
    object_store.latency_s, object_store.failing = 0.05, 0.05
    return open_dataset(folder), remote


def batches(dataset, world_size, *, start=0, workers=0):
    """Return numbers, labels and pixels of the images of steps `start` to 20, of all ranks together."""
    settings = LoaderSettings(
        DataSettings(train="", image_size=16), ORDER.global_batch_size // world_size, workers=workers
    )
    ranks = []
    for rank in range(world_size):
        world = replace(ONE_RANK, rank=rank, size=world_size)
        sampler = build_sampler(dataset, ORDER)
        loader = Loader(dataset, sampler, settings, world, start_step=start, stop_step=20)
        ranks.append([batch for (batch,) in loader])
        loader.close()
    return [
        [
            torch.cat([getattr(batch, name) for batch in step])
            for name in ("sample_B", "label_B", "image_BHWC")
        ]
        for step in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(("world_size", "start", "workers"), [(1, 0, 2), (2, 7, 0), (3, 0, 0)])
def test_a_slow_failing_store_gives_the_images_of_the_disk_in_their_order(
    datasets, world_size, start, workers, object_store, tmp_path
):
    local, remote = datasets
    expected = batches(local, 1)[start:]
    found = batches(remote, world_size, start=start, workers=workers)
    assert len(found) == 20 - start
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert object_store.failures and block_bytes(tmp_path / "cache") <= LIMIT
