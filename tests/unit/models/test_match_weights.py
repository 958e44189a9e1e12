"""Networks that go on from the weights of MXNet's and ONNX files."""

import json

import numpy as np
import pytest
import torch

from facetrain.backbone.iresnet import LAYERS
from facetrain.backbone.zoo import build_backbone
from facetrain.data.augment import normalize
from facetrain.errors import ModelError
from facetrain.models.export.onnx import export_onnx
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import describe_backbone, open_model, save_model
from tests.support.mxnet_files import shaken, write_iresnet

CPU = torch.device("cpu")
NARROW = {"layers": (2, 1, 1, 1), "widths": (8, 8, 16, 16), "embedding_size": 16, "image_size": 112}


def images(count=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 112, 112, 3), dtype=torch.uint8, generator=generator)


def never():
    raise AssertionError("the file has all statistics")


def assert_embeds_as_eval(network, path, *, unit=False):
    """Hold a network against what `facetrain eval` makes of the file, whose embeddings may have length 1."""
    opened = open_model(path, CPU)
    with torch.no_grad():
        expected = opened.network.eval()(opened.prepare(images()))
        found = network.eval()(normalize(images()))
    found = torch.nn.functional.normalize(found) if unit else found
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", ["r18", "r100"])
def test_an_mxnet_iresnet_is_taken_over_by_ours(tmp_path, name):
    torch.manual_seed(0)
    options = {"layers": LAYERS[name], "widths": (4, 4, 8, 8), "embedding_size": 16}
    net = shaken(build_backbone("iresnet", **options), eps=2e-5)
    path, ours = write_iresnet(tmp_path, net), build_backbone("iresnet", **options)
    initialize_backbone(ours, path, never)
    assert_embeds_as_eval(ours, path)
    assert torch.equal(ours.features.weight, torch.ones(16)), "the fixed gamma's 7 counts for nothing"
    again = build_backbone("iresnet", **options, dropout=0.4, checkpoint_activations=True)
    initialize_backbone(again, tmp_path / "model-0000.params", never)
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in ours.state_dict().items())


def exported(tmp_path, name, options, **how):
    torch.manual_seed(0)
    net = shaken(build_backbone(name, **options))
    save_model(tmp_path / "m.safetensors", net.state_dict(), describe_backbone(name, **options))
    export_onnx(open_model(tmp_path / "m.safetensors", CPU), tmp_path / "m.onnx", **how)
    return tmp_path / "m.onnx"


@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("iresnet", NARROW, {"from_pixels": True, "unit": True}),
        ("mbf_small", {"embedding_size": 16, "image_size": 112}, {}),
    ],
)
def test_an_onnx_file_without_norms_is_taken_over_and_trains_on_from_there(tmp_path, name, options, how):
    pytest.importorskip("onnxscript")
    path, ours = exported(tmp_path, name, options, **how), build_backbone(name, **options)
    many = normalize(images(32))
    initialize_backbone(ours, path, lambda: many)
    assert_embeds_as_eval(ours, path, unit="unit" in how)
    with torch.no_grad():
        still, training = ours.eval()(many), ours.train()(many)
    # The batch's own statistics are those that were learned: the network in training is the one that was read.
    torch.testing.assert_close(training, still, atol=1e-2, rtol=1e-2)
    if not how:
        check_pixels_inside(path, build_backbone(name, **options), many)


