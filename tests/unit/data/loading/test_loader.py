import multiprocessing
import os
import threading
from dataclasses import replace
from multiprocessing import reduction

import numpy as np
import pytest
import torch

from facetrain.data.dataset import FaceDataset, ImageSubset
from facetrain.data.images.decode import decode_rgb
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.reader import BatchSlots
from facetrain.data.loading.reader_pool import REQUEST_ROWS, ReaderPool
from facetrain.data.loading.sampler import GlobalSampler, MixtureSampler, SampleOrder
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import ImageError, RecordError, RunError
from tests.support.datasets import OneBad, encoded_image, write_records
from tests.support.world import ONE_RANK

SMALL = LoaderSettings(4, 16, workers=1)


@pytest.fixture
def dataset(tmp_path):
    return open_dataset(write_records(tmp_path, [n % 7 for n in range(40)]))


def collect(dataset, world_size, *, start=0, workers=2, global_batch=12, accumulate=1):
    """Return per step the rows that all ranks together see, micro-batch by micro-batch."""
    sampler = GlobalSampler(dataset.num_images, SampleOrder(seed=9, global_batch_size=global_batch))
    local = global_batch // world_size // accumulate
    ranks = []
    for rank in range(world_size):
        settings = LoaderSettings(local, 16, accumulate=accumulate, workers=workers)
        loader = Loader(
            dataset,
            sampler,
            settings,
            replace(ONE_RANK, rank=rank, size=world_size),
            start_step=start,
            stop_step=7,
        )
        ranks.append(list(loader))
        loader.close()
    steps = []
    for per_rank in zip(*ranks, strict=True):
        micro = [batch for parts in zip(*per_rank, strict=True) for batch in parts]
        steps.append(
            [torch.cat([getattr(b, f) for b in micro]) for f in ("sample_B", "label_B", "image_BHWC")]
        )
    return steps


