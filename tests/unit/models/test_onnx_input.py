"""The input of ONNX files of other programs: what it means, and which inputs are refused."""

import json
import os
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from facetrain.data.formats.bin import write_bin
from facetrain.embeddings.embed_images import embed_input
from facetrain.embeddings.inference import Inference
from facetrain.errors import ModelError, UsageError
from facetrain.models import onnx_constants, onnx_limits
from facetrain.models.embedding_model import open_model
from facetrain.models.onnx_layers import read_onnx_layers
from facetrain.verify.evaluate import evaluate
from tests.support.faces import face
from tests.support.models import write_model

onnx = pytest.importorskip("onnx")
make_node, make_tensor = onnx.helper.make_node, onnx.helper.make_tensor_value_info
pytest.importorskip("onnxruntime")
CPU = torch.device("cpu")
COLOR, SPREAD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def constant(values):
    return np.array(values, np.float32).reshape((1, 3, 1, 1) if np.ndim(values) == 1 else ())


LAST = (("Relu", ("x",)), ("Flatten", ("x",)))


def write_graph(path, nodes, *, inputs, last=LAST, shape=None):
    """Write a graph of nodes (operator, inputs), with constants as arrays; `shape` is that of its output.

    A transpose has the order of the axes as a third element.
    """
    written, weights, value = [], [], "image"
    for number, (operator, taken, *order) in enumerate([*nodes, *last]):
        names = []
        for position, one in enumerate(taken):
            names.append(value if isinstance(one, str) else f"c{number}_{position}")
            if not isinstance(one, str):
                weights.append(onnx.numpy_helper.from_array(one, names[-1]))
        value = f"v{number}"
        written.append(make_node(operator, names, [value], **({"perm": order[0]} if order else {})))
    image, output = make_tensor("image", *inputs), make_tensor(value, inputs[0], shape)
    graph = onnx.helper.make_graph(written, "g", [image], [output], weights)
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=[opset]), path)
    return path


@contextmanager
def changed(path):
    """Open a file to change it; save it at the end."""
    model = onnx.load(path)
    yield model
    onnx.save(model, path)


def pixels():
    return torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).view(2, 4, 4, 3) * 2


def embedded(path):
    """Return the embeddings of `pixels`, and the pixels as float32 (B, 3, H, W)."""
    model = open_model(path, CPU)
    return model.network(model.prepare(pixels())), pixels().permute(0, 3, 1, 2).float()


FLOAT_IMAGE = (1, ["batch", 3, 4, 4])
TO_LAST, TO_FIRST = ("Transpose", ("x",), [0, 2, 3, 1]), ("Transpose", ("x",), [0, 3, 1, 2])
STEP = np.array(1, np.float32), np.array(0, np.uint8)
ROUNDED = [("QuantizeLinear", ("x", *STEP)), ("DequantizeLinear", ("x", *STEP))]
RED_LAST = ("Slice", ("x", *(np.array([number]) for number in (-1, -4, 1, -1))))
CENTER = [("Sub", ("x", constant(127.5))), ("Div", ("x", constant(128)))]


NEAR_0 = torch.tensor([0.1, 0, -0.1]).view(1, 3, 1, 1)


def batch_norm(mean, variance):
    values = np.ones(3), np.zeros(3), mean, variance
    return "BatchNormalization", ("x", *(np.asarray(one, np.float32) for one in values))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([("Sub", ("x", constant([127.5] * 3))), ("Div", ("x", constant([128] * 3)))], lambda x: (x - 127.5) / 128),
        ([("Mul", (constant(1 / 127.5), "x")), ("Add", (constant([-1] * 3), "x"))], lambda x: x / 127.5 - 1),
        ([TO_LAST, *CENTER, TO_FIRST], lambda x: (x - 127.5) / 128),
        ([RED_LAST, *CENTER], lambda x: (x.flip(1) - 127.5) / 128),
        ([*ROUNDED, *CENTER], lambda x: (x - 127.5) / 128),
        ([TO_LAST, ("Clip", ("x", constant(0), constant(255))), TO_FIRST, *CENTER], lambda x: (x - 127.5) / 128),
        # These take normalized pixels.
        ([batch_norm((0.1, 0, -0.1), (0.2, 0.2, 0.2))], lambda x: (x / 127.5 - 1 - NEAR_0) / (0.2 + 1e-5) ** 0.5),
        ([], lambda x: x / 127.5 - 1),
    ],
)  # fmt: skip
def test_a_graph_that_normalizes_exactly_as_published_networks_gets_pixels(tmp_path, nodes, expected):
    found, x = embedded(write_graph(tmp_path / "m.onnx", nodes, inputs=FLOAT_IMAGE))
    torch.testing.assert_close(found, expected(x).relu().flatten(1), rtol=1e-5, atol=1e-5)


