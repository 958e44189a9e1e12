"""ONNX graphs of folded layers, run by onnxruntime."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from facetrain.models.int8.maxima import replace_prelus
from facetrain.models.int8.onnx_file import float_model, int8_model
from facetrain.models.int8.quantize import quantize
from tests.unit.models.int8.networks import SIZE, folded, images

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def run(proto, image):
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"image": np.ascontiguousarray(image.numpy())})[0])


@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("takes_pixels", [False, True])
@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_the_float_graph_gives_the_embeddings_of_the_layers(name, takes_pixels, maxima):
    network, image = replace(folded(name), takes_pixels=takes_pixels), images()
    image = image * 127.5 + 127.5 if takes_pixels else image
    network = replace_prelus(network) if maxima else network
    expected = network.embed(image, rounds=False)
    torch.testing.assert_close(
        run(float_model(network, SIZE, 16)[0], image),
        expected,
        rtol=1e-4,
        atol=float(expected.abs().max()) * 1e-5,
    )


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_the_simulation_rounds_as_onnxruntime_does(name):
    network, image = replace_prelus(folded(name)), images(16)
    quantized = quantize(network, image)
    found = run(int8_model(quantized, SIZE, 16), image)
    simulated, exact = quantized.embed(image), network.embed(image, rounds=False)
    # A sum in another order can round to the neighboring level, so that they are not equal bit for bit.
    apart = 1 - F.cosine_similarity(found, simulated)
    lost = 1 - F.cosine_similarity(exact, simulated)
    assert float(apart.median()) < 0.2 * float(lost.median())
    assert float(apart.max()) < float(lost.median())


def test_all_convolutions_and_the_linear_layer_compute_in_int8_and_sums_are_rounded_for_them_only(tmp_path):
    network = replace_prelus(folded("mobilefacenet"))
    proto = int8_model(quantize(network, images()), SIZE, 16)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that the file fits this machine only
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    operators = [node.op_type for node in nodes]
    kinds = [layer.kind for layer in network.graph.layers.values()]
    assert operators.count("QLinearConv") == kinds.count("conv") and operators.count("QGemm") == 1
    assert "Conv" not in operators and "PRelu" not in operators
    made_by = {node.output[0]: node.op_type for node in nodes}
    sums = [node for node in nodes if node.op_type == "Add"]
    assert len(sums) == kinds.count("add") > 2
    # A sum takes a branch, which a convolution computed in int8, and the shortcut as it was before the rounding.
    assert any({made_by[name] for name in node.input} == {"DequantizeLinear", "Add"} for node in sums)


def test_layers_in_float_are_not_rounded():
    network = folded("mobilefacenet")
    network = replace(network, float_layers=frozenset({"layers.0.layers.0"}))
    quantized = quantize(network, images())
    assert "image" not in quantized.ranges
    proto = int8_model(quantized, SIZE, 16)
    (first,) = (node for node in proto.graph.node if node.name == "layers.0.layers.0")
    assert first.input[:2] == ["image", "layers.0.layers.0.weight"]
