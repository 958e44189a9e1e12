"""A loader for each stage of a run, with the interface of one."""

from dataclasses import replace
from functools import partial

from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import GlobalSampler, SampleOrder
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.data.open_dataset import open_dataset
from tests.support.datasets import OneBad, write_records
from tests.support.world import ONE_RANK

STAGES = [(0, 4, 0, 6), (4, 6, 2, 12)]  # first and last step, first epoch, images


def open_stage(dataset, opened, number, skipped, start_step=None, rank=0, world_size=1):
    first_step, stop_step, first_epoch, images = STAGES[number]
    sampler = GlobalSampler(
        12, SampleOrder(seed=1, global_batch_size=images, first_step=first_step, first_epoch=first_epoch)
    )
    settings = LoaderSettings(images // world_size, 24, workers=0, skip_bad=True)
    start = first_step if start_step is None else start_step
    world = replace(ONE_RANK, rank=rank, size=world_size)
    loader = Loader(dataset, sampler, settings, world, stop_step=stop_step, start_step=start, skipped=skipped)
    opened.append(loader)
    return loader


def test_the_stages_follow_each_other_and_each_epoch_has_every_image_once(tmp_path):
    write_records(tmp_path, [n // 3 for n in range(12)], size=24)
    dataset, opened = OneBad(open_dataset(tmp_path)), []
    loader = StagedLoader([partial(open_stage, dataset, opened, number) for number in range(2)])
    skipped = loader.skipped
    assert len(opened) == 1
    steps = [(batch.step, batch.epoch, batch.sample_B.tolist()) for (batch,) in loader]
    loader.close()
    assert len(opened) == 2 and loader.wait_s == sum(each.wait_s for each in opened) > opened[1].wait_s
    assert [step[:2] for step in steps] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 3)]
    for epoch in range(4):
        assert sorted(n for _, number, images in steps if number == epoch for n in images) == list(range(12))
    assert loader.skipped is skipped and len(skipped) == 1

    # From a step in the middle, and on two ranks, the same images.
    for size in (1, 2):
        ranks = [
            StagedLoader([
                partial(open_stage, dataset, [], 0, start_step=3, rank=rank, world_size=size),
                partial(open_stage, dataset, [], 1, rank=rank, world_size=size),
            ])
            for rank in range(size)
        ]  # fmt: skip
        later = [
            [n for (batch,) in parts for n in batch.sample_B.tolist()] for parts in zip(*ranks, strict=True)
        ]
        assert later == [images for _, _, images in steps[3:]]
        for rank in ranks:
            rank.close()
