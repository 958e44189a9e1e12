"""Training with the rounding of the int8 file: where it starts, its gradients, and the file that is exported."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from facetrain.config.loading import load_config
from facetrain.errors import ConfigError, ModelError
from facetrain.models.int8.fake_quantization import FakeQuantized, prepare, read_ranges
from facetrain.models.int8.network import Range
from facetrain.models.int8.onnx_file import int8_model
from facetrain.models.int8.quantize import folded_network, quantize
from facetrain.models.layer_graph import IMAGE
from tests.unit.models.int8.networks import SIZE, backbone, images
from tests.unit.models.int8.test_onnx_file import run


def prepared(name):
    network = backbone(name).train()
    return FakeQuantized(network, prepare(network, images(32)))


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_training_starts_from_the_network_of_an_export(name):
    expected = quantize(folded_network(backbone(name)), images(32)).embed(images())
    found = prepared(name)(images()).detach()
    assert float(F.cosine_similarity(found, expected).min()) > 0.9999
    plain = backbone(name)(images()).detach()
    assert float(F.cosine_similarity(expected, plain).min()) < 0.9999


def test_rounding_has_the_values_and_gradients_of_torch():
    for low, high in ((-1.3, 2.7), (0.0, 3.0), (-2.0, 0.0)):
        one, x = Range(low, high), torch.linspace(-4, 4, 10_001).requires_grad_()
        y = x.detach().clone().requires_grad_()
        rounded = one.round(x)
        expected = torch.fake_quantize_per_tensor_affine(y, one.scale, one.zero_point, 0, 255)
        weight = torch.randn_like(x)
        (rounded * weight).sum().backward()
        (expected * weight).sum().backward()
        assert torch.equal(rounded, expected) and torch.equal(x.grad, y.grad)
        assert 0.3 < float((x.grad == 0).double().mean()) < 0.9


def gradients(network, parameters, target):
    loss = (1 - F.cosine_similarity(network(images()), target)).mean()
    return dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))


def test_gradients_of_all_weights_point_where_those_of_the_float_network_do():
    rounded, target = prepared("mobilefacenet"), images(8).flatten(1)[:, :16]
    inner = rounded.backbone.eval()
    trained = {key: value for key, value in inner.named_parameters() if value.requires_grad}
    slopes = {key for key, value in inner.named_parameters() if not value.requires_grad}
    assert len(slopes) == sum(isinstance(module, torch.nn.PReLU) for module in inner.modules())
    found, expected = gradients(rounded, trained, target), gradients(inner, trained, target)
    for key in trained:
        assert float(F.cosine_similarity(found[key].flatten(), expected[key].flatten(), 0)) > 0.8, key


def train(rounded, target, steps, lr):
    """Train towards embeddings; return the error before each step."""
    optimizer = torch.optim.Adam([value for value in rounded.parameters() if value.requires_grad], lr)
    losses = []
    for _ in range(steps):
        loss = (1 - F.cosine_similarity(rounded(images(32)), target)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_training_takes_most_of_the_error_of_coarse_activations_away():
    rounded, target = prepared("iresnet"), backbone("iresnet")(images(32)).detach()
    rounded.ranges = {
        name: Range(8 * one.low, 8 * one.high) for name, one in rounded.ranges.items()
    }  # 5 bits
    losses = train(rounded, target, 12, 3e-3)
    assert losses[0] > 0.05 and losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", ["iresnet", "mobilefacenet"])
def test_the_exported_file_gives_the_embeddings_of_the_trained_network(name):
    pytest.importorskip("onnxruntime")
    rounded = prepared(name)
    train(rounded, torch.randn(32, 16, generator=torch.Generator().manual_seed(2)), 3, 1e-3)
    network = folded_network(rounded.backbone.eval())
    kept = replace(network, ranges=read_ranges(rounded.description(), network, "m"))
    expected = rounded(images(40)).detach()
    assert torch.equal(kept.embed(images(40)), expected)
    found = run(int8_model(kept, SIZE, 16), images(40))
    calibrated = run(int8_model(quantize(network, images(32)), SIZE, 16), images(40))
    similarity, similarity_with_other_ranges = (
        F.cosine_similarity(one, expected).mean() for one in (found, calibrated)
    )
    # onnxruntime sums in another order: some numbers round to the other neighbor and change the layers after it.
    assert 1 - similarity < 3e-3 and 1 - similarity < 0.5 * (1 - similarity_with_other_ranges)


def test_the_ranges_of_a_checkpoint_replace_those_of_the_preparation():
    network = prepared("mobilefacenet")
    other = {"int8": {"ranges": {name: [-1.0, 2.0] for name in network.ranges}}}
    network.load_description(other, "c")
    assert set(network.ranges.values()) == {Range(-1.0, 2.0)} and network.description() == other
    with pytest.raises(ModelError, match="trained without model.quantize"):
        network.load_description({}, "c")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "are damaged"),
        ({"image": [0.0]}, "are damaged"),
        ({"image": ["low", 1]}, "are damaged"),
        ({"image": [0.5, 1.0]}, "the range of image is 0.5 to 1; it must contain 0"),
        ({"image": [0.0, float("inf")]}, "must contain 0"),
        ({"other": [0.0, 1.0]}, "are not those of its network"),
    ],
)
def test_damaged_ranges_of_a_file_are_refused(changed, message):
    network = folded_network(backbone("mobilefacenet"))
    ranges = {name: [-1.0, 1.0] for name in network.rounded_values()}
    assert read_ranges({}, network, "m") is None
    assert read_ranges({"int8": {"ranges": ranges}}, network, "m")[IMAGE] == Range(-1.0, 1.0)
    damaged = None if changed is None else ranges | changed
    with pytest.raises(ModelError, match=message) as error:
        read_ranges({"int8": {"ranges": damaged}}, network, "m.safetensors")
    assert "\n" not in str(error.value) and "m.safetensors" in str(error.value)


def test_a_network_without_an_int8_form_is_refused():
    from facetrain.backbone.zoo import build_backbone

    network = build_backbone("vit_t", embedding_size=16, image_size=SIZE)
    with pytest.raises(ModelError, match=r"model\.quantize: works with IResNets"):
        prepare(network, images())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "quantize: int8 needs init_from"),
        (["model.init_from=x", "model.lora={rank: 4}"], "cannot be combined with lora"),
        (["model.init_from=x", "model.dropout=0.1"], "cannot be combined with dropout"),
        (["model.init_from=x"], "set train.precision to fp32"),
        (["model.init_from=x", "train.precision=fp32", "train.compile=on"], "train.compile: on"),
        (
            ["model.init_from=x", "train.precision=fp32", "train.stages=[{until_epoch: 2, image_size: 80}]"],
            "cannot be combined with image_size in train.stages",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, settings, message):
    (tmp_path / "a.yaml").write_text("data: {train: x}\nmodel: {quantize: int8}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.yaml", settings)