def test_the_length_of_the_embeddings_is_known_of_a_file_that_does_not_state_it(tmp_path):
    path = write_graph(tmp_path / "m.onnx", [], inputs=(1, ["batch", 3, "height", "width"]))
    opened = open_model(path, CPU)
    assert (opened.image_size, opened.embedding_size) == (112, 3 * 112 * 112)


def test_the_operator_that_takes_pixels_before_they_are_centered_is_named(tmp_path):
    path = write_graph(tmp_path / "m.onnx", [RED_LAST, *CENTER], inputs=FLOAT_IMAGE)
    with pytest.raises(ModelError, match="its first layer, Slice, takes pixels times 1 plus 0"):
        read_onnx_layers(path)


def dequantized(name, number):
    """Return a node with the integer 255 for a number, and its weights."""
    values = np.array(255, np.uint8), np.array(number / 255, np.float32), np.array(0, np.uint8)
    weights = [onnx.numpy_helper.from_array(value, f"{name}{place}") for place, value in enumerate(values)]
    return make_node("DequantizeLinear", [weight.name for weight in weights], [name]), weights


@pytest.mark.parametrize("place", ["function", "product", "integers"])
def test_numbers_that_the_file_computes_normalize_pixels(tmp_path, place):
    path = write_graph(tmp_path / "m.onnx", CENTER, inputs=FLOAT_IMAGE)
    with changed(path) as model:
        graph = model.graph
        center, spread, *last = graph.node
        if place == "function":
            opset = [onnx.helper.make_opsetid("", 17)]
            body = onnx.helper.make_function(
                "own", "Center", ["image", "c0_1", "c1_1"], ["v1"], [center, spread], opset
            )
            model.functions.append(body)
            model.opset_import.append(onnx.helper.make_opsetid("own", 1))
            computed = [make_node("Center", ["image", "c0_1", "c1_1"], ["v1"], domain="own")]
        elif place == "product":
            graph.initializer.append(onnx.numpy_helper.from_array(constant([127.5 / 255] * 3), "mean"))
            states_255 = make_node("Constant", [], ["255"], value=onnx.numpy_helper.from_array(constant(255)))
            center.input[1] = "computed mean"
            computed = [states_255, make_node("Mul", ["mean", "255"], ["computed mean"]), center, spread]
        else:
            center.input[1], (first, weights) = "mean", dequantized("mean", 127.5)
            spread.input[1], (second, others) = "spread", dequantized("spread", 128)
            graph.initializer.extend([*weights, *others])
            computed = [first, second, center, spread]
        nodes = [*computed, *last]
        del graph.node[:]
        graph.node.extend(nodes)
    found, x = embedded(path)
    torch.testing.assert_close(found, ((x - 127.5) / 128).relu().flatten(1))


@pytest.mark.parametrize(
    "nodes",
    [
        [("QuantizeLinear", ("x", *STEP)), ("QLinearMul", ("x", *STEP, STEP[1], *STEP, *STEP))],
        [("Sum", ("x", constant(-127.5))), ("Div", ("x", constant(127.5)))],
        [("Neg", ("x",))],
        [("Pow", ("x", constant(2)))],
    ],
)
def test_arithmetic_whose_numbers_are_not_read_needs_metadata(tmp_path, nodes):
    path = write_graph(tmp_path / "m.onnx", nodes, inputs=FLOAT_IMAGE)
    with pytest.raises(ModelError, match=r" x · nan .*metadata"):
        open_model(path, CPU)


