import numpy as np
import pytest

from facetrain.data.loading.sampler import GlobalSampler, MixtureSampler, SampleOrder, permute, permute_blocks
from facetrain.errors import DataError


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000, 4097])
def test_a_permutation_contains_every_number_once_and_depends_on_the_key(length):
    once = permute(np.arange(length), length, key=3)
    assert sorted(once.tolist()) == list(range(length))
    np.testing.assert_array_equal(once[: length // 2], permute(np.arange(length // 2), length, key=3))
    if length > 60:
        assert not np.array_equal(once, permute(np.arange(length), length, key=4))
        assert abs(np.corrcoef(np.arange(length), once)[0, 1]) < 0.3


@pytest.mark.parametrize("mode", ["full", "blocks"])
def test_an_epoch_shows_every_image_at_most_once_and_the_next_epoch_has_another_order(mode):
    sampler = GlobalSampler(1003, SampleOrder(seed=5, global_batch_size=10, mode=mode, block=16, window=4))
    epochs = [np.concatenate([sampler.batch(100 * e + t)[0] for t in range(100)]) for e in range(2)]
    assert sampler.steps_per_epoch == 100 and [sampler.epoch(t) for t in (0, 99, 100)] == [0, 0, 1]
    for images_of in epochs:
        assert len(np.unique(images_of)) == 1000 and images_of.min() >= 0 and images_of.max() < 1003
    assert not np.array_equal(*epochs)
    other = GlobalSampler(1003, SampleOrder(seed=6, global_batch_size=10, mode=mode, block=16, window=4))
    assert not np.array_equal(sampler.batch(0)[0], other.batch(0)[0])


def test_a_batch_in_blocks_reads_few_blocks():
    sampler = GlobalSampler(
        64 * 100, SampleOrder(seed=1, global_batch_size=64 * 4, mode="blocks", block=64, window=4)
    )
    assert len(np.unique(sampler.batch(0)[0] // 64)) == 4


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 160, 165])
def test_a_permutation_of_blocks_contains_every_number_once_and_moves_the_short_block(length):
    orders = [permute_blocks(np.arange(length), length, key, 16) for key in range(200)]
    assert all(sorted(order.tolist()) == list(range(length)) for order in orders)
    short = length % 16
    places = {order.tolist().index(length - short) for order in orders} if short else set()
    assert places == ({16 * number for number in range(length // 16 + 1)} if short else set())
    halves = permute_blocks(np.arange(length // 2, length), length, 3, 16)
    np.testing.assert_array_equal(halves, orders[3][length // 2 :])


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_every_image_of_a_dataset_in_blocks_is_shown_in_some_epoch(mixed):
    options = {"seed": 1, "global_batch_size": 1024, "mode": "blocks"}
    sampler = (
        MixtureSampler([5050, 5050], [1, 1], SampleOrder(**options))
        if mixed
        else GlobalSampler(10100, SampleOrder(**options))
    )
    missing = [
        set(range(10100)).difference(*(sampler.batch(9 * epoch + step)[0].tolist() for step in range(9)))
        for epoch in range(30)
    ]
    assert all(len(images) == 10100 - 9 * 1024 for images in missing)
    assert not set.intersection(*missing)


@pytest.mark.parametrize("rest", [0, 5])
def test_blocks_are_prefetched_one_window_ahead(rest):
    sampler = GlobalSampler(
        64 * 12 + rest, SampleOrder(seed=1, global_batch_size=64, mode="blocks", block=64, window=4)
    )
    ranges = [list(sampler.ranges_to_prefetch(step, is_first_step=step == 0)) for step in range(12)]
    asked = [[n for first, count in stretches for n in range(first, first + count)] for stretches in ranges]
    assert [len(images) for images in asked] == [512, 0, 0, 0, 256, 0, 0, 0, rest, 0, 0, 0]
    for window in range(3):
        read = {n for step in range(4) for n in sampler.batch(4 * window + step)[0].tolist()}
        assert read == set(asked[0][:256] if window == 0 else asked[0][256:] if window == 1 else asked[4])
    assert len(ranges[0]) <= 8 + 1
    # After a resume inside of a window, and where an epoch begins: nothing has announced the images before.
    for step, is_first in ((5, True), (12, False)):
        ranges = sampler.ranges_to_prefetch(step, is_first_step=is_first)
        announced = {n for first, count in ranges for n in range(first, first + count)}
        present = step // 4 * 4
        read = {n for each in range(present, present + 8) for n in sampler.batch(each)[0].tolist()}
        assert read <= announced and len(announced) in (512, 256 + 256)


def test_every_window_has_another_order():
    order = SampleOrder(seed=1, global_batch_size=64, mode="blocks", block=64, window=1)
    sampler = GlobalSampler(64 * 10, order)
    assert len({tuple(sampler.batch(step)[0] % 64) for step in range(10)}) == 10


def test_a_dataset_smaller_than_a_global_batch_is_refused():
    with pytest.raises(DataError, match="3 images .*batch of 4"):
        GlobalSampler(3, SampleOrder(seed=0, global_batch_size=4))


@pytest.mark.parametrize("mode", ["full", "blocks"])
def test_rows_of_a_batch_are_those_of_the_whole_batch(mode):
    order = SampleOrder(seed=1, global_batch_size=12, mode=mode, block=4, window=2)
    rows = np.array([7, 2, 11])
    for sampler in (GlobalSampler(100, order), MixtureSampler([40, 9], [0.5, 3], order)):
        for step in range(2 * sampler.steps_per_epoch):
            index, part = sampler.batch(step, rows)
            whole_index, whole = sampler.batch(step)
            assert index.tolist() == whole_index[rows].tolist()
            assert part is None or part.tolist() == whole[rows].tolist()
            assert part is not None or whole is None or not whole[rows].any()
