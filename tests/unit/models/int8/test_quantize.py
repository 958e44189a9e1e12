"""Steps of the quantization: which of them leave the network unchanged, and what the others gain."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from facetrain.models.int8.bias_correction import correct_biases
from facetrain.models.int8.equalization import channel_ranges, equalize, pairs
from facetrain.models.int8.maxima import replace_prelus
from facetrain.models.int8.network import MAXIMUM, Int8Network, Range
from facetrain.models.int8.quantize import quantize
from facetrain.models.int8.ranges import find_ranges
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


def test_equalization_gains_accuracy_if_the_channels_have_different_ranges():
    network, image = folded("mobilefacenet"), images()
    expected = network.embed(image, rounds=False)
    plain = find_ranges(network, [image])
    equalized = find_ranges(equalize(network, channel_ranges(network, [image])), [image])
    errors = [float((one.embed(image) - expected).square().mean()) for one in (plain, equalized)]
    assert errors[1] < 0.8 * errors[0]


def one_convolution(weight, bias):
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    layer = Layer("conv", ("image",), {"weight": weight, "bias": bias}, options)
    return Int8Network(LayerGraph("planted", {"out": layer}, "out"), takes_pixels=False)


def test_bias_correction_removes_a_planted_shift():
    # One input channel of the constant 0.3, which rounds to 0.25: each output is too small by a sixth.
    network = one_convolution(torch.ones(2, 1, 1, 1), torch.zeros(2))
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


@pytest.mark.parametrize(("size", "lowest", "highest"), [(1000, 0.9, 1.6), (100, 2.9, 3.0)])
def test_a_range_leaves_out_a_large_number_only_if_the_squared_error_becomes_smaller(size, lowest, highest):
    # A range up to h moves the number 3 by 3 - h, and each of size² numbers by (h / 255)² / 12 on average (squared).
    # The best h is 1.3 for a million numbers and 2.96 for ten thousand.
    image = torch.rand(1, 1, size, size, generator=torch.Generator().manual_seed(0))
    image[0, 0, 0, 0] = 3.0
    network = one_convolution(torch.ones(1, 1, 1, 1), torch.zeros(1))
    whole, clipped = (find_ranges(network, [image], clips=clips).ranges["image"] for clips in (False, True))
    assert whole.high == 3.0 and lowest <= clipped.high <= highest


def test_quantized_embeddings_point_where_those_of_the_float_network_do():
    network, image = replace_prelus(folded("mobilefacenet")), images(64)
    calibration, others = image[:32], image[32:]
    exact = network.embed(others, rounds=False)
    lost, lost_by_minmax = (
        float(1 - F.cosine_similarity(exact, one.embed(others)).mean())
        for one in (quantize(network, calibration), find_ranges(network, [calibration], clips=False))
    )
    assert lost < 0.02 and lost < 0.9 * lost_by_minmax