def test_the_draws_of_repeated_images_are_the_same_for_any_number_of_ranks(dataset):
    order = SampleOrder(seed=9, global_batch_size=12)
    sampler, settings = MixtureSampler([10, 30], [4, 0.5], order), LoaderSettings(4, 16, workers=0)
    found = []
    for worlds in ([replace(ONE_RANK, rank=rank, size=3) for rank in range(3)], [ONE_RANK]):
        parts = []
        for world in worlds:
            accumulating = replace(settings, accumulate=3 // len(worlds))
            loader = Loader(dataset, sampler, accumulating, world, stop_step=sampler.steps_per_epoch)
            parts.append([[batch.draw_B for batch in step] for step in loader])
            loader.close()
        steps = [[batch for rank in ranks for batch in rank] for ranks in zip(*parts, strict=True)]
        found.append([torch.cat(step) for step in steps])
    assert all(torch.equal(together, alone) for together, alone in zip(*found, strict=True))
    drawn = torch.cat(found[0])
    assert len(drawn.unique()) == len(drawn) == 48


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_global_batch_is_the_same_for_any_number_of_ranks_and_workers(dataset, world_size):
    alone = collect(dataset, 1)
    together = collect(dataset, world_size, workers=1)
    assert len(alone) == 7
    for a, b in zip(alone, together, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def test_the_micro_batches_of_a_step_form_its_global_batch(dataset):
    for a, b in zip(collect(dataset, 1), collect(dataset, 2, accumulate=2), strict=True):
        assert torch.equal(a[0], b[0])


def test_a_loader_that_starts_at_a_later_step_continues_the_same_order(dataset):
    whole, rest = collect(dataset, 1), collect(dataset, 1, start=4)
    assert torch.equal(torch.cat([s[0] for s in whole[4:]]), torch.cat([s[0] for s in rest]))


def test_a_batch_has_the_epoch_of_its_step(dataset):
    sampler = GlobalSampler(dataset.num_images, SampleOrder(seed=9, global_batch_size=12))
    loader = Loader(dataset, sampler, replace(SMALL, local_batch_size=12, workers=0), ONE_RANK, stop_step=7)
    assert [(batch.step, batch.epoch) for (batch,) in loader] == [(step, step // 3) for step in range(7)]
    loader.close()


def test_images_and_labels_match_the_dataset_indices(dataset):
    sample, label, image = collect(dataset, 1)[0]
    assert torch.equal(label, torch.from_numpy(dataset.labels[sample.numpy()]))
    import cv2

    expected = cv2.imdecode(np.frombuffer(encoded_image(int(sample[0]) + 1), np.uint8), cv2.IMREAD_COLOR)[
        ..., ::-1
    ]
    np.testing.assert_array_equal(image[0].numpy(), expected)


def test_a_batch_keeps_its_content_as_long_as_it_is_referenced(dataset):
    sampler = GlobalSampler(40, SampleOrder(seed=9, global_batch_size=4))
    loader = Loader(dataset, sampler, SMALL, ONE_RANK, stop_step=20)
    held = {}
    for step, (batch,) in enumerate(loader):
        if step in (0, 3, 4, 5, 6, 11):
            held[step] = batch, batch.image_BHWC.clone()
    loader.close()
    assert all(torch.equal(batch.image_BHWC, image) for batch, image in held.values())


def test_a_bad_image_raises_an_error_or_is_replaced_by_the_next(dataset):
    sampler = GlobalSampler(40, SampleOrder(seed=9, global_batch_size=40))
    settings = LoaderSettings(40, 16, workers=0)
    strict = Loader(OneBad(dataset), sampler, settings, ONE_RANK, stop_step=1)
    with pytest.raises(
        ImageError, match=r"key 6 at byte.*data check DATASET --repair.*data.bad_records: skip"
    ):
        list(strict)
    strict.close()
    settings = replace(settings, skip_bad=True)
    lenient = Loader(OneBad(dataset), sampler, settings, ONE_RANK, stop_step=1)
    ((batch,),) = list(lenient)
    lenient.close()
    row = batch.sample_B.tolist().index(5)
    assert batch.read_B[row] == 6 and (batch.read_B != batch.sample_B).sum() == 1
    assert batch.label_B[row] == dataset.labels[6]
    assert torch.equal(batch.image_BHWC[row], batch.image_BHWC[batch.sample_B.tolist().index(6)])
    assert len(lenient.skipped) == 1 and "key 6 at byte" in lenient.skipped.pop()


@pytest.mark.parametrize("taken", [0, 1])
def test_closing_ends_the_reading_processes(dataset, taken):
    others = {*multiprocessing.active_children()}
    sampler = GlobalSampler(40, SampleOrder(seed=9, global_batch_size=4))
    loader = Loader(dataset, sampler, replace(SMALL, workers=2), ONE_RANK)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    assert len({*multiprocessing.active_children()} - others) == 2
    loader.close()
    loader.close()
    assert not {*multiprocessing.active_children()} - others


def test_an_error_in_a_reading_process_is_raised_by_the_loader(tmp_path):
    folder = write_records(tmp_path, [n % 7 for n in range(40)])
    dataset = open_dataset(folder)
    times = (folder / "train.rec").stat()
    with (folder / "train.rec").open("r+b") as file:
        file.seek(int(dataset.columns.arrays["offset"][5]))
        file.write(b"damaged!")
    # The disk damages a file without a change of its time.
    os.utime(folder / "train.rec", ns=(times.st_atime_ns, times.st_mtime_ns))
    sampler = GlobalSampler(40, SampleOrder(seed=9, global_batch_size=40))
    loader = Loader(dataset, sampler, replace(SMALL, local_batch_size=40), ONE_RANK)
    with pytest.raises(RecordError, match="key 6 at byte ") as caught:
        next(iter(loader))
    assert "read_at" in caught.value.__notes__[0]  # the traceback that it had there
    loader.close()


class AllBad(FaceDataset):
    """A dataset whose images are all damaged."""

    def read(self, number):
        raise RecordError(f"image {number} is damaged")


def test_of_several_errors_the_one_of_the_first_row_is_raised():
    slots = BatchSlots(1, 2 * REQUEST_ROWS, 8)
    pool = ReaderPool(AllBad(), slots, workers=0, skip_bad=False)
    pool.submit(0, np.arange(2 * REQUEST_ROWS))
    pool._in_process[0].reverse()  # as if the process with the second half were faster
    with pytest.raises(RecordError, match="image 0 is"):
        pool.wait(0)


def test_reading_processes_share_the_index_of_a_subset(dataset, monkeypatch):
    index, sent = np.repeat(np.arange(3, 23), 1000), []
    dump = reduction.dump
    monkeypatch.setattr(
        reduction, "dump", lambda process, file: (dump(process, file), sent.append(file.tell()))
    )
    slots = BatchSlots(1, 20, 16)
    pool = ReaderPool(ImageSubset(dataset, index), slots, workers=1, skip_bad=False)
    pool.submit(0, np.arange(0, 20_000, 1000))
    pool.wait(0)
    pool.close()
    assert max(sent) < len(index)  # bytes
    expected = [decode_rgb(dataset.read(number), location="") for number in range(3, 23)]
    assert (slots.image[0] == expected).all()


def test_a_reading_process_that_is_killed_is_reported(dataset):
    others = {*multiprocessing.active_children()}
    sampler = GlobalSampler(40, SampleOrder(seed=9, global_batch_size=4))
    loader = Loader(dataset, sampler, SMALL, ONE_RANK)
    batches = iter(loader)
    next(batches)
    (child,) = {*multiprocessing.active_children()} - others
    child.kill()
    with pytest.raises(RunError, match=r"-9.*train\.rec: key \d+ at byte"):
        list(batches)
    loader.close()


@pytest.mark.slow
def test_more_requests_than_fit_into_the_connection_of_a_reading_process_are_all_answered(dataset):
    index = np.arange(16384) % dataset.num_images
    slots = BatchSlots(3, len(index), 8)
    pool = ReaderPool(dataset, slots, workers=1, skip_bad=False)

    def read():
        for slot in range(3):
            pool.submit(slot, index)
        for slot in range(3):
            pool.wait(slot)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(60)
    assert not reading.is_alive()
    assert (slots.index == index).all() and slots.image.any((2, 3, 4)).all()
    pool.close()
