"""Self-test of the head's Triton kernels: whole steps of the head, beside PyTorch's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from facetrain.distributed.world import World
from facetrain.head.build import HeadRun, build_head, build_margin
from facetrain.head.margins.registry import MARGINS
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.optim.settings import OptimSettings

_HEADS: tuple[dict[str, Any], ...] = (
    {"sample_rate": 0.3},
    {"weight_dtype": "bfloat16", "momentum_dtype": "bfloat16"},
    {"weight_dtype": "bfloat16", "momentum_dtype": "int8", "sample_rate": 0.3},
)
"""Settings with which the update of the centers is another variant of its kernel."""
_MOST_TIMES, _ROUNDING = 4.0, 2e-3
"""The largest error may be this many times the one of PyTorch's operations, and this much more, relative to the
largest number."""


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
    head = build_head(settings, OptimSettings(), run, world, embedding_size=size, num_classes=classes)
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
