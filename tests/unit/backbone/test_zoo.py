import functools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from facetrain.backbone import zoo
from facetrain.backbone.base import Backbone
from facetrain.backbone.own_network import OwnNetwork, build_own
from facetrain.backbone.registry import BACKBONES
from facetrain.backbone.zoo import build_backbone, build_on_meta
from facetrain.errors import ConfigError, ModelError
from facetrain.own_parts import allow
from tests.support.command import environment

SMALL = {"layers": (1, 1, 1, 1), "widths": (8, 8, 16, 16), "embedding_size": 32}


@pytest.mark.parametrize(("size", "stem_stride"), [(112, None), (64, 1), (100, 2), (15, 2)])
def test_every_image_size_gives_embeddings_of_the_configured_size(size, stem_stride):
    net = build_backbone("iresnet", image_size=size, stem_stride=stem_stride, **SMALL)
    image = torch.randn(2, 3, size, size)
    assert net(image).shape == (2, 32)
    torch.testing.assert_close(net.eval()(image), net.neck(net.trunk(image)))
    side = -(-size // (stem_stride or 1))
    assert net.stem(image).shape == (2, SMALL["widths"][0], side, side)


SMALLEST = {architecture.place: name for name, architecture in reversed(BACKBONES.items())}
"""Place of a class -> the first name of it in the registry."""


@pytest.mark.parametrize("name", SMALLEST.values())
def test_every_class_of_backbones_accepts_other_image_sizes(name):
    with torch.device("meta"):
        net = build_backbone(name, image_size=96, embedding_size=64).eval()
        inputs = [torch.empty(2, 3, 96, 96)] + [torch.empty(2, 5, 2)] * net.takes_landmarks
        assert net(*inputs).shape == (2, 64)
    assert list(net.regions()) and net.last_layers()


@pytest.mark.parametrize("name", SMALLEST.values())
def test_a_network_computes_in_float32_also_in_a_program_with_another_default_type(name):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            net = build_on_meta(name, image_size=96, embedding_size=64).eval()
            inputs = [torch.empty(2, 3, 96, 96).float()] + [torch.empty(2, 5, 2)] * net.takes_landmarks
            assert net(*inputs).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


class Own(torch.nn.Module):
    """A network of one's own."""

    def __init__(self, embedding_size, image_size):
        super().__init__()
        self.fc = torch.nn.Linear(3 * image_size**2, embedding_size)
        with ThreadPoolExecutor(1) as other:  # a network that another thread builds has to wait
            assert not other.submit(zoo._DEFAULT_TYPE.acquire, blocking=False).result()

    def forward(self, image_BCHW):
        return self.fc(image_BCHW.flatten(1))


def test_a_network_of_one_s_own_computes_in_float32_beside_another_default_type():
    allow([f"{__name__}:Own"])
    torch.set_default_dtype(torch.float64)
    try:
        net = build_backbone(f"{__name__}:Own", image_size=16, embedding_size=8)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert net(torch.zeros(1, 3, 16, 16)).dtype == torch.float32


def test_recomputed_activations_give_the_same_gradients_each_time_and_update_batch_norm_once():
    image = torch.randn(3, 3, 64, 64)
    gradients, buffers = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = build_backbone("iresnet", image_size=64, checkpoint_activations=recompute, **SMALL)
        loss = net(image).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
        buffers.append(dict(net.named_buffers()))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(buffers[0], buffers[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("r05", "did you mean r50"),
        ("transformer", "choose one of r18"),
        ("iresnet", "layers and widths must be given"),
    ],
)
def test_an_unknown_name_is_an_error_that_suggests_a_known_one(name, message):
    with pytest.raises(ModelError, match=message):
        build_backbone(name)


@pytest.mark.parametrize("stride", [0, 3, -1, "2", [2]])
def test_a_stride_of_the_stem_other_than_1_and_2_is_refused(stride):
    with pytest.raises(
        ModelError, match=f"iresnet: stem_stride must be 1 or 2, not {re.escape(repr(stride))}"
    ):
        build_backbone("iresnet", stem_stride=stride, **SMALL)


@pytest.mark.parametrize("name", ["r18", "ir50", "mbf", "vit_t", "vit_s_kprpe", "resnet18"])
def test_an_argument_that_a_network_does_not_take_is_refused(name):
    with pytest.raises(ModelError, match=f"{name}: widths"):
        build_backbone(name, widths=SMALL["widths"])
    with pytest.raises(ModelError, match=f"{name}: stem_stride"):
        build_backbone(name, stem_stride=2)
    for option in ("embeding_size", "scale", "depths", "patch", "subsample_shortcut"):
        with pytest.raises(ModelError, match=f"{name} .*{option}.*embedding_size, "):
            build_backbone(name, **{option: 1})
    if name != "mbf":
        with pytest.raises(ModelError, match=f"{name}: layers"):
            build_backbone(name, layers=SMALL["layers"])


def test_names_and_shapes_of_a_network_are_known_without_memory():
    for name in ("r18", "mbf", "vit_t", "resnet18"):
        weights, shapes = (build(name).state_dict() for build in (build_backbone, build_on_meta))
        assert {tensor.device.type for tensor in shapes.values()} == {"meta"}
        assert {key: tensor.shape for key, tensor in shapes.items()} == {
            key: tensor.shape for key, tensor in weights.items()
        }


class WithDropPath(nn.Module):
    """Network whose code reads values of tensors when it is built, as that of many transformers."""

    def __init__(self, embedding_size, image_size):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.fc = nn.Linear(image_size, embedding_size)


def test_a_network_of_ones_own_without_memory_has_read_the_values_that_its_code_needs():
    place, options = f"{__name__}:WithDropPath", {"embedding_size": 8, "image_size": 16}
    allow([place])
    before = torch.get_rng_state()
    net = build_on_meta(place, **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert {key: tensor.is_meta for key, tensor in net.state_dict().items()} == {
        "network.fc.weight": True,
        "network.fc.bias": True,
    }
    assert net.network.rates == build_backbone(place, **options).network.rates


@pytest.mark.slow
def test_a_network_without_memory_is_built_without_the_compiler_which_takes_a_second_to_import():
    program = "import sys\nfrom facetrain.backbone.registry import BACKBONES\n"
    program += "from facetrain.backbone.zoo import build_on_meta\n"
    # torchvision imports it for its own ResNets.
    program += "others = ('iresnet', 'r2060', *(name for name in BACKBONES if name.startswith('resnet')))\n"
    program += "for name in set(BACKBONES).difference(others): build_on_meta(name)\n"
    program += "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=environment()).returncode == 0


def test_the_scale_of_the_last_batch_norm_is_not_trained():
    net = build_backbone("iresnet", image_size=64, **SMALL)
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["features.weight"]


def test_a_backbone_of_ones_own_needs_a_trunk_and_a_neck_alone():
    class Halves(Backbone):
        def __init__(self, **options):
            super().__init__(**options)
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, self.embedding_size)

        def trunk(self, image_BCHW):
            return self.conv(image_BCHW).mean((2, 3))

        def neck(self, feature):
            return self.fc(feature)

    net = Halves(embedding_size=8, image_size=16)
    assert net.last_layers() == ("fc.",) and list(net.regions()) == [(net, "trunk")]


def test_a_network_of_ones_own_is_not_computed_again_as_a_whole():
    with pytest.raises(ConfigError, match="model.checkpoint_activations"):
        OwnNetwork(nn.Identity(), embedding_size=8, image_size=16, checkpoint_activations=True)


@pytest.mark.parametrize(
    ("name", "weight", "deviation"),
    [
        ("mbf", "features.layers.2.weight", (2 / 512) ** 0.5),
        ("r18", "layer4.1.conv2.weight", 0.1),
        ("ir18", "layer4.1.conv2.weight", (2 / (9 * 512)) ** 0.5),
        ("ir18", "fc.weight", (2 / 512) ** 0.5),
    ],
)
def test_random_weights_have_the_scale_of_the_authors_code(name, weight, deviation):
    net = build_backbone(name)
    assert net.get_parameter(weight).detach().std().item() == pytest.approx(deviation, rel=0.01)


class Lazy(nn.Module):
    """Network whose layers take their sizes from the first image."""

    def __init__(self, embedding_size, image_size, extra=False):
        super().__init__()
        self.norm, self.fc = nn.LazyBatchNorm2d(), nn.LazyLinear(embedding_size)
        self.frozen = nn.BatchNorm2d(3).eval()
        if extra:
            self.unused = nn.LazyLinear(2)

    def forward(self, image):
        return self.fc(self.norm(image).flatten(1))


def test_lazy_layers_of_ones_own_get_weights_that_the_seed_decides():
    networks = []
    for _ in range(2):
        torch.manual_seed(3)
        networks.append(build_own(Lazy, {}, embedding_size=8, image_size=16))
    first, second = (network.state_dict() for network in networks)
    assert first["network.fc.weight"].shape == (8, 3 * 16 * 16)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    # As a new batch norm: the image of zeros has changed no statistics.
    assert first["network.norm.running_var"].tolist() == [1, 1, 1] and networks[0].training
    assert not networks[0].network.frozen.training, "the network keeps what its code has frozen"
    with torch.device("meta"):
        assert build_own(Lazy, {}, embedding_size=8, image_size=16).network.fc.weight.shape == (8, 768)
    with pytest.raises(ConfigError, match=r"unused\.weight is a lazy layer"):
        build_own(Lazy, {"extra": True}, embedding_size=8, image_size=16)


def backbone_of_a_function(embedding_size, image_size, takes_landmarks=False):
    network = build_backbone("iresnet", image_size=image_size, **SMALL | {"embedding_size": embedding_size})
    network.takes_landmarks = takes_landmarks
    return network


@pytest.mark.parametrize(
    ("own", "options", "key"),
    [
        ({}, {"dropout": 0.4}, "dropout"),
        ({}, {"checkpoint_activations": True}, "checkpoint_activations"),
        ({"takes_landmarks": True}, {}, "backbone"),
    ],
)
def test_a_backbone_of_a_function_gets_no_option_that_has_no_effect(own, options, key):
    sizes = {"embedding_size": 8, "image_size": 64}
    assert build_own(backbone_of_a_function, {}, **sizes, dropout=0.0).embedding_size == 8
    with pytest.raises(ConfigError, match=rf"^model\.{key}: .*backbone_of_a_function is a function"):
        build_own(backbone_of_a_function, own, **sizes, **options)


@pytest.mark.parametrize(
    ("part", "name"), [(functools.partial(Lazy, extra=True), "partial"), (nn.Identity(), "Identity")]
)
def test_a_callable_without_a_name_is_named_by_its_type(part, name):
    with pytest.raises(ConfigError, match=rf"^model.backbone: {name}: .*unexpected .*see model.options"):
        build_own(part, {"depth": 3}, embedding_size=8, image_size=16)


class OnlySizes(Backbone):
    """Subclass of Backbone that does not take all it gets."""

    def __init__(self, embedding_size, image_size):
        super().__init__(embedding_size=embedding_size, image_size=image_size)


def test_a_subclass_of_backbone_that_takes_the_sizes_alone_is_told_what_it_gets():
    options = {"embedding_size": 8, "image_size": 16, "dropout": 0.0, "checkpoint_activations": False}
    with pytest.raises(ConfigError, match=rf"OnlySizes: .*'dropout'; .*{', '.join(options)}: pass them"):
        build_own(OnlySizes, {}, **options)


class Counting(nn.Linear):
    """Network with a state that is no tensor."""

    def __init__(self, embedding_size, image_size):
        super().__init__(image_size, embedding_size)

    def get_extra_state(self):
        return {"calls": 0}


def test_a_network_of_ones_own_with_a_state_that_is_no_tensor_is_refused():
    with pytest.raises(ConfigError, match=r"model.backbone: Counting: _extra_state .*get_extra_state"):
        build_own(Counting, {}, embedding_size=8, image_size=16)


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (
            nn.Flatten(),
            r"Flatten maps 2 images to a tensor of shape \(2, 768\) and torch.float32; .*\(B, 8\)",
        ),
        (nn.Identity(), r"shape \(2, 3, 16, 16\)"),
        (nn.RNN(16, 8, batch_first=True), "to tuple; return one tensor"),
    ],
)
def test_a_network_of_ones_own_that_returns_no_embeddings_is_refused(layer, found):
    network = OwnNetwork(layer, embedding_size=8, image_size=16)
    image = torch.zeros(2, 3, 16, 16)
    with pytest.raises(ConfigError, match=found):
        network(image[:, 0] if isinstance(layer, nn.RNN) else image)
