"""Steps of the quantization: which of them leave the network unchanged, and what the others gain."""

from dataclasses import replace

import pytest
import torch

from facetrain.models.int8.equalization import channel_ranges, equalize, pairs
from facetrain.models.int8.network import MAXIMUM, Int8Network, Range
from facetrain.models.int8.quantize import correct_biases, find_ranges, replace_prelus
from facetrain.models.layer_graph import Layer, LayerGraph
from tests.unit.models.int8.networks import folded, images


def float_error(network, other, image):
    expected = network.embed(image, rounds=False)
    return float((other.embed(image, rounds=False) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_equalization_changes_no_embedding_of_the_float_network(name):
    network, image = folded(name, torch.float64), images(dtype=torch.float64)
    equalized = equalize(network, channel_ranges(network, [image]))
    assert float_error(network, equalized, image) < 1e-10
    pair = next(iter(pairs(network.graph)))
    ranges = channel_ranges(equalized, [image])[pair.first]
    before = channel_ranges(network, [image])[pair.first]
    assert ranges.max() / ranges.min() < before.max() / before.min()


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_maxima_change_no_embedding_and_replace_prelus_with_slopes_over_one(name):
    network, image = folded(name, torch.float64), images(dtype=torch.float64)
    replaced = replace_prelus(network)
    assert float_error(network, replaced, image) < 1e-10
    kinds = [layer.kind for layer in replaced.graph.layers.values()]
    # The sum after the first PReLU of an IResNet takes its value too, so that its sign must stay.
    assert kinds.count("prelu") == (1 if name == "iresnet" else 0) and kinds.count(MAXIMUM) >= 4


def convolution(source, weight, bias):
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    return Layer("conv", (source,), {"weight": weight, "bias": bias}, options)


def test_equalization_keeps_a_channel_that_one_scale_for_all_channels_rounds_to_zero():
    # The first channel is between 0 and 1, the second one between 0 and 0.001: less than half of 1 / 255.
    first = convolution("image", torch.tensor([1.0, 0.001]).view(2, 1, 1, 1), torch.zeros(2))
    second = convolution("first", torch.tensor([[1.0, 1000.0]]).view(1, 2, 1, 1), torch.zeros(1))
    graph = LayerGraph("planted", {"first": first, "out": second}, "out")
    network = Int8Network(graph)
    image = torch.linspace(0, 1, 1024).view(1, 1, 32, 32)
    plain = find_ranges(network, [image])
    equalized = find_ranges(equalize(network, channel_ranges(network, [image])), [image])
    # Without the second channel, half of the output is missing. With it, three roundings are left.
    assert float((plain.embed(image) - 2 * image).abs().max()) > 0.9
    assert float((equalized.embed(image) - 2 * image).abs().max()) < 5 / 255


def test_equalization_halves_the_squared_error_of_random_networks():
    # Of one network, the ratio is between 0.3 and 0.6, and depends on how the processor rounds.
    image, errors = images(), torch.zeros(2)
    for seed in range(4):
        network = folded("mobilefacenet", seed=seed)
        expected = network.embed(image, rounds=False)
        equalized = equalize(network, channel_ranges(network, [image]))
        for n, variant in enumerate((network, equalized)):
            rounded = find_ranges(variant, [image]).embed(image)
            errors[n] += (rounded - expected).square().mean() / expected.square().mean()
    assert float(errors[1] / errors[0]) < 0.65


def test_bias_correction_removes_a_planted_shift():
    # One input channel of the constant 0.3, which rounds to 0.25: each output is too small by a sixth.
    layer = convolution("image", torch.ones(2, 1, 1, 1), torch.zeros(2))
    network = Int8Network(LayerGraph("planted", {"out": layer}, "out"))
    network = replace(network, ranges={"image": Range(0, 0.25 * 255), "out": Range(0, 0.01 * 255)})
    image = torch.full((4, 1, 3, 3), 0.3)
    assert float((network.embed(image) - 0.3).abs().max()) > 0.04
    corrected = correct_biases(network, image)
    assert float((corrected.embed(image) - 0.3).abs().max()) < 1e-6
    torch.testing.assert_close(corrected.graph.layers["out"].weights["bias"], torch.full((2,), 0.05))


def largest_shift(network, other, image):
    """Return the largest error of the mean of a channel, as a share of the largest number of its layer."""
    exact = dict(network.values(image, rounds=False))
    errors = [
        (value - exact[name]).transpose(0, 1).flatten(1).mean(1).abs().max() / exact[name].abs().max()
        for name, value in other.values(image, rounds=True)
        if name in other.int8_layers()
    ]
    return float(torch.stack(errors).max())


def test_bias_correction_gives_each_layer_the_mean_of_the_float_network():
    # In float32, a number in the middle of two levels can round to the other one in the second pass. It moves the mean
    # of a channel of 32 numbers by 1e-4. In float64 none does.
    network, image = folded("mobilefacenet", torch.float64), images(dtype=torch.float64)
    rounded = find_ranges(network, [image])
    assert largest_shift(network, rounded, image) > 1e-2
    assert largest_shift(network, correct_biases(rounded, image), image) < 1e-12


@pytest.mark.parametrize(("low", "high"), [(-1.3, 2.7), (0.0, 3.0), (-2.0, 0.0)])
def test_rounding_has_the_values_of_torch(low, high):
    interval, x = Range(low, high), torch.linspace(-4, 4, 10_001)
    expected = torch.fake_quantize_per_tensor_affine(x, interval.scale, interval.zero_point, 0, 255)
    assert torch.equal(interval.round(x), expected)


def test_ranges_contain_zero_and_all_numbers_of_all_batches():
    image = images(4).abs() + 1
    network = find_ranges(folded("iresnet"), image.split(1))
    assert network.ranges["image"] == Range(0.0, float(image.max()))
