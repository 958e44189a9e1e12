import numpy as np
import pytest
import torch

from facetrain.errors import ConfigError
from facetrain.head.class_shard import shard_classes
from facetrain.head.margins import Margin, build_margin
from tests.support.dense_head import MARGINS


@pytest.mark.parametrize("name", list(MARGINS))
def test_the_slope_is_the_derivative(name):
    margin = Margin(**MARGINS[name])
    cos = torch.linspace(-0.995, 0.995, 401, dtype=torch.float64)
    value, slope = margin.target(cos)
    if margin.straight_through:
        assert torch.equal(slope, torch.ones_like(cos))
        return
    step = 1e-6
    numeric = (margin.target(cos + step)[0] - margin.target(cos - step)[0]) / (2 * step)
    # Where the linear part begins, the derivative jumps.
    smooth = (numeric - slope).abs() < 1e-4 * (1 + slope.abs())
    assert smooth.sum() >= len(cos) - (2 if margin.linear_beyond_pi else 0)
    assert value.max() <= 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_slope_are_finite_at_the_ends(dtype):
    for margin in (Margin(m2=0.5), Margin(m1=1.35, m2=0.2, m3=0.1), Margin(m2=0.5, linear_beyond_pi=True)):
        value, slope = margin.target(torch.tensor([-1.0, 1.0], dtype=dtype))
        assert torch.isfinite(value).all() and torch.isfinite(slope).all()


def test_past_pi_the_linear_margin_keeps_falling_and_the_plain_one_does_not():
    cos = torch.linspace(-1, -0.95, 50, dtype=torch.float64)
    assert (Margin(m2=0.5, linear_beyond_pi=True).target(cos)[0].diff() > 0).all()
    assert (Margin(m2=0.5).target(cos)[0].diff() < 0).any()


def test_a_margin_takes_only_its_own_numbers():
    given = {"m1": 1.2, "m2": 0.5, "m3": 0.4, "scale": 30.0}
    assert build_margin("arcface", **given) == Margin(30.0, 1.0, 0.5, 0.0)
    assert build_margin("cosface", **given) == Margin(30.0, 1.0, 0.0, 0.4)
    assert build_margin("combined", **given) == Margin(30.0, 1.2, 0.5, 0.4)
    assert build_margin("softmax", **given) == Margin(30.0, 1.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="'arc' does not exist; there are arcface"):
        build_margin("arc")


@pytest.mark.parametrize(("num_classes", "world_size"), [(10, 3), (3, 3), (2, 3), (1, 1), (2_059_906, 8)])
def test_shards_cover_all_classes_and_the_first_hold_one_more(num_classes, world_size):
    shards = [shard_classes(num_classes, rank, world_size) for rank in range(world_size)]
    assert shards[0].start == 0 and shards[-1].stop == num_classes
    assert all(a.stop == b.start for a, b in zip(shards, shards[1:], strict=False))
    extra = num_classes % world_size
    assert [s.size for s in shards] == [num_classes // world_size + (r < extra) for r in range(world_size)]
    assert np.sum([s.size for s in shards]) == num_classes
