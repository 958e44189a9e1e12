import numpy as np
import pytest

from facetrain.data.sampler import GlobalSampler, permute
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
    sampler = GlobalSampler(1003, seed=5, global_batch_size=10, mode=mode, block=16, window=4)
    epochs = [np.concatenate([sampler.batch(100 * e + t) for t in range(100)]) for e in range(2)]
    assert sampler.steps_per_epoch == 100 and [sampler.epoch(t) for t in (0, 99, 100)] == [0, 0, 1]
    for images_of in epochs:
        assert len(np.unique(images_of)) == 1000 and images_of.min() >= 0 and images_of.max() < 1003
    assert not np.array_equal(*epochs)
    other = GlobalSampler(1003, seed=6, global_batch_size=10, mode=mode, block=16, window=4)
    assert not np.array_equal(sampler.batch(0), other.batch(0))


def test_a_batch_in_blocks_reads_few_blocks():
    sampler = GlobalSampler(64 * 100, seed=1, global_batch_size=64 * 4, mode="blocks", block=64, window=4)
    assert len(np.unique(sampler.batch(0) // 64)) == 4


def test_blocks_are_prefetched_one_window_ahead():
    sampler = GlobalSampler(64 * 12, seed=1, global_batch_size=64, mode="blocks", block=64, window=4)
    asked = [list(sampler.ranges_to_prefetch(step, is_first_step=step == 0)) for step in range(12)]
    assert [len(stretches) for stretches in asked] == [8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    for window in range(3):
        read = {int(n) // 64 for step in range(4) for n in sampler.batch(4 * window + step)}
        stretches = asked[0][:4] if window == 0 else asked[0][4:] if window == 1 else asked[4]
        assert read == {first // 64 for first, _ in stretches}


def test_a_dataset_smaller_than_a_global_batch_is_refused():
    with pytest.raises(DataError, match="3 images do not fill one global batch of 4"):
        GlobalSampler(3, seed=0, global_batch_size=4)
