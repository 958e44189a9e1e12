"""Backbones that start from the weights of MXNet and ONNX files."""

import json

import pytest
import torch

from facetrain.backbone.registry import IRESNET_LAYERS
from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.normalize import normalize
from facetrain.errors import ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from facetrain.models.initialize_from import initialize_backbone
from tests.support.models import write_model
from tests.support.mxnet_files import randomize, write_iresnet

CPU = torch.device("cpu")
NARROW = {"layers": (2, 1, 1, 1), "widths": (8, 8, 16, 16), "embedding_size": 16, "image_size": 112}


def images(count=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 112, 112, 3), dtype=torch.uint8, generator=generator)


def no_images():
    raise AssertionError("the file has all statistics, so no images are needed")


def assert_embeds_as_eval(network, path, *, unit=False):
    """Compare a network with the file as `facetrain eval` runs it, whose embeddings may have unit length."""
    opened = open_model(path, CPU)
    with torch.no_grad():
        expected = opened.network.eval()(opened.prepare(images()))
        found = network.eval()(normalize(images()))
    found = torch.nn.functional.normalize(found) if unit else found
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r18", "r50"])  # with more than nine blocks in a stage, too
def test_a_backbone_loads_the_weights_of_an_mxnet_iresnet(tmp_path, name):
    torch.manual_seed(0)
    options = {"layers": IRESNET_LAYERS[name], "widths": (4, 4, 8, 8), "embedding_size": 16}
    net = randomize(build_backbone("iresnet", **options), eps=2e-5)
    path, backbone = write_iresnet(tmp_path, net), build_backbone("iresnet", **options)
    initialize_backbone(backbone, path, no_images)
    assert_embeds_as_eval(backbone, path)
    # The 7 that the file stores for a fixed gamma is ignored.
    assert torch.equal(backbone.features.weight, torch.ones(16))
    again = build_backbone("iresnet", **options, dropout=0.4, checkpoint_activations=True)
    initialize_backbone(again, tmp_path / "model-0000.params", no_images)
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in backbone.state_dict().items())


def exported(tmp_path, name, options, **how):
    torch.manual_seed(0)
    net = randomize(build_backbone(name, **options))
    write_model(tmp_path / "m.safetensors", name, options, network=net, datasets=[{"name": "faces"}])
    export(open_model(tmp_path / "m.safetensors", CPU), "onnx", tmp_path / "m.onnx", ExportOptions(**how))
    return tmp_path / "m.onnx"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("iresnet", NARROW, {"from_pixels": True, "unit": True}),
        ("mbf_small", {"layers": (1, 1, 1, 1), "embedding_size": 16, "image_size": 112}, {}),
    ],
)
def test_a_backbone_loads_an_onnx_file_with_merged_norms_and_trains(tmp_path, name, options, how):
    pytest.importorskip("onnxscript")
    path, backbone = exported(tmp_path, name, options, **how), build_backbone(name, **options)
    many = normalize(images(32))
    description = initialize_backbone(backbone, path, lambda: many)
    assert description == {"datasets": [{"name": "faces"}]}
    assert_embeds_as_eval(backbone, path, unit="unit" in how)
    with torch.no_grad():
        still, training = backbone.eval()(many), backbone.train()(many)
    # The batch has the calibrated statistics, so training starts from the embeddings of the file.
    torch.testing.assert_close(training, still, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("iresnet", {"layers": (1, 1, 1, 1)}, "after .* it needs .*model.backbone"),
        ("iresnet", {"layers": (3, 1, 1, 1)}, "after .* it needs .*model.backbone"),
        ("iresnet", {"widths": (8, 8, 16, 24)}, r"needs conv 24×16×1×1 at stride 2, the file has norm 16, conv 16×16"),
        ("iresnet", {"embedding_size": 32}, "needs linear 32×784, the file has linear 16×784"),
        ("mbf_small", {}, "after image it needs conv 64×3×3×3 at stride 2, the file has conv 8×3×3×3 at stride 1"),
        ("vit_t", {}, "load into IResNets and MobileFaceNets, not into a VisionTransformer"),
    ],
)  # fmt: skip
def test_another_network_is_refused_with_the_first_layers_that_differ(tmp_path, name, options, message):
    path = write_iresnet(tmp_path, randomize(build_backbone("iresnet", **NARROW)))
    given = NARROW | options if name == "iresnet" else options
    with pytest.raises(ModelError, match=message) as refused:
        initialize_backbone(build_backbone(name, **given), path, no_images)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_file_with_split_prelus_is_refused_with_the_option_that_split_them(tmp_path):
    pytest.importorskip("onnxscript")
    path = exported(tmp_path, "iresnet", NARROW, opset=17, split_prelu=True)
    with pytest.raises(ModelError, match="--split-prelu"):
        initialize_backbone(build_backbone("iresnet", **NARROW), path, no_images)


def at_another_stride(symbol, nodes):
    nodes["stage1_unit1_conv1"]["attrs"]["stride"] = "(2, 2)"


def squashed(symbol, nodes):
    nodes["relu0"] |= {"op": "Activation", "attrs": {"act_type": "relu"}}
    del nodes["relu0"]["inputs"][1:]


def with_pixels_that_are_not_centered(symbol, nodes):
    nodes["_minusscalar0"]["attrs"]["scalar"] = "0"
    nodes["_mulscalar0"]["attrs"]["scalar"] = "1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at_another_stride, "needs conv 8×8×3×3 at stride 1, the file has conv 8×8×3×3 at stride 2"),
        (
            squashed,
            "node relu0 has the operator Activation, which is no layer of an IResNet or a MobileFaceNet",
        ),
        (with_pixels_that_are_not_centered, "takes pixels times 1 plus 0; facetrain trains networks that"),
    ],
)
def test_a_graph_that_differs_in_one_layer_is_refused(tmp_path, change, message):
    path = write_iresnet(tmp_path, randomize(build_backbone("iresnet", **NARROW)))
    symbol = json.loads(path.read_text())
    change(symbol, {node["name"]: node for node in symbol["nodes"]})
    path.write_text(json.dumps(symbol))
    with pytest.raises(ModelError, match=message):
        initialize_backbone(build_backbone("iresnet", **NARROW), path, no_images)


@pytest.mark.slow
def test_an_onnx_file_whose_features_are_in_another_order_is_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    path = exported(tmp_path, "iresnet", NARROW, opset=17)  # by the faster exporter
    model = onnx.load(str(path))
    (place,) = (n for n, node in enumerate(model.graph.node) if node.op_type in ("Flatten", "Reshape"))
    flatten = model.graph.node[place]
    moved = onnx.helper.make_node("Transpose", [flatten.input[0]], ["moved"], perm=[0, 2, 3, 1])
    flatten.input[0] = "moved"
    model.graph.node.insert(place, moved)
    onnx.save(model, str(path))
    with pytest.raises(ModelError, match="Transpose"):
        initialize_backbone(build_backbone("iresnet", **NARROW), path, no_images)


@pytest.mark.parametrize("name", ["m.onnx", "m-symbol.json", "m-0000.params"])
@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"nodes": [], "heads": []}', bytes(range(256))])
def test_files_without_a_network_are_refused(tmp_path, name, data):
    pytest.importorskip("onnx")
    for other in ("m-symbol.json", "m-0000.params", name):
        (tmp_path / other).write_bytes(data)
    with pytest.raises(ModelError, match=r"m[.-]"):
        initialize_backbone(build_backbone("iresnet", **NARROW), tmp_path / name, no_images)
