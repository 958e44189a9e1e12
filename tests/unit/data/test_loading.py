import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch

from facetrain.data.augment import Augment, BufferPool, normalize
from facetrain.data.jpeg_compression import recompress
from facetrain.data.loader import Loader, LoaderSettings
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import GlobalSampler, permute
from facetrain.errors import DataError, ImageError, RecordError, RunError
from tests.support.datasets import encoded_image, write_records


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000, 4097])
def test_a_permutation_visits_everything_once_and_depends_on_the_key(length):
    once = permute(np.arange(length), length, key=3)
    assert sorted(once.tolist()) == list(range(length))
    np.testing.assert_array_equal(once[: length // 2], permute(np.arange(length // 2), length, key=3))
    if length > 60:
        assert not np.array_equal(once, permute(np.arange(length), length, key=4))
        assert abs(np.corrcoef(np.arange(length), once)[0, 1]) < 0.3


@pytest.mark.parametrize("mode", ["full", "blocks"])
def test_an_epoch_shows_every_image_at_most_once_and_the_next_is_another(mode):
    order = GlobalSampler(1003, seed=5, global_batch_size=10, mode=mode, block=16, window=4)
    epochs = [np.concatenate([order.batch(100 * e + t) for t in range(100)]) for e in range(2)]
    assert order.steps_per_epoch == 100 and [order.epoch(t) for t in (0, 99, 100)] == [0, 0, 1]
    for seen in epochs:
        assert len(np.unique(seen)) == 1000 and seen.min() >= 0 and seen.max() < 1003
    assert not np.array_equal(*epochs)
    other = GlobalSampler(1003, seed=6, global_batch_size=10, mode=mode, block=16, window=4)
    assert not np.array_equal(order.batch(0), other.batch(0))


def test_blocks_read_in_stretches():
    order = GlobalSampler(64 * 100, seed=1, global_batch_size=64 * 4, mode="blocks", block=64, window=4)
    assert len(np.unique(order.batch(0) // 64)) == 4


SMALL = LoaderSettings(local_batch_size=4, image_size=16, workers=1)


@pytest.fixture
def source(tmp_path):
    return open_dataset(write_records(tmp_path, [n % 7 for n in range(40)]))


def collect(source, world_size, *, start=0, workers=2, global_batch=12, accumulate=1):
    """Return per step the rows that all ranks together see, micro-batch by micro-batch."""
    order = GlobalSampler(source.num_images, seed=9, global_batch_size=global_batch)
    local = global_batch // world_size // accumulate
    ranks = []
    for rank in range(world_size):
        settings = LoaderSettings(local, accumulate=accumulate, image_size=16, workers=workers)
        loader = Loader(
            source, order, settings, rank=rank, world_size=world_size, start_step=start, stop_step=7
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


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_global_batch_is_the_same_for_any_number_of_ranks_and_workers(source, world_size):
    alone = collect(source, 1)
    together = collect(source, world_size, workers=1)
    assert len(alone) == 7
    for a, b in zip(alone, together, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def test_micro_batches_put_together_are_the_step(source):
    for a, b in zip(collect(source, 1), collect(source, 2, accumulate=2), strict=True):
        assert torch.equal(a[0], b[0])


def test_starting_late_goes_on_where_the_order_is(source):
    whole, rest = collect(source, 1), collect(source, 1, start=4)
    assert torch.equal(torch.cat([s[0] for s in whole[4:]]), torch.cat([s[0] for s in rest]))


def test_images_and_labels_are_those_of_the_numbers(source):
    sample, label, image = collect(source, 1)[0]
    assert torch.equal(label, torch.from_numpy(source.labels[sample.numpy()]))
    import cv2

    expected = cv2.imdecode(np.frombuffer(encoded_image(int(sample[0]) + 1), np.uint8), cv2.IMREAD_COLOR)[
        ..., ::-1
    ]
    np.testing.assert_array_equal(image[0].numpy(), expected)


def test_a_batch_stays_what_it_is_for_as_long_as_it_is_held(source):
    order = GlobalSampler(40, seed=9, global_batch_size=4)
    loader = Loader(source, order, SMALL, rank=0, world_size=1, stop_step=20)
    held = {}
    for step, (batch,) in enumerate(loader):
        if step in (0, 3, 4, 5, 6, 11):
            held[step] = batch, batch.image_BHWC.clone()
    loader.close()
    assert all(torch.equal(batch.image_BHWC, image) for batch, image in held.values())


def test_a_buffer_is_used_again_as_soon_as_nothing_refers_to_it():
    buffers = BufferPool()
    first = buffers.array((4, 2), np.float32)
    address = first.ctypes.data
    held = torch.from_numpy(first)[1:]
    del first
    assert buffers.array((4, 2), np.float32).ctypes.data != address
    del held
    assert address in {buffers.array((4, 2), np.float32).ctypes.data for _ in range(2)}
    assert buffers.array((2, 4), np.float32).shape == (2, 4)


class OneBad:
    """A source whose image 5 is damaged."""

    def __init__(self, source):
        self.num_images, self.num_classes, self.labels = source.num_images, source.num_classes, source.labels
        self.location = source.location
        self._source = source

    def read(self, number):
        return b"\xff\xd8 damaged" if number == 5 else self._source.read(number)


def test_a_bad_image_is_an_error_that_names_it_or_gives_way_to_the_next(source):
    order = GlobalSampler(40, seed=9, global_batch_size=40)
    settings = LoaderSettings(local_batch_size=40, image_size=16, workers=0)
    strict = Loader(OneBad(source), order, settings, rank=0, world_size=1, stop_step=1)
    with pytest.raises(ImageError, match="key 6 at byte"):
        list(strict)
    strict.close()
    settings = replace(settings, bad_records="skip")
    lenient = Loader(OneBad(source), order, settings, rank=0, world_size=1, stop_step=1)
    ((batch,),) = list(lenient)
    lenient.close()
    row = batch.sample_B.tolist().index(5)
    assert batch.label_B[row] == source.labels[6]
    assert torch.equal(batch.image_BHWC[row], batch.image_BHWC[batch.sample_B.tolist().index(6)])
    assert len(lenient.skipped) == 1 and "key 6 at byte" in lenient.skipped[0]


@pytest.mark.parametrize("taken", [0, 1])
def test_closing_ends_the_reading_processes(source, taken):
    order = GlobalSampler(40, seed=9, global_batch_size=4)
    loader = Loader(source, order, replace(SMALL, workers=2), rank=0, world_size=1)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()


def test_an_error_in_a_reading_process_is_raised_where_the_batch_is_asked_for(tmp_path):
    folder = write_records(tmp_path, [n % 7 for n in range(40)])
    source = open_dataset(folder)
    with (folder / "train.rec").open("r+b") as file:
        file.seek(int(source._catalog.offset[5]))
        file.write(b"damaged!")
    order = GlobalSampler(40, seed=9, global_batch_size=40)
    loader = Loader(source, order, replace(SMALL, local_batch_size=40), rank=0, world_size=1)
    with pytest.raises(RecordError, match="key 6 at byte .*: no record starts") as caught:
        next(iter(loader))
    assert "read_at" in caught.value.__notes__[0]  # the traceback that it had there
    loader.close()


def test_a_reading_process_that_is_killed_is_reported(source):
    order = GlobalSampler(40, seed=9, global_batch_size=4)
    loader = Loader(source, order, SMALL, rank=0, world_size=1)
    batches = iter(loader)
    next(batches)
    (child,) = multiprocessing.active_children()
    child.kill()
    with pytest.raises(RunError, match="ended unexpectedly"):
        list(batches)
    loader.close()


def test_blocks_are_asked_for_a_window_ahead():
    order = GlobalSampler(64 * 12, seed=1, global_batch_size=64, mode="blocks", block=64, window=4)
    asked = [list(order.ranges_to_prefetch(step, is_first_step=step == 0)) for step in range(12)]
    assert [len(stretches) for stretches in asked] == [8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    for window in range(3):
        read = {int(n) // 64 for step in range(4) for n in order.batch(4 * window + step)}
        stretches = asked[0][:4] if window == 0 else asked[0][4:] if window == 1 else asked[4]
        assert read == {first // 64 for first, _ in stretches}


def images(count=6):
    return torch.randint(
        0, 256, (count, 20, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


ALL = {name: 0.5 for name in ("flip", "low_resolution", "blur", "gray", "color", "crop", "erase", "jpeg")}


def test_normalized_pixels_lie_between_minus_one_and_one_in_channels_last():
    image = normalize(torch.tensor([0, 255, 127], dtype=torch.uint8).expand(1, 2, 2, 3).contiguous())
    assert image[0, :, 0, 0].tolist() == pytest.approx([-1, 1, -1 / 255], abs=1e-6)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_what_happens_to_an_image_depends_on_seed_epoch_and_number_alone():
    augment = Augment(1, **ALL)
    sample = torch.arange(6)
    whole = augment(images(), sample, 3)
    parts = torch.cat([augment(images()[rows], sample[rows], 3) for rows in ([0, 1], [2], [3, 4, 5])])
    torch.testing.assert_close(whole, parts)
    assert not torch.equal(whole, augment(images(), sample, 4))
    assert not torch.equal(whole, Augment(2, **ALL)(images(), sample, 3))


@pytest.mark.parametrize("name", list(ALL))
def test_each_augmentation_changes_images_as_often_as_asked(name):
    many = images(400)
    off = {"flip": 0.0}
    plain = Augment(0, **off)(many, torch.arange(400), 0)
    changed = Augment(0, **(off | {name: 0.25}))(many, torch.arange(400), 0)
    share = (changed != plain).flatten(1).any(1).float().mean().item()
    assert 0.17 < share < 0.33
    assert changed.min() >= -1.0001 and changed.max() <= 1.0001 and changed.shape == plain.shape


def test_a_flip_mirrors_and_gray_has_three_equal_channels():
    plain = normalize(images())
    torch.testing.assert_close(Augment(0, flip=1.0)(images(), torch.arange(6), 0), plain.flip(3))
    gray = Augment(0, flip=0, gray=1.0)(images(), torch.arange(6), 0)
    torch.testing.assert_close(gray[:, 0], gray[:, 2])


@pytest.mark.parametrize("quality", [20, 60, 92])
def test_the_jpeg_of_the_device_looks_like_the_one_of_opencv(quality):
    import cv2

    smooth = cv2.GaussianBlur(images(1)[0].numpy(), (0, 0), 2)
    _, data = cv2.imencode(".jpg", smooth[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    expected = cv2.imdecode(data, cv2.IMREAD_COLOR)[..., ::-1].astype(np.float32)
    ours = recompress(normalize(torch.from_numpy(smooth)[None]), torch.tensor([float(quality)]))
    ours = (ours[0].permute(1, 2, 0).numpy() + 1) * 127.5
    damage = np.abs(expected - smooth).mean()
    assert np.abs(ours - expected).mean() < 0.35 * damage + 0.6


def test_fewer_images_than_a_batch_are_an_error():
    with pytest.raises(DataError, match="3 images do not fill one global batch of 4"):
        GlobalSampler(3, seed=0, global_batch_size=4)
