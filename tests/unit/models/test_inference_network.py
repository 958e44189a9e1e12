from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.zoo import build_backbone
from facetrain.distributed import collectives
from facetrain.distributed.sync_batch_norm import use_sync_batch_norm
from facetrain.errors import ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.inference_network import BLOCK, FoldedNetwork, inference_network
from tests.support.mxnet_files import randomize, write_iresnet

CPU = torch.device("cpu")
NARROW = {"layers": (2, 1, 2, 1), "widths": (8, 8, 16, 16), "embedding_size": 16, "image_size": 32}
BACKBONES = {
    "iresnet": NARROW,
    # Without a block in the last stage.
    "mbf_small": {"embedding_size": 32, "image_size": 32, "layers": (1, 2, 1, 0)},
    "mbf_large": {"embedding_size": 32, "image_size": 32},
}


def random_network(name="iresnet"):
    torch.manual_seed(0)
    return randomize(build_backbone(name, **BACKBONES[name]), eps=1e-5).eval()


def images(count, size=32):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def largest_gap(found, expected):
    assert found.dtype == torch.float32 and found.shape == expected.shape
    return float((normalize(found) - normalize(expected)).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", list(BACKBONES))
def test_folded_batch_norms_change_no_embedding_by_more_than_rounding(name):
    network, image = random_network(name), images(5)
    folded = inference_network(network, CPU)
    norms = sum(isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d) for module in network.modules())
    left = sum(layer.kind == "norm" for layer in folded.graph.layers.values())
    assert isinstance(folded, FoldedNetwork)
    # Those before a convolution with padding, or before the linear layer of an IResNet, remain.
    assert left == (7 if name == "iresnet" else 0) and norms > 15
    assert largest_gap(folded(image), network(image)) < 1e-6
    assert largest_gap(folded(image.contiguous(memory_format=torch.channels_last)), network(image)) < 1e-6


@torch.no_grad()
def test_the_embedding_of_an_image_does_not_depend_on_the_size_of_its_batch():
    network, image = inference_network(random_network(), CPU), images(3 * BLOCK)
    expected = network(image)
    for size in (BLOCK, BLOCK + 5, 2 * BLOCK + 1, 3 * BLOCK - 1):
        assert torch.equal(network(image[:size]), expected[:size])
    assert torch.equal(network(image.roll(BLOCK, 0)), expected.roll(BLOCK, 0))
    # The place in a block may change the last bits, depending on MKL's kernels.
    assert largest_gap(network(image.roll(7, 0)), expected.roll(7, 0)) < 1e-6


@torch.no_grad()
def test_bfloat16_convolutions_change_embeddings_by_their_rounding():
    network, image = random_network(), images(5)
    folded = inference_network(network, CPU, bf16=True)
    dtypes = {
        (layer.kind, layer.weights["weight"].dtype) for layer in folded.graph.layers.values() if layer.weights
    }
    assert ("conv", torch.bfloat16) in dtypes and ("linear", torch.float32) in dtypes
    assert 1e-5 < largest_gap(folded(image), network(image)) < 0.02


@torch.no_grad()
def test_the_weights_are_those_at_the_time_of_folding():
    network, image = random_network(), images(2)
    folded = inference_network(network, CPU)
    expected = folded(image)
    for tensor in network.state_dict().values():
        tensor.zero_()
    assert torch.equal(folded(image), expected)


@torch.no_grad()
def test_a_backbone_whose_regions_or_norms_are_replaced_is_folded(monkeypatch):
    network, image = random_network(), images(2)
    expected = inference_network(network, CPU)(image)
    for module, method in network.regions():
        # As train.compile replaces them.
        setattr(module, method, partial(getattr(module, method)))
    assert torch.equal(inference_network(network, CPU)(image), expected)
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    synchronized = random_network()
    use_sync_batch_norm(synchronized, CPU)
    synchronized.eval()
    assert torch.equal(inference_network(synchronized, CPU)(image), expected)


@torch.no_grad()
def test_a_network_of_mxnet_is_folded(tmp_path):
    network = randomize(build_backbone("iresnet", **NARROW | {"image_size": 112}), eps=2e-5)
    opened = open_model(write_iresnet(tmp_path, network), CPU)
    image = torch.randint(0, 256, (3, 112, 112, 3), dtype=torch.uint8)
    folded = inference_network(opened.network, CPU)
    assert isinstance(folded, FoldedNetwork)
    assert largest_gap(folded(opened.prepare(image)), opened.network(opened.prepare(image))) < 1e-6


def test_a_network_without_batch_norms_is_returned_as_it_is():
    vit = build_backbone("vit_t", embedding_size=16, image_size=36)
    assert inference_network(vit, CPU) is vit


class NormWithReLU(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Darker(IResNet):
    def trunk(self, image_BCHW, *, key_B=None):
        return super().trunk(image_BCHW.tanh(), key_B=key_B)


def test_a_network_with_other_layers_is_returned_as_it_is():
    layers = {
        "bn1": NormWithReLU(8),
        "conv1": nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        "bn2": nn.BatchNorm2d(16, track_running_stats=False),
    }
    networks = [Darker(**NARROW).eval()]
    for name, layer in layers.items():
        networks.append(random_network())
        networks[-1].set_submodule(name, layer, strict=True)
    for network in networks:
        assert inference_network(network, CPU) is network


@torch.no_grad()
def test_a_network_that_is_not_folded_has_its_last_layers_in_float32_in_bf16(monkeypatch):
    monkeypatch.setattr("facetrain.models.inference_network.layers_of", refuse_to_fold)
    network, image = random_network(), images(4)
    found = inference_network(network, CPU, bf16=True)(image)
    assert found.dtype == torch.float32 and len(found.unique()) > 0.9 * found.numel()
    assert largest_gap(found, network(image)) < 0.05


def refuse_to_fold(network):
    raise ModelError("a layer that cannot be folded")
