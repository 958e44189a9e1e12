import pytest
import torch

from facetrain.head.class_shard import shard_classes
from facetrain.head.margins.base import build_margin
from facetrain.head.margins.registry import MARGINS as REGISTRY
from tests.support.dense_head import MARGINS
from tests.support.heads import combined, make_margin


@pytest.mark.parametrize("name", list(MARGINS))
def test_the_slope_is_the_derivative_of_the_value(name):
    margin = build_margin(combined(**MARGINS[name]))
    cos = torch.linspace(-0.995, 0.995, 401, dtype=torch.float64)
    value, slope = margin.apply(cos, None)[:2]
    if margin.straight_through:
        assert torch.equal(slope, torch.ones_like(cos))
        return
    step = 1e-6
    numeric = (margin.apply(cos + step, None)[0] - margin.apply(cos - step, None)[0]) / (2 * step)
    # The derivative is discontinuous where the linear part begins.
    smooth = (numeric - slope).abs() < 1e-4 * (1 + slope.abs())
    assert smooth.sum() >= len(cos) - 2
    assert value.max() <= 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_slope_are_finite_at_cosines_of_1_and_minus_1(dtype):
    for settings in (
        combined(m2=0.5),
        combined(m1=1.35, m2=0.2, m3=0.1),
        combined(m2=0.5, gradient="straight_through"),
    ):
        value, slope = build_margin(settings).apply(torch.tensor([-1.0, 1.0], dtype=dtype), None)[:2]
        assert torch.isfinite(value).all() and torch.isfinite(slope).all()


def test_beyond_pi_the_linear_margin_is_monotonic_and_the_plain_one_is_not():
    cos = torch.linspace(-1, -0.95, 50, dtype=torch.float64)
    linear, plain = (build_margin(combined(m2=0.5, gradient=name)) for name in ("exact", "straight_through"))
    assert (linear.apply(cos, None).value_G.diff() > 0).all()
    assert (plain.apply(cos, None).value_G.diff() < 0).any()


@pytest.mark.parametrize(
    ("name", "used"),
    [("arcface", {"m2": 0.5}), ("cosface", {"m3": 0.4}), ("combined", {"m1": 1.2, "m2": 0.5, "m3": 0.4})],
)
def test_a_margin_ignores_settings_that_its_formula_does_not_have(name, used):
    margin = make_margin(name, m1=1.2, m2=0.5, m3=0.4, scale=30.0)
    cos = torch.linspace(-0.85, 0.85, 18, dtype=torch.float64)
    torch.testing.assert_close(margin.apply(cos, None).value_G, combined_cosine(cos, **used))
    assert margin.scale == 30


def combined_cosine(cos, m1=1.0, m2=0.0, m3=0.0):
    return torch.cos(m1 * torch.arccos(cos) + m2) - m3


@pytest.mark.parametrize("name", list(REGISTRY))
def test_every_margin_of_the_registry_can_be_built(name):
    assert make_margin(name, scale=30.0).scale == 30


@pytest.mark.parametrize(("num_classes", "world_size"), [(10, 3), (3, 3), (2, 3), (1, 1), (2_059_906, 8)])
def test_shards_cover_all_classes_and_the_first_ones_have_one_more(num_classes, world_size):
    shards = [shard_classes(num_classes, rank, world_size) for rank in range(world_size)]
    assert shards[0].start == 0 and shards[-1].stop == num_classes
    assert all(a.stop == b.start for a, b in zip(shards, shards[1:], strict=False))
    extra = num_classes % world_size
    assert [s.size for s in shards] == [num_classes // world_size + (r < extra) for r in range(world_size)]