@pytest.mark.parametrize("means", [(127.5, 127.5, 127.5), (103.53, 116.28, 123.675)])
def test_a_graph_that_normalizes_channel_by_channel_gets_pixels_or_needs_metadata(tmp_path, means):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    nodes = [make_node("Split", ["image"], ["red", "green", "blue"], axis=1)]
    for channel, mean in zip(("blue", "green", "red"), means, strict=True):
        nodes += [
            make_node("Constant", [], [f"mean of {channel}"], value_float=mean),
            make_node("Sub", [channel, f"mean of {channel}"], [f"{channel} around 0"]),
            make_node("Div", [f"{channel} around 0", "spread"], [f"normalized {channel}"]),
        ]
    given = [f"normalized {channel}" for channel in ("blue", "green", "red")]
    with changed(path) as model:
        model.graph.node[0].input[0] = "swapped"
        spread = make_node("Constant", [], ["spread"], value_float=127.5)
        for node in reversed([spread, *nodes, make_node("Concat", given, ["swapped"], axis=1)]):
            model.graph.node.insert(0, node)
    if len(set(means)) > 1:
        with pytest.raises(ModelError, match=r"m\.onnx: .* x · .*metadata"):
            open_model(path, CPU)
        return
    found, x = embedded(path)
    torch.testing.assert_close(found, (x.flip(1) / 127.5 - 1).relu().flatten(1))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"mean": 0, "scale": 1}, lambda x: x),
        ({"mean": 127.5, "scale": 127.5, "channels": "RGB"}, lambda x: (x - 127.5) / 127.5),
        ({"side": 4}, lambda x: (x - 127.5) / 127.5),
        ("divide by 128", lambda x: (x - 127.5) / 127.5),
        ({"mean": 0, "scale": 255}, lambda x: x / 255),
        ({"mean": 0, "scale": 256}, None),
        ({"mean": 127.5, "scale": 127.5, "channels": "BGR"}, None),
        ({"channels": "BGR"}, None),
        ({"mean": 0, "std": 1}, None),
    ],
)
def test_the_input_that_the_metadata_state_is_given_or_refused(tmp_path, stated, expected):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    with changed(path) as model:
        onnx.helper.set_model_props(model, {"preprocessing": json.dumps(stated)})
    if expected is None:
        for read in (partial(open_model, device=CPU), read_onnx_layers):
            with pytest.raises(ModelError, match=r"preprocessing.* mean 0 "):
                read(path)
        return
    found, x = embedded(path)
    torch.testing.assert_close(found, expected(x).relu().flatten(1), rtol=1e-5, atol=1e-5)
    if expected(0) == 0:
        with pytest.raises(ModelError, match=r"times (1|0.0039\d*) plus 0"):
            read_onnx_layers(path)
    else:
        assert read_onnx_layers(path).input_scale == 1


def test_a_graph_with_number_formats_of_its_own_is_not_run_in_bfloat16(tmp_path):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    write_model(tmp_path / "m.safetensors")
    (tmp_path / "face.png").write_bytes(face(0, size=32))
    write_bin(tmp_path / "pairs.bin", [face(number, size=32) for number in range(4)], [True, False])
    bf16, embedded = Inference("cpu", bf16=True), []
    for run in (
        partial(embed_input, path, tmp_path / "face.png", bf16),
        partial(evaluate, path, ["pairs"], tmp_path, inference=bf16),
        partial(evaluate, tmp_path / "m.safetensors", ["pairs"], tmp_path, against=path, inference=bf16),
    ):
        with pytest.raises(UsageError, match=r"m\.onnx.*: has number formats of its own; remove --bf16"):
            run(progress=lambda *done: embedded.append(done))
    assert not embedded


def test_an_image_that_would_be_normalized_twice_is_refused(tmp_path):
    path = write_graph(tmp_path / "m.onnx", CENTER, inputs=FLOAT_IMAGE)
    with changed(path) as model:
        onnx.helper.set_model_props(model, {"preprocessing": json.dumps({"mean": 127.5, "scale": 127.5})})
    with pytest.raises(ModelError, match="m.onnx: .*twice"):
        open_model(path, CPU)


