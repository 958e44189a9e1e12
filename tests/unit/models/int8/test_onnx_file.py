"""ONNX graphs of folded layers, run by onnxruntime."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from facetrain.models.int8.network import weight_scales
from facetrain.models.int8.onnx_file import float_model, int8_model
from facetrain.models.int8.quantize import quantize, replace_prelus
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
    network, image = folded(name), images()
    network = replace(network, graph=replace(network.graph, takes_pixels=takes_pixels))
    image = image * 127.5 + 127.5 if takes_pixels else image
    network = replace_prelus(network) if maxima else network
    expected, found = network.embed(image, rounds=False), run(float_model(network, SIZE, 16)[0], image)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-5)


def tensors_of_onnxruntime(proto, names, image):
    """Return tensors of a file, computed as its nodes state: optimizations would remove some of them."""
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    found = session.run(names, {"image": np.ascontiguousarray(image.numpy())})
    return dict(zip(names, map(torch.from_numpy, found), strict=True)) | {"image": image}


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_each_simulated_layer_rounds_as_onnxruntime_does(name):
    quantized = quantize(replace_prelus(folded(name)), images())
    proto = int8_model(quantized, SIZE, 16)
    names = {value: value for value in quantized.graph.layers} | {quantized.graph.output: "embedding"}
    inputs = {node.name: node.input[0] for node in proto.graph.node if node.op_type in ("Conv", "Gemm")}
    found = tensors_of_onnxruntime(proto, [*names.values(), *inputs.values()], images())
    # Each layer by itself, because a number that rounds to the other neighbor changes all layers after it.
    for value, layer in quantized.int8_layers().items():
        source = layer.sources[0]
        rounded, scale = found[inputs[names[value]]], quantized.ranges[source].scale
        apart = (quantized.ranges[source].round(found[source]) - rounded.view_as(found[source])).abs()
        assert float(apart.max()) < 1.001 * scale and float((apart > 1e-3 * scale).double().mean()) < 1e-3
        simulated = quantized.value(value, [rounded], rounds=True)
        step = scale * float(weight_scales(layer.weights["weight"]).max())
        largest = float(simulated.abs().max())
        bound = 0.5 * step + 1e-5 * largest  # the rounded bias, and sums in another order
        assert bound < 1e-3 * largest
        assert float((found[names[value]] - simulated).abs().max()) <= bound, value


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_an_int8_file_gives_nearly_the_embeddings_of_the_float_network(name):
    network, image = replace_prelus(folded(name)), images(40)
    exact = network.embed(image, rounds=False)
    others = F.cosine_similarity(exact, exact.roll(1, 0))
    # The embeddings of this network differ, so that the last line is a test.
    assert float(others.mean()) < 0.3
    proto = int8_model(quantize(network, image[:32]), SIZE, 16)
    # As its nodes state: without VNNI, the sums of onnxruntime's int8 kernels may overflow.
    found = tensors_of_onnxruntime(proto, ["embedding"], image)["embedding"]
    assert float(F.cosine_similarity(exact, found).mean()) > 0.98


def test_onnxruntime_computes_all_convolutions_and_the_linear_layer_in_int8(tmp_path):
    network = replace_prelus(folded("mobilefacenet"))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that the file fits this machine only
    proto = int8_model(quantize(network, images()), SIZE, 16)
    onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    convolutions = sum(layer.kind == "conv" for layer in network.graph.layers.values())
    assert operators.count("QLinearConv") == convolutions and operators.count("QGemm") == 1
    assert "Conv" not in operators and "PRelu" not in operators