def check_pixels_inside(path, ours, many):
    """Let the file take pixels, as MXNet's networks do when they have become ONNX: eval and training see that."""
    import onnx

    model = onnx.load(path)
    del model.metadata_props[:]
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    for number, (op, value) in enumerate((("Sub", 127.5), ("Mul", 0.0078125))):
        constant = onnx.numpy_helper.from_array(np.float32(value), f"scalar{number}")
        model.graph.initializer.append(constant)
        taken = onnx.helper.make_node(op, [first.input[0], constant.name], [f"prepared{number}"])
        model.graph.node.insert(number, taken)
        first.input[0] = f"prepared{number}"
    onnx.save(model, path)
    assert open_model(path, CPU).preprocessing["scale"] == 1
    initialize_backbone(ours, path, lambda: many)
    assert_embeds_as_eval(ours, path)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("iresnet", {"layers": (1, 1, 1, 1)}, "behind .* stands .*model.backbone"),
        ("iresnet", {"layers": (3, 1, 1, 1)}, "behind .* stands .*model.backbone"),
        ("iresnet", {"widths": (8, 8, 16, 24)}, r"stands conv 24×16×1×1 at stride 2, in the file norm 16, conv 16×16"),
        ("iresnet", {"embedding_size": 32}, "stands linear 32×784, in the file linear 16×784"),
        ("mbf_small", {}, "behind image stands conv 64×3×3×3 at stride 2, in the file conv 8×3×3×3 at stride 1"),
        ("vit_t", {}, "IResNets and MobileFaceNets take weights, no VisionTransformer"),
    ],
)  # fmt: skip
def test_another_network_is_refused_with_the_place_where_they_part(tmp_path, name, options, said):
    path = write_iresnet(tmp_path, shaken(build_backbone("iresnet", **NARROW)))
    given = NARROW | options if name == "iresnet" else options
    with pytest.raises(ModelError, match=said) as refused:
        initialize_backbone(build_backbone(name, **given), path, never)
    assert "\n" not in str(refused.value)


def changed(path, change):
    symbol = json.loads(path.read_text())
    nodes = {node["name"]: node for node in symbol["nodes"]}
    change(symbol, nodes)
    path.write_text(json.dumps(symbol))
    return path


def at_another_stride(symbol, nodes):
    nodes["stage1_unit1_conv1"]["attrs"]["stride"] = "(2, 2)"


def squashed(symbol, nodes):
    nodes["relu0"] |= {
        "op": "Activation",
        "attrs": {"act_type": "relu"},
        "inputs": nodes["relu0"]["inputs"][:1],
    }


def with_more_behind(symbol, nodes):
    nodes["fc1"]["name"] = "norm"  # else the graph would be cut off there
    nodes["softmax"] |= {"op": "Activation", "attrs": {"act_type": "tanh"}}
    del nodes["softmax"]["inputs"][1:]
    symbol["heads"] = [[symbol["nodes"].index(nodes["softmax"]), 0, 0]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (at_another_stride, "stands conv 8×8×3×3 at stride 1, in the file conv 8×8×3×3 at stride 2"),
        (squashed, "stands prelu 8, in the file Activation"),
        (with_more_behind, "behind features the file goes on with Activation"),
    ],
)
def test_a_graph_that_differs_in_one_layer_is_refused(tmp_path, change, said):
    path = write_iresnet(tmp_path, shaken(build_backbone("iresnet", **NARROW)))
    with pytest.raises(ModelError, match=said):
        initialize_backbone(build_backbone("iresnet", **NARROW), changed(path, change), never)


def test_pixels_that_are_not_taken_around_their_middle_are_refused(tmp_path):
    path = write_iresnet(tmp_path, shaken(build_backbone("iresnet", **NARROW)), offset=0.0, factor=1.0)
    with pytest.raises(ModelError, match=r"takes pixels times 1 plus 0; facetrain trains networks that take"):
        initialize_backbone(build_backbone("iresnet", **NARROW), path, never)


def test_a_layer_that_takes_what_none_gives_is_refused(tmp_path):
    def dangling(symbol, nodes):
        nodes["_plus0"]["inputs"][1] = nodes["bn0"]["inputs"][1]  # a weight

    path = write_iresnet(tmp_path, shaken(build_backbone("iresnet", **NARROW)))
    with pytest.raises(ModelError, match="no layer gives .[0-9]+., which is needed"):
        initialize_backbone(build_backbone("iresnet", **NARROW), changed(path, dangling), never)


@pytest.mark.parametrize("name", ["m.onnx", "m-symbol.json", "m-0000.params"])
@pytest.mark.parametrize(
    "data", [b"", b"nothing", b"{}", b"[]", b'{"nodes": [], "heads": []}', bytes(range(256))]
)
def test_files_that_hold_no_network_are_refused(tmp_path, name, data):
    pytest.importorskip("onnx")
    for beside in ("m-symbol.json", "m-0000.params", name):
        (tmp_path / beside).write_bytes(data)
    with pytest.raises(ModelError, match=r"m[.-]"):
        initialize_backbone(build_backbone("iresnet", **NARROW), tmp_path / name, never)