def test_a_shape_of_half_normalized_pixels_is_no_layer(tmp_path):
    nodes = [("Mul", ("x", constant(1 / 127.5))), ("Reshape", ("x", "x")), ("Sub", ("x", constant(1)))]
    path = write_graph(tmp_path / "m.onnx", nodes, inputs=FLOAT_IMAGE)
    with changed(path) as model:
        model.graph.node[1].input[1] = "shape"
        model.graph.node.insert(1, make_node("Shape", ["v0"], ["shape"]))
    found, x = embedded(path)
    torch.testing.assert_close(found, (x / 127.5 - 1).relu().flatten(1))


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [([TO_LAST, *CENTER, TO_FIRST], FLOAT_IMAGE), ([TO_FIRST, *CENTER], (1, ["batch", 4, 4, 3]))],
)
def test_layers_behind_a_transpose_take_normalized_pixels(tmp_path, nodes, inputs):
    last = [("Conv", ("x", np.ones((8, 3, 4, 4), np.float32))), ("Flatten", ("x",))]
    path = write_graph(tmp_path / "m.onnx", nodes, inputs=inputs, last=last)
    graph = read_onnx_layers(path)
    assert [layer.kind for layer in graph.layers.values()] == ["conv"]
    assert graph.input_scale == pytest.approx(127.5 / 128)


def test_layers_take_constants_that_are_numbers_or_that_nodes_compute(tmp_path):
    weight, slope = np.ones((8, 3, 4, 4), np.float16), np.arange(8, dtype=np.float32)
    last = [("Conv", ("x", weight)), ("PRelu", ("x", slope)), ("Flatten", ("x",))]
    path = write_graph(tmp_path / "m.onnx", CENTER, inputs=FLOAT_IMAGE, last=last)
    computed = [
        make_node("Constant", [], ["center"], value_float=127.5),
        make_node("Constant", [], ["spread"], value_floats=[128.0]),
        make_node("Cast", ["c2_1"], ["weight"], to=onnx.TensorProto.FLOAT),
        make_node("Constant", [], ["axes"], value_ints=[1, 2]),
        make_node("Unsqueeze", ["c3_1", "axes"], ["slope"]),
    ]
    with changed(path) as model:
        for node, name in zip(model.graph.node, ("center", "spread", "weight", "slope"), strict=False):
            node.input[1] = name
        for node in reversed(computed):
            model.graph.node.insert(0, node)
    assert open_model(path, CPU).preprocessing["scale"] == 1
    graph = read_onnx_layers(path)
    conv, prelu = graph.layers.values()
    assert graph.input_scale == pytest.approx(127.5 / 128)
    assert conv.weights["weight"].shape == weight.shape
    assert prelu.weights["weight"].tolist() == slope.tolist()


@pytest.mark.parametrize(
    "nodes",
    [
        [("Sub", ("x", constant(COLOR))), ("Div", ("x", constant(SPREAD)))],
        [("Div", ("x", constant(255)))],
        [("Sub", (constant(127.5), "x"))],
        [batch_norm(COLOR, np.square(SPREAD))],
        [("Mul", ("x", constant(0)))],
        [("Div", (constant(1), "x"))],
        [("Mul", ("x", "x"))],
    ],
)
def test_a_graph_with_other_arithmetic_needs_metadata(tmp_path, nodes):
    path = write_graph(tmp_path / "m.onnx", nodes, inputs=FLOAT_IMAGE)
    with pytest.raises(ModelError, match=r" x · .*metadata"):
        open_model(path, CPU)
    with changed(path) as model:
        onnx.helper.set_model_props(model, {"preprocessing": json.dumps({"mean": 0, "scale": 1})})
    assert open_model(path, CPU).preprocessing["scale"] == 1


def test_a_graph_that_rescales_normalized_images_takes_them(tmp_path):
    # A network for (x − 127.5) / 128 that was changed to take (x − 127.5) / 127.5.
    path = write_graph(tmp_path / "m.onnx", [("Mul", ("x", constant(127.5 / 128)))], inputs=FLOAT_IMAGE)
    found, x = embedded(path)
    torch.testing.assert_close(found, ((x - 127.5) / 128).relu().flatten(1))


@pytest.mark.parametrize("kind", [1, 10])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("batch", ["batch", 3])
def test_images_are_given_in_the_type_and_layout_of_the_input(tmp_path, kind, channels_last, batch):
    shape = [batch, 4, 4, 3] if channels_last else [batch, 3, 4, 4]
    path = write_graph(tmp_path / "m.onnx", [], inputs=(kind, shape), shape=[batch, 48])
    found, x = embedded(path)
    x = ((x - 127.5) / 127.5).relu()
    expected = (x.permute(0, 2, 3, 1) if channels_last else x).flatten(1)
    torch.testing.assert_close(found, expected, atol=1e-3 if kind == 10 else 1e-6, rtol=0)
    assert found.dtype == torch.float32 and open_model(path, CPU).embedding_size == 48


