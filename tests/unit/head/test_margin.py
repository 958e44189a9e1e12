import threading

import pytest
import torch

from facetrain.errors import ConfigError, UsageError
from facetrain.head.build import build_margin
from facetrain.head.class_shard import row_pieces, shard_classes
from facetrain.head.margins.base import Margin
from facetrain.head.margins.function_margin import make_margin
from facetrain.head.margins.function_margin import own_margin as own_margin_of
from facetrain.head.margins.registry import MARGINS as REGISTRY
from tests.support.dense_head import MARGINS
from tests.support.heads import combined, margin_settings
from tests.support.heads import make_margin as named_margin


@pytest.mark.parametrize("name", list(MARGINS))
def test_the_slope_is_the_derivative_of_the_value(name):
    margin = build_margin(combined(**MARGINS[name]))
    cos = torch.linspace(-0.995, 0.995, 401, dtype=torch.float64)
    value, slope = margin.apply(cos, None)[:2]
    if MARGINS[name].get("gradient") == "straight_through":
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
    margin = named_margin(name, m1=1.2, m2=0.5, m3=0.4, scale=30.0)
    cos = torch.linspace(-0.85, 0.85, 18, dtype=torch.float64)
    torch.testing.assert_close(margin.apply(cos, None).value_G, combined_cosine(cos, **used))
    assert margin.scale == 30


def combined_cosine(cos, m1=1.0, m2=0.0, m3=0.0):
    return torch.cos(m1 * torch.arccos(cos) + m2) - m3


@pytest.mark.parametrize("name", list(REGISTRY))
def test_every_margin_of_the_registry_can_be_built(name):
    assert named_margin(name, scale=30.0).scale == 30


def test_the_pieces_of_a_table_are_all_its_rows_in_order():
    assert [*row_pieces(2**16 + 3)] == [(0, 2**16), (2**16, 2**16 + 3)] and [*row_pieces(0)] == []


@pytest.mark.parametrize(("num_classes", "world_size"), [(10, 3), (3, 3), (2, 3), (1, 1), (2_059_906, 8)])
def test_shards_cover_all_classes_and_the_first_ones_have_one_more(num_classes, world_size):
    shards = [shard_classes(num_classes, rank, world_size) for rank in range(world_size)]
    assert shards[0].start == 0 and shards[-1].stop == num_classes
    assert all(a.stop == b.start for a, b in zip(shards, shards[1:], strict=False))
    extra = num_classes % world_size
    assert [s.size for s in shards] == [num_classes // world_size + (r < extra) for r in range(world_size)]


def own_margin(cos, *, width=0.3):
    return torch.cos(torch.arccos(cos) + width)


def own_margin_of_norms(cos, norm):
    return cos - 0.01 * norm


def test_a_function_of_cosines_is_a_margin():
    cos = torch.linspace(-1, 1, 21, dtype=torch.float64)
    found = make_margin(own_margin, width=0.5, scale=30.0)
    expected = make_margin("combined", m1=1.0 + 1e-12, m2=0.5)
    for own, built_in in zip(found.apply(cos, None)[:2], expected.apply(cos, None)[:2], strict=True):
        torch.testing.assert_close(own[1:-1], built_in[1:-1])
        assert torch.isfinite(own).all(), "arccos has an infinite slope at cosines of 1 and -1"
    assert found.scale == 30 and not found.needs_norms


def test_a_function_of_cosines_and_norms_gets_the_norms_and_has_a_slope_by_them():
    cos, norm = torch.rand(5, dtype=torch.float64), torch.full((5,), 20.0, dtype=torch.float64)
    margin = make_margin(own_margin_of_norms)
    value, by_cos, by_norm = margin.apply(cos, norm)
    assert margin.needs_norms
    torch.testing.assert_close(value, cos - 0.2)
    assert by_cos.tolist() == [1.0] * 5 and by_norm.tolist() == [-0.01] * 5


def test_a_name_that_no_margin_has_is_refused_with_the_names_there_are():
    with pytest.raises(UsageError, match="cosfase.*cosface"):
        make_margin("cosfase")


def test_a_step_in_several_micro_batches_draws_the_margins_of_a_step_in_one():
    cos = torch.linspace(-0.9, 0.9, 8, dtype=torch.float64)
    whole, split = make_margin("elastic_cosface", seed=3), make_margin("elastic_cosface", seed=3)
    for margin in (whole, split):
        margin.begin_step(4)
    parts = []
    for part in cos.split([3, 5]):
        split.apply(cos, None)  # an evaluation
        split.update_averages(None, part)
        parts.append(split.apply(part, None).value_G)
    parts = torch.cat(parts)
    assert torch.equal(parts, whole.apply(cos, None).value_G)
    assert len((cos - parts).unique()) == 8
    split.begin_step(5)
    assert not torch.equal(split.apply(cos, None).value_G, whole.apply(cos, None).value_G)


def margin_with_a_scale(cos, *, scale=1.0):
    return cos * scale - 0.1


def test_an_own_margin_is_refused_for_options_that_it_lacks_and_may_have_any_names():
    with pytest.raises(UsageError, match="own_margin.*'widht'"):
        make_margin(own_margin, widht=0.4)
    common = {"scale": 64.0, "filter_threshold": 0.0, "seed": 0}
    found = own_margin_of(margin_with_a_scale, {"scale": 0.5}, common)
    assert found.scale == 64 and found.apply(torch.ones(1), None).value_G.item() == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda cos, norm, label: cos, "'label'"),
        (lambda: 0, "too many positional"),
        (lambda cos, norm=None: cos, r"norm=None .*remove the default"),
        (lambda cos, *, m: cos, "'m'"),
    ],
)
def test_an_own_margin_is_refused_for_arguments_that_it_would_not_get(function, fault):
    with pytest.raises(UsageError, match=f"<lambda>: .*{fault}"):
        make_margin(function)


