from itertools import product

import pytest
import torch

from facetrain.head.row_optimizer import CenterUpdate, RowOptimizer
from facetrain.head.stochastic_rounding import Noise, round_to_bfloat16, round_to_int8

CPU = torch.device("cpu")


def test_rounding_to_bfloat16_is_unbiased():
    x = torch.tensor([1.0 + 2**-10, -3.0 - 2**-8, 1e-20]).repeat_interleave(200_000)
    rounded = round_to_bfloat16(x, Noise(0, CPU)).float()
    assert set(rounded[:200_000].unique().tolist()) == {1.0, 1.0078125}
    means = rounded.double().view(3, -1).mean(1)
    torch.testing.assert_close(means, x[::200_000].double(), rtol=2e-5, atol=0)


def test_numbers_that_bfloat16_represents_exactly_do_not_change():
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, 3e38, float("inf"), -float("inf"), float("nan")]).bfloat16()
    for count in range(20):
        rounded = round_to_bfloat16(x.float(), Noise(count, CPU))
        assert torch.equal(rounded.view(torch.int16), x.view(torch.int16))


def test_rounding_to_int8_is_unbiased_and_keeps_the_largest_number():
    row = torch.tensor([0.3, -127.0, 5.5, 126.9])
    units, scale = round_to_int8(row.repeat(100_000, 1), 1, Noise(0, CPU))
    assert (scale == 1).all() and (units[:, 1] == -127).all() and units.max() == 127
    torch.testing.assert_close(units.double().mean(0), row.double(), rtol=1e-2, atol=0.01)
    zeros, scale = round_to_int8(torch.zeros(4, 8), 2, Noise(0, CPU))
    assert not zeros.any() and not scale.any()


def test_every_step_and_every_rank_has_a_noise_of_its_own():
    optimizer, keys = RowOptimizer(CenterUpdate(), CPU, seed=1), set()
    for step, rank in product(range(3), range(3)):
        optimizer.begin_step(step, rank, lr=0.1)
        keys.add(optimizer._noise.keys)
    assert len(keys) == 9


def test_every_chunk_and_every_step_has_different_noise():
    x = torch.zeros(1000)
    noise, other, again = Noise(1, CPU), Noise(2, CPU), Noise(1, CPU)
    draws = [noise.like(x), noise.like(x), other.like(x)]
    assert all((a != b).float().mean() > 0.99 for n, a in enumerate(draws) for b in draws[:n])
    assert all(draw.min() >= 0 and draw.max() < 2**16 for draw in draws)
    assert torch.equal(again.like(x), draws[0])


@pytest.mark.parametrize("sizes", [(10, 1000), (1000, 10)])
def test_chunks_may_grow_and_shrink(sizes):
    noise = Noise(1, CPU)
    for size in sizes:
        assert noise.like(torch.zeros(size, 3)).shape == (size, 3)