def test_embeddings_may_be_images_of_one_pixel(tmp_path):
    weight = np.ones((8, 3, 1, 1), np.float32)
    last = [("Conv", ("x", weight)), ("GlobalAveragePool", ("x",))]
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE, last=last, shape=["batch", 8, 1, 1])
    found, x = embedded(path)
    mean_B = ((x - 127.5) / 127.5).sum(1).mean((1, 2))
    torch.testing.assert_close(found, mean_B[:, None].expand(-1, 8))
    assert open_model(path, CPU).embedding_size == 8


ROWS_OF_ANCHORS = [("Transpose", ("x",), [0, 2, 3, 1]), ("Reshape", ("x", np.array([-1, 12], np.int64)))]
ONE_NUMBER = [("GlobalMaxPool", ("x",)), ("Flatten", ("x",)), ("ReduceMax", ("x", np.array([1], np.int64)))]


@pytest.mark.parametrize("last", [ROWS_OF_ANCHORS, ONE_NUMBER])
@pytest.mark.parametrize("batch", ["batch", 1])
def test_a_network_without_one_embedding_for_each_image_is_refused(tmp_path, last, batch):
    path = write_graph(tmp_path / "det.onnx", [], inputs=(1, [batch, 3, 4, 4]), last=last, shape=["n", "d"])
    with changed(path) as model:
        model.opset_import[0].version = 18
    with pytest.raises(ModelError, match=r"det\.onnx"):
        embedded(path)


def test_a_network_that_was_traced_with_one_image_embeds_several(tmp_path, capfd):
    last = [("Reshape", ("x", np.array([1, 48], np.int64)))]
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE, last=last, shape=["batch", 48])
    found, x = embedded(path)
    torch.testing.assert_close(found, (x / 127.5 - 1).flatten(1))
    assert capfd.readouterr().err == "", "onnxruntime's own lines"


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"inputs": (1, ["batch", 3, 8, 6])}, r"maps image \(tensor\(float\) batch × 3 × 8 × 6\) to v1 .*; facetrain"),
        ({"inputs": (1, ["batch", 1, 8, 8])}, "square RGB images as float or uint8, N × 3 × H × H or N × H × H × 3"),
        ({"inputs": (1, [None, 3, 8])}, r"\? × 3 × 8\) to"),
        ({"inputs": (11, ["batch", 3, 8, 8])}, r"maps image \(tensor\(double\)"),
        (
            {"inputs": FLOAT_IMAGE, "last": LAST[:1], "shape": ["batch", 3, 4, 4]},
            r"to v0 \(tensor\(float\) batch × 3 × 4 × 4\); .* embeddings as float, N × D: export the network",
        ),
    ],
)  # fmt: skip
def test_a_graph_that_maps_no_square_images_to_embeddings_is_refused(tmp_path, graph, message):
    with pytest.raises(ModelError, match=message):
        open_model(write_graph(tmp_path / "m.onnx", [], **graph), CPU)


def test_a_network_that_gives_quantized_embeddings_is_refused(tmp_path):
    last = [*LAST, ("QuantizeLinear", ("x", *STEP))]
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE, last=last, shape=["batch", 48])
    with changed(path) as model:
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    with pytest.raises(ModelError, match=r"to v2 \(tensor\(uint8\) batch × 48\); .* embeddings as float"):
        open_model(path, CPU)


def test_a_fixed_batch_may_be_as_large_as_free_ones(tmp_path):
    weight = np.zeros((64, 3, 1, 1), np.float32)
    last = [("Conv", ("x", weight)), ("GlobalAveragePool", ("x",)), ("Flatten", ("x",))]
    path = write_graph(tmp_path / "m.onnx", [], inputs=(1, [96, 3, 112, 112]), last=last, shape=[96, 64])
    assert open_model(path, CPU).embedding_size == 64


def test_a_weight_that_is_listed_as_a_value_may_be_large(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_limits, "_MAX_VALUE_BYTES", 1 << 12)
    weight = np.ones((64, 3, 4, 4), np.float32)
    last = [("Conv", ("x", weight)), ("Flatten", ("x",))]
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE, last=last)
    with changed(path) as model:
        model.graph.value_info.append(make_tensor("c0_1", 1, weight.shape))
    assert embedded(path)[0].shape == (2, 64)


