"""The number formats of a network, put around it from outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.train.compile import compile_regions

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what to call for a context in which layers compute in a precision: fp32, bf16 or fp16."""
    if precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=_DTYPES[precision])


def memory_format_for(
    network: nn.Module, device: torch.device, *, channels_last: bool
) -> torch.memory_format:
    """Return the layout of weights and images, `channels_last` where that is asked for and safe.

    On CPU, oneDNN's strided 1 × 1 convolution of fewer than 16 channels writes past its memory in that
    layout (torch 2.13, AVX-512, backward pass): networks that have one stay in the other.
    """
    strided = [
        module
        for module in network.modules()
        if isinstance(module, nn.Conv2d)
        and module.in_channels < 16
        and module.stride != (1, 1)
        and module.kernel_size == (1, 1)
    ]
    return (
        torch.channels_last
        if channels_last and (device.type == "cuda" or not strided)
        else torch.contiguous_format
    )


class InPrecision(nn.Module):
    """Run a backbone's trunk in 16 bits and its neck in float32.

    The state of the backbone keeps its own names: this is never saved.
    """

    def __init__(
        self,
        backbone: Backbone,
        precision: str,
        device: torch.device,
        *,
        memory_format: torch.memory_format,
        compile: bool,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self._autocast = autocast_for(precision, device)
        self._memory_format = memory_format
        if compile:
            compile_regions(backbone)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to embeddings (B, D), float32."""
        image_BCHW = image_BCHW.contiguous(memory_format=self._memory_format)
        with self._autocast():
            feature = self.backbone.trunk(image_BCHW)
        return self.backbone.neck(feature.float())
