"""Mixed precision and memory layout of a network, applied from outside the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.training.compile import REPLAYED, compile_regions

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes the autocast context of a precision: fp32, bf16 or fp16."""
    if precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=_DTYPES[precision])


def memory_format_for(network: nn.Module, device: torch.device) -> torch.memory_format:
    """Return the memory layout of weights and images: channels_last, where that is possible and safe.

    Not possible with weights of five dimensions, such as those of a dynamic convolution. Not safe on a CPU for networks
    that have a strided 1 × 1 convolution with fewer than 16 input channels: in this layout, its backward pass in oneDNN
    writes outside of its memory (torch 2.13, AVX-512).
    """
    is_unsafe = device.type != "cuda" and any(
        isinstance(module, nn.Conv2d)
        and module.in_channels < 16
        and module.stride != (1, 1)
        and module.kernel_size == (1, 1)
        for module in network.modules()
    )
    has_five = any(tensor.dim() == 5 for tensor in (*network.parameters(), *network.buffers()))
    return torch.contiguous_format if is_unsafe or has_five else torch.channels_last


class InPrecision(nn.Module):
    """Backbone whose trunk runs in the given precision and whose neck runs in float32.

    The neck sums tens of thousands of features, which 16 bits would round. Checkpoints hold the state of `backbone`,
    not of this wrapper, so the names of the weights do not depend on it.
    """

    def __init__(
        self,
        backbone: Backbone,
        precision: str,
        device: torch.device,
        *,
        memory_format: torch.memory_format,
        compile: str = "off",
    ) -> None:
        """Wrap a backbone.

        Args:
            backbone: network on its device.
            precision: fp32, bf16 or fp16.
            device: device of the backbone.
            memory_format: layout of weights and images.
            compile: value of `train.compile`.
        """
        super().__init__()
        self.backbone = backbone
        self.memory_format, self.compile_mode = memory_format, compile
        self._autocast = autocast_for(precision, device)
        if compile != "off":
            compile_regions(backbone, compile)

    def describe_execution(self) -> str:
        """Return how training runs the backbone, in words."""
        mode = {"off": "eager", "on": "compiled", "reduce-overhead": "compiled and replayed from CUDA graphs"}
        return f"the backbone runs {mode[self.compile_mode]}"

    def forward(self, image_BCHW: Tensor, *landmarks: Tensor, **keys: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to embeddings (B, D), float32.

        A backbone that takes landmarks gets them as the second argument, and one that draws by sample gets `key_B`.
        """
        # Each layer passes the layout of its input on: here it is chosen for all of them.
        image_BCHW = image_BCHW.contiguous(memory_format=self.memory_format)
        if self.compile_mode == REPLAYED and self.training and torch.is_grad_enabled():
            torch.compiler.cudagraph_mark_step_begin()  # the graphs may overwrite the results of the step before
        with self._autocast():
            feature = self.backbone.trunk(image_BCHW, *landmarks, **keys)
        # Outside of autocast, which would round the factors of the last layer again.
        return self.backbone.neck(feature.float())