@pytest.mark.parametrize("fault", ["cut", "offset", "far"])
def test_weights_whose_data_beside_the_file_is_incomplete_are_refused(tmp_path, capfd, fault):
    path = write_graph(tmp_path / "m.onnx", CENTER, inputs=FLOAT_IMAGE)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w", size_threshold=0)
    assert embedded(path)[0].shape == (2, 48)
    model = onnx.load(path, load_external_data=False)
    *_, last = model.graph.initializer
    offset = next(entry for entry in last.external_data if entry.key == "offset")
    if fault == "cut":
        os.truncate(tmp_path / "w", int(offset.value) + 2)
    else:
        offset.value = {"offset": "-8", "far": "9" * 18}[fault]
        path.write_bytes(model.SerializeToString())
    has = 2 if fault == "cut" else 0
    with pytest.raises(
        ModelError, match=rf"the weight c1_1 .* 4 bytes, but its data has at most {has}; the file is"
    ):
        open_model(path, CPU)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("is_weight", [True, False])
def test_a_value_of_very_many_dimensions_is_refused(tmp_path, is_weight):
    path = write_graph(tmp_path / "m.onnx", CENTER, inputs=FLOAT_IMAGE)
    with changed(path) as model:
        if is_weight:
            model.graph.initializer[0].dims.extend([1] * 43)
        else:
            model.graph.value_info.append(make_tensor("v0", 1, [1] * 43))
    with pytest.raises(ModelError, match=r"the value (c0_1|v0) has 43 dimensions; the limit is 32"):
        open_model(path, CPU)


def largest_of_constant(shape, output):
    """Nodes that compute a constant of this shape from a few bytes, and then one number of it."""
    value = onnx.helper.make_tensor("", 1, [1], [1.0])
    constant = make_node("ConstantOfShape", [shape], [f"{output}_large"], value=value)
    return [constant, make_node("ReduceMax", [f"{output}_large"], [output], keepdims=0)]


@pytest.mark.parametrize("place", ["graph", "function", "branch"])
def test_a_large_value_is_refused_wherever_the_file_computes_it(tmp_path, place):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    with changed(path) as model:
        graph = model.graph
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([700_000_000]), "size"))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "always"))
        if place == "graph":
            graph.node.extend(largest_of_constant("size", "big"))
        elif place == "function":
            opset = [onnx.helper.make_opsetid("", 17)]
            body = onnx.helper.make_function("own", "F", ["n"], ["b"], largest_of_constant("n", "b"), opset)
            model.functions.append(body)
            model.opset_import.append(onnx.helper.make_opsetid("own", 1))
            graph.node.append(make_node("F", ["size"], ["big"], domain="own"))
        else:
            # Shapes that depend on a constant outside of the branch are not inferred.
            size = onnx.numpy_helper.from_array(np.array([700_000_000]))
            branches = [
                onnx.helper.make_graph(
                    [make_node("Constant", [], [f"n_{name}"], value=size), *largest_of_constant(f"n_{name}", name)],
                    name, [], [make_tensor(name, 1, [])],
                )
                for name in ("then", "other")
            ]  # fmt: skip
            graph.node.append(
                make_node("If", ["always"], ["big"], then_branch=branches[0], else_branch=branches[1])
            )
    with pytest.raises(ModelError, match=r"has the shape 700000000, 2,800,000,000 bytes"):
        open_model(path, CPU)


@pytest.mark.parametrize(
    ("operator", "operands"),
    [
        ("Mul", ([70_000], [10_000])),
        ("Neg", ([-700_000_000],)),
        ("ReduceProd", ([70_000, 10_000],)),
        ("Pow", ([26_500], [2])),
        ("Sub", ([700_000_007], [7])),
    ],
)
def test_a_size_that_the_file_computes_is_known(tmp_path, operator, operands):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    with changed(path) as model:
        names = [f"operand{number}" for number in range(len(operands))]
        for name, values in zip(names, operands, strict=True):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
        model.graph.node.extend([make_node(operator, names, ["size"]), *largest_of_constant("size", "big")])
    with pytest.raises(ModelError, match=r"has the shape 70\d{7}, 2,8\d\d,\d{3},\d{3} bytes"):
        open_model(path, CPU)


def test_a_graph_without_an_output_is_damaged(tmp_path):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    with changed(path) as model:
        del model.graph.output[:]
    with pytest.raises(ModelError, match=r"m\.onnx: .*; the file is damaged or incomplete: copy it again$"):
        open_model(path, CPU)


