"""Self-test of facetrain's Triton kernels: whole blocks of the trunk and whole steps of the head, beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.backbone.iresnet import IResNet
from facetrain.device.kernel_launches import multiprocessors
from facetrain.distributed.world import World
from facetrain.head.head_run import HeadRun
from facetrain.head.margin_head import MarginHead
from facetrain.head.margins.base import build_margin
from facetrain.head.margins.registry import MARGINS
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.optim.settings import OptimSettings
from facetrain.training.trunk_comparison import trunk_difference

_HEADS: tuple[dict[str, Any], ...] = (
    {"sample_rate": 0.3},
    {"weight_dtype": "bfloat16", "momentum_dtype": "bfloat16"},
    {"weight_dtype": "bfloat16", "momentum_dtype": "int8", "sample_rate": 0.3},
)
"""Settings with which the update of the centers is another variant of its kernel."""
_MOST_TIMES, _ROUNDING = 4.0, 2e-3
"""The largest error may be this many times the one of PyTorch's operations, and this much more, relative to the
largest number."""


def check_trunk(device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with the fused trunk on a device, "" if nothing is.

    The second stage goes from 64 to 128 channels. The third and fourth stage have numbers of channels that are no
    multiple of a tile.
    """
    from facetrain.backbone.fused_iresnet import FusedTrunk

    # On a CPU, Triton's interpreter would take hours for the sizes of a GPU.
    images, side = (_images_for(multiprocessors(device)), 112) if device.type == "cuda" else (2, 32)
    torch.manual_seed(0)
    network = IResNet((2, 1, 1, 1), (64, 128, 72, 24), embedding_size=32, image_size=side)
    for module in network.modules():
        # As after some training: with the initial ones, errors of weights and biases would not show.
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
        elif isinstance(module, nn.PReLU):
            nn.init.uniform_(module.weight, -0.2, 0.5)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    image_BCHW = torch.randn(images, 3, side, side, device=device).contiguous(
        memory_format=torch.channels_last
    )
    return trunk_difference(network, FusedTrunk(network), image_BCHW, dtype)


def _images_for(multiprocessors: int) -> int:
    """Return so many images of 112 × 112 pixels that each program has several tiles of the rows of the second stage.

    In training it has up to 49. For one tile, Triton compiles other code.
    """
    return max(multiprocessors // 7, 13)


def check_head(device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with the kernels of the head on a device, "" if nothing is.

    Every margin that they can compute, and every variant of the centers' update, at sizes that are no multiple of a
    tile. `dtype` is of the factors of the products.
    """
    margins = {name: MarginSettings.model_validate({"type": name}) for name in MARGINS}
    margins["filtered"] = MarginSettings(filter_threshold=0.2)
    heads = {
        name: HeadSettings(margin=settings)
        for name, settings in margins.items()
        if not build_margin(settings).changes_negatives
    }
    heads |= {str(options): HeadSettings(**options) for options in _HEADS}
    for name, settings in heads.items():
        # In float32, in the dtype of training, and by the kernels in that dtype: the error of the second is the price
        # of rounding, by which the third is judged.
        true, plain, fused = (
            _head_results(settings, device, product_dtype, use_kernels=use_kernels)
            for product_dtype, use_kernels in ((None, False), (dtype, False), (dtype, True))
        )
        for part, tensor in true.items():
            by_plain, by_fused = (
                ((found[part] - tensor).abs().max() / tensor.abs().max()).item() for found in (plain, fused)
            )
            # Not a comparison for "larger": NaN must be refused.
            if not by_fused <= _MOST_TIMES * by_plain + _ROUNDING:
                return (
                    f"{part} of the head ({name}) differs by {by_fused:.2g}, and PyTorch's by {by_plain:.2g}"
                )
    return ""


def _head_results(
    settings: HeadSettings, device: torch.device, product_dtype: torch.dtype | None, *, use_kernels: bool
) -> dict[str, Tensor]:
    """Return loss, gradient of the embeddings and centers of two steps."""
    classes, size, batch = 1003, 72, 137
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=device)
    run = HeadRun(seed=1, product_dtype=product_dtype)
    # Each run of this function draws the same centers, samples and noise, from the seed.
    settings = settings.model_copy(update={"chunk_size": 400})  # several chunks, the last of them smaller
    head = MarginHead(settings, OptimSettings(), run, world, embedding_size=size, num_classes=classes)
    if not use_kernels:
        head.avoid_kernels()
    generator = torch.Generator().manual_seed(0)
    # Two steps: the second has momentum, and centers that the kernel has written.
    for step in range(2):
        embedding = torch.randn(batch, size, generator=generator).to(device).requires_grad_()
        label = torch.randint(classes, (batch,), generator=generator)
        head.begin_step(step, lr=0.1)
        head.expect_labels(label)
        loss = head(embedding, label.to(device))
        loss.backward()
    assert embedding.grad is not None
    found = {
        "the loss": loss.detach(),
        "the embeddings' gradient": embedding.grad,
        "the centers": head.weight.data,
    }
    return {name: tensor.float() for name, tensor in found.items()}


CHECKS: dict[str, Callable[[torch.device, torch.dtype], str]] = {"trunk": check_trunk, "head": check_head}
"""Checks of the parts of a run that have kernels, by the names of the parts."""