def test_a_builtin_whose_arguments_are_unknown_is_refused():
    with pytest.raises(UsageError, match="the margin cos: no signature"):
        make_margin(torch.cos)


def test_arguments_with_a_default_are_options_and_not_norms():
    for function in (lambda cos, m=0.1: cos - m, lambda cos, *, m=None: cos, lambda *cos: cos[0]):
        assert not make_margin(function).needs_norms
    assert not make_margin(lambda cos, norm=None: cos - norm, norm=0.1).needs_norms


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda cos: (cos - 0.35).mean(), r"shape \(\) and torch.float32"),
        (lambda cos: cos[:2], r"shape \(2,\)"),
        (lambda cos: cos.double(), "float64"),
        (lambda cos: None, "NoneType"),
        (lambda cos: (cos, cos), "tuple"),
    ],
)
def test_an_own_margin_must_return_one_number_for_each_sample(function, found):
    with pytest.raises(UsageError, match=rf"the margin <lambda> maps 5 samples to .*{found}.*\(G,\)"):
        make_margin(function).apply(torch.rand(5), None)


def test_an_own_margin_without_a_gradient_is_refused():
    with pytest.raises(UsageError, match="^the margin <lambda> returns numbers without a gradient; "):
        make_margin(lambda cos: cos.detach() - 0.2).apply(torch.rand(5), None)


def test_messages_name_a_module_by_its_class():
    class NoArgument(torch.nn.Module):
        def forward(self):
            return 0

    with pytest.raises(UsageError, match="^the margin GLU maps 4 samples to "):
        make_margin(torch.nn.GLU(0)).apply(torch.rand(4), None)
    with pytest.raises(UsageError, match="^the margin NoArgument: "):
        make_margin(NoArgument())


def test_a_margin_with_a_penalty_gets_the_norms():
    class Penalty(Margin):
        def target(self, cos_G, norm_G):
            return cos_G

        def penalty(self, norm_G):
            return norm_G.mean() if self.scale == 1 else 2 * norm_G

    assert Penalty().needs_norms and not Margin.needs_norms
    value, slope = Penalty().norm_penalty(torch.ones(3))
    assert value.tolist() == slope.tolist() == [2, 2, 2]
    with pytest.raises(UsageError, match="the margin Penalty maps 3 samples"):
        Penalty(scale=1).norm_penalty(torch.ones(3))


def test_an_object_of_a_margin_and_a_module_of_arcface_torch_are_margins_of_ones_own():
    common = {"scale": 64.0, "filter_threshold": 0.0, "seed": 0}
    margin = make_margin("cosface", m3=0.2)
    assert own_margin_of(margin, {}, common) is margin

    class OfLogits(torch.nn.Module):
        s = 32.0

        def forward(self, logits, labels):
            return (logits - 0.1) * self.s

    found = own_margin_of(OfLogits(), {}, common)
    assert found.scale == 32 and found.apply(torch.ones(1), None).value_G.item() == pytest.approx(0.9)


def test_each_head_has_the_buffers_of_a_configs_margin_to_itself(monkeypatch):
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, cos):
            return cos - self.mean.lerp_(cos.mean(), 0.5)

    part = Mean()
    monkeypatch.setattr("facetrain.head.build.load_part", lambda place, key: part)
    first, second = (build_margin(margin_settings("my_margins:mean")) for _ in range(2))
    first.apply(torch.ones(2), None)
    assert [margin.state()["mean"].item() for margin in (first, second)] == [pytest.approx(0.5), 0]


def test_a_margin_that_cannot_be_copied_is_refused_by_its_key(monkeypatch):
    part = torch.nn.Identity()
    part.lock = threading.Lock()
    monkeypatch.setattr("facetrain.head.build.load_part", lambda place, key: part)
    with pytest.raises(
        ConfigError, match=r"^head\.margin\.type: my_margins:one cannot be copied \(.*lock.*own copy"
    ):
        build_margin(margin_settings("my_margins:one"))


def test_a_module_with_parameters_that_would_not_be_trained_is_no_margin():
    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.m = torch.nn.Parameter(torch.tensor(0.4))

        def forward(self, cos):
            return cos - self.m

    with pytest.raises(UsageError, match=r"^the margin Learned has parameters"):
        make_margin(Learned())
    assert make_margin(Learned().requires_grad_(False)).name == "Learned"


def test_a_class_that_is_no_margin_is_refused():
    class Other:
        def __init__(self, **options):
            pass

    with pytest.raises(UsageError, match=r"^the margin Other is a class, but not a subclass of .*\.Margin"):
        make_margin(Other)
