"""Small networks with random weights, folded for quantization."""

import torch

from facetrain.backbone.mobilefacenet import MobileFaceNet
from facetrain.backbone.zoo import build_backbone
from facetrain.models.inference_network import fold_norms, layers_of
from facetrain.models.int8.network import Int8Network
from facetrain.models.layer_graph import with_weights
from tests.support.mxnet_files import randomize

SIZE = 32
IRESNET = {"layers": (1, 1, 1, 1), "widths": (8, 8, 8, 8), "embedding_size": 16, "image_size": SIZE}


def backbone(name, seed=0):
    """Return a small IResNet or MobileFaceNet whose PReLUs have slopes below and above 1.

    The statistics of its batch norms are those of `images`. With random ones, the embeddings of all images would be
    almost the same vector, which would hide errors in what depends on the image.
    """
    torch.manual_seed(seed)
    network = (
        MobileFaceNet((1, 2, 1, 1), 1, embedding_size=16, image_size=SIZE)
        if name == "mobilefacenet"
        else build_backbone("iresnet", **IRESNET)
    )
    randomize(network)
    for module in network.modules():
        if isinstance(module, torch.nn.PReLU):
            torch.nn.init.uniform_(module.weight, -0.5, 2.0)
        elif isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            module.momentum = 1.0  # the statistics of one batch
    with torch.no_grad():
        network.train()(images(64))
    return network.eval()


def folded(name, dtype=torch.float32, seed=0):
    """Return the layers of `backbone` with folded batch norms and without ranges."""
    graph = fold_norms(layers_of(backbone(name, seed)))
    return Int8Network(with_weights(graph, lambda _layer, _name, weight: weight.to(dtype)))


def images(count=8, dtype=torch.float32):
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=dtype)
