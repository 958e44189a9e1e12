"""Networks of timm by their names: the same numbers, any image size, weights, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from facetrain.backbone.zoo import build_backbone, build_on_meta
from facetrain.errors import ModelError
from facetrain.models.average_models import average_models
from facetrain.models.embedding_model import open_model
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import describe_backbone, save_model

timm = pytest.importorskip("timm", reason="timm is not installed")

NAMES = ["convnext_atto", "edgenext_xx_small", "mobilenetv4_conv_small_050", "vit_small_patch16_dinov3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_published_weights_give_the_features_of_timm_at_any_image_size(name, tmp_path):
    torch.manual_seed(0)
    size = {"image_size": 48, "embedding_size": 12}
    sized = {"img_size": 48} if "vit" in name else {}
    published = timm.create_model(name, **sized).eval()
    torch.save(published.state_dict(), tmp_path / "weights.pth")
    backbone = build_backbone(f"timm/{name}", **size).eval()
    initialize_backbone(backbone, tmp_path / "weights.pth", None)
    pixels = torch.rand(2, 3, 48, 48)
    mean, std = (torch.tensor(published.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = published.forward_head(published.forward_features((pixels - mean) / std), pre_logits=True)
        found = backbone.trunk(2 * pixels - 1)
        embedding = backbone(2 * pixels - 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert embedding.shape == (2, 12)
    # A model file says which network it is, and opens as any other.
    save_model(tmp_path / "m.safetensors", backbone.state_dict(), describe_backbone(f"timm/{name}", **size))
    opened = open_model(tmp_path / "m.safetensors", torch.device("cpu"))
    assert torch.equal(opened.network(2 * pixels - 1), embedding)


def test_an_average_with_published_weights_that_lack_the_layer_of_the_embedding_is_refused(tmp_path):
    size, paths = (
        {"image_size": 32, "embedding_size": 8},
        [tmp_path / "tuned.safetensors", tmp_path / "timm.pth"],
    )
    backbone = build_backbone(f"timm/{NAMES[0]}", **size)
    save_model(paths[0], backbone.state_dict(), describe_backbone(f"timm/{NAMES[0]}", **size))
    torch.save(timm.create_model(NAMES[0]).state_dict(), paths[1])
    with pytest.raises(
        ModelError, match=r"timm\.pth: has no layer network\.head\.fc\.weight for embeddings of 8"
    ):
        average_models(paths, [1, 1], tmp_path / "out.safetensors")
    torch.save(timm.create_model(NAMES[0], num_classes=8).state_dict(), paths[1])
    average_models(paths, [1, 1], tmp_path / "out.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_network_trains_and_muon_finds_the_layers_before_the_last(name):
    torch.manual_seed(0)
    net = build_backbone(f"timm/{name}", image_size=32, embedding_size=8)
    net(torch.randn(2, 3, 32, 32)).square().sum().backward()
    # DINOv3 has a bias that it never uses.
    without = {key for key, value in net.named_parameters() if value.grad is None}
    assert len(without) < 3 and not any(key.startswith(net.new_layers) for key in without)
    assert f"network.{net.classifier}.weight".startswith(net.last_layers())


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("timm/convnext_at", {}, "did you mean timm/convnext_atto"),
        ("timm/hf-hub:someone/network", {}, "has no network"),
        ("timm/local-dir:/tmp", {}, "has no network"),
        ("timm/convnext_atto", {"checkpoint_path": "/tmp/x.pth"}, "checkpoint_path is no option"),
        ("timm/convnext_atto", {"pretrained": True}, "pretrained is no option"),
    ],
)
def test_what_timm_would_load_from_elsewhere_is_refused(name, own, words):
    with pytest.raises(ModelError, match=words):
        build_on_meta(name, own=own)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "rexnet_100", "ghostnet_050"])
def test_nothing_is_dropped_at_random(name):
    network = build_on_meta(f"timm/{name}", embedding_size=8, image_size=224)
    rates = [
        getattr(module, rate, 0) for module in network.modules() for rate in ("p", "drop_prob", "drop_rate")
    ]
    assert not any(rate for rate in rates if isinstance(rate, float))


def test_recomputation_is_refused_by_a_network_that_has_none():
    with pytest.raises(
        ModelError, match=r"checkpoint_activations: timm/twins_svt_small: .*; set it to false"
    ):
        build_on_meta("timm/twins_svt_small", embedding_size=8, image_size=64, checkpoint_activations=True)


def test_recomputation_is_refused_where_it_would_change_statistics():
    build_backbone("timm/convnext_atto", image_size=32, checkpoint_activations=True)
    with pytest.raises(ModelError, match="checkpoint_activations"):
        build_backbone("timm/mobilenetv4_conv_small_050", image_size=32, checkpoint_activations=True)


def test_weights_of_a_network_that_normalizes_in_another_way_are_refused(tmp_path):
    options = {"image_size": 32, "embedding_size": 8}
    other = "timm/vit_small_patch16_224.dino"
    network = build_backbone(other, **options)
    save_model(tmp_path / "m.safetensors", network.state_dict(), describe_backbone(other, **options))
    backbone = build_backbone("timm/vit_small_patch16_224.augreg_in21k", **options)
    with pytest.raises(ModelError, match=f"normalizes pixels by mean .* set model.backbone: {other}"):
        initialize_backbone(backbone, tmp_path / "m.safetensors", None)
    initialize_backbone(network, tmp_path / "m.safetensors", None)


@pytest.mark.parametrize(
    ("name", "given"),
    [("convnext_atto", ""), ("convnext_atto", "model.safetensors"), ("deit_tiny_patch16_224", "")],
)
def test_weights_whose_config_json_states_another_normalization_are_refused(tmp_path, name, given):
    backbone = build_backbone(f"timm/{name}", image_size=32, embedding_size=8)
    weights = {key.removeprefix("network."): value for key, value in backbone.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    stated = {"pretrained_cfg": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    initialize_backbone(backbone, tmp_path / given, None)
    stated["pretrained_cfg"]["mean"] = [0.5] * 3
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=r"config\.json beside it states mean .* model\.backbone"):
        initialize_backbone(backbone, tmp_path / given, None)


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("resnet18.nosuchtag", {}, "nosuchtag"),
        ("deit_tiny_distilled_patch16_224", {}, "no single layer of the embedding"),
        ("resnet18", {"patch_size": 8}, "unexpected .* 'patch_size'; see model.options"),
        ("vit_tiny_patch16_224", {"global_pool": "most"}, "; see model.options"),
        ("vit_tiny_patch16_224", {"patch_size": 0}, "division .*; see model.options"),
    ],
)
def test_networks_that_cannot_be_built_are_refused_in_one_line(name, own, words):
    with pytest.raises(ModelError, match=f"^model.backbone: timm/{name}.*{words}"):
        build_on_meta(f"timm/{name}", own=own, image_size=224, embedding_size=8)