@pytest.mark.parametrize(
    ("most", "message"), [(0, "more than 0 nodes compute"), (9, "does not run|cannot|Add")]
)
def test_constants_that_are_too_many_or_do_not_fit_are_an_error(tmp_path, monkeypatch, most, message):
    monkeypatch.setattr(onnx_constants, "_MOST_NODES", most)
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    with changed(path) as model:
        for name, values in (("a", [1, 2]), ("b", [1, 2, 3])):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), name))
        model.graph.node.extend([make_node("Neg", ["a"], ["c"]), make_node("Add", ["c", "b"], ["size"])])
        model.graph.node.extend(largest_of_constant("size", "big"))
    with pytest.raises(ModelError, match=message):
        open_model(path, CPU)


def test_a_sum_over_no_numbers_is_not_computed(tmp_path, monkeypatch):
    computed = []
    monkeypatch.setattr(onnx_constants, "_computed", lambda *node: computed.append(node))
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    with changed(path) as model:
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros((0, 1 << 12), np.float32), "none")
        )
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axes"))
        model.graph.node.append(make_node("ReduceSum", ["none", "axes"], ["big"], keepdims=0))
        onnx_constants.plain_form(path, model)
    assert not computed


def test_small_numbers_that_the_file_computes_change_no_result(tmp_path):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    expected = embedded(path)[0]
    with changed(path) as model:
        add = model.graph.initializer.append
        add(onnx.numpy_helper.from_array(np.array([2, -3]), "a"))
        add(onnx.numpy_helper.from_array(np.array([1]), "axes"))
        last = model.graph.output[0].name
        model.graph.node.extend([
            make_node("Neg", ["a"], ["b"]), make_node("Abs", ["b"], ["size"]),
            make_node("ConstantOfShape", ["size"], ["zeros"]), make_node("ReduceMax", ["zeros"], ["zero"], keepdims=0),
            make_node("Add", [last, "zero"], ["embedding"]),
        ])  # fmt: skip
        model.graph.output[0].name = "embedding"
    torch.testing.assert_close(embedded(path)[0], expected, rtol=0, atol=0)


def test_weights_that_are_listed_as_inputs_are_opened_without_a_message_for_each(tmp_path, capfd):
    path = write_graph(tmp_path / "m.onnx", CENTER, inputs=FLOAT_IMAGE)
    with changed(path) as model:
        for weight in model.graph.initializer:
            model.graph.input.append(make_tensor(weight.name, weight.data_type, weight.dims))
    assert embedded(path)[0].shape == (2, 48)
    assert capfd.readouterr().err == ""


def test_a_further_input_is_refused(tmp_path):
    path = write_graph(tmp_path / "m.onnx", [], inputs=FLOAT_IMAGE)
    with changed(path) as model:
        model.graph.input.append(make_tensor("phase", 1, [1]))
    with pytest.raises(ModelError, match=r"maps image .*, phase \(tensor\(float\) 1\) to"):
        open_model(path, CPU)


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x08\x08"])
def test_a_file_that_is_no_onnx_file_is_refused_without_the_words_of_protobuf(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    for read in (lambda path: open_model(path, CPU), read_onnx_layers):
        with pytest.raises(
            ModelError, match=r"m\.onnx: is not an ONNX file, or is damaged or incomplete; copy it again"
        ):
            read(path)


def test_a_graph_that_does_not_run_on_images_is_reported_in_one_line(tmp_path):
    last = [("Relu", ("x",)), ("Mul", ("x", np.ones((5, 5), np.float32))), ("Flatten", ("x",))]
    path = write_graph(tmp_path / "m.onnx", [], inputs=(1, ["batch", 3, "h", "w"]), last=last)
    with pytest.raises(ModelError, match="onnxruntime.* 1 × 3 × 4 × 4") as refused:
        open_model(path, CPU).network(torch.zeros(2, 3, 4, 4))
    assert "\n" not in str(refused.value)


def test_a_batch_of_no_images_is_refused_with_the_shape(tmp_path):
    path = write_graph(tmp_path / "m.onnx", [], inputs=(1, [0, 3, 4, 4]), shape=[0, 48])
    with pytest.raises(ModelError, match=r"m\.onnx: .* 3 × 4 × 4"):
        embedded(path)
