import itertools

import numpy as np
import pytest
import torch

from facetrain.head.class_shard import ClassShard, shard_classes
from facetrain.head.sampling import draw_classes
from tests.support.dense_head import sample_classes


def test_the_sample_does_not_depend_on_the_shards_and_contains_the_batchs_classes():
    positive = torch.tensor([3, 500, 999])
    whole = sample_classes(ClassShard(0, 1000), positive, 0.2, seed=4, step=7)
    pieces = []
    for rank in range(3):
        shard = shard_classes(1000, rank, 3)
        mine = positive[(positive >= shard.start) & (positive < shard.stop)] - shard.start
        pieces.append(sample_classes(shard, mine, 0.2, seed=4, step=7) + shard.start)
    assert torch.equal(torch.cat(pieces), whole)
    assert set(positive.tolist()) <= set(whole.tolist())
    assert 150 < len(whole) < 260
    other = sample_classes(ClassShard(0, 1000), positive, 0.2, seed=4, step=8)
    assert not torch.equal(whole, other)
    only = sample_classes(ClassShard(0, 1000), positive, 0.0, seed=4, step=7)
    assert only.tolist() == [3, 500, 999]


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7])
def test_every_class_is_drawn_with_probability_sample_rate(rate, block):
    hits, steps = np.zeros(1000), 2000
    for step in range(steps):
        drawn = draw_classes(ClassShard(0, 1000), rate, seed=1, step=step, block=block)
        assert (np.diff(drawn) > 0).all()
        assert len(drawn) == pytest.approx(1000 * rate, abs=2 * block)
        hits[drawn] += 1
    deviation = (rate * (1 - rate) / steps) ** 0.5
    assert np.abs(hits / steps - rate).max() < 5 * deviation


def test_classes_of_a_block_are_drawn_together_and_blocks_differ_from_step_to_step():
    apart = set()
    for step in range(50):
        drawn = draw_classes(ClassShard(0, 10_000), 0.01, seed=1, step=step, block=8)
        assert (np.diff(drawn) == 1).mean() > 0.8
        apart.update((drawn[:-1][np.diff(drawn) > 1] % 8).tolist())
    assert apart == set(range(8))


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("rate", [0.003, 0.07, 0.5, 0.97])
def test_the_draw_of_a_shard_is_a_part_of_the_draw_of_all_classes(rate, block):
    far = 2**31 - 1000
    shards = [(0, 700), (13, 14), (300, 701), (far, far + 900), (9, 9)]
    for step, (start, stop) in itertools.product(range(5), shards):
        options = {"seed": 2, "step": step, "block": block}
        drawn = draw_classes(ClassShard(start, stop), rate, **options)
        whole = draw_classes(ClassShard(max(start - 2000, 0), stop + 2000), rate, **options)
        np.testing.assert_array_equal(drawn, whole[(whole >= start) & (whole < stop)])
