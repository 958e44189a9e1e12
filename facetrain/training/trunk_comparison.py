"""Comparison of the fused trunk of an IResNet with the plain one, by a step that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from facetrain.backbone.base import Backbone
from facetrain.training.precision import tf32_convolutions

_MOST_TIMES, _ROUNDING = 4.0, 0.05
"""The error of a tensor may be this many times the plain trunk's, and this much more, relative to its norm."""
_MOST_IN_THE_MEDIAN = 1.5
"""How many times as large as the plain trunk's the errors may be in the median. Sharper than the bound of one tensor:
a wrong tile changes every tensor behind it, whereas rounding favors neither trunk."""
_LEAST = 1e-4
"""Tensors whose numbers are this small beside the median tensor's are 0 but for rounding, such as the gradient of a
bias before a batch norm."""


def trunk_difference(
    backbone: Backbone, fused_trunk: Callable[[Tensor], Tensor], image_BCHW: Tensor, dtype: torch.dtype
) -> str:
    """Return in what a fused trunk differs from the plain one by more than rounding, "" if in nothing.

    Compares embeddings, gradients and running statistics of both, in autocast, with the plain trunk in float32. Leaves
    the network as it was: no gradient is stored, and the buffers are restored. Collective if batch norms are
    synchronized.

    Args:
        backbone: network in training mode.
        fused_trunk: computes what `backbone.trunk` does.
        image_BCHW: normalized images, in the memory format of training.
        dtype: dtype of the activations in training.
    """
    before = [buffer.clone() for buffer in backbone.buffers()]

    def results(trunk: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        found = _results(backbone, trunk, image_BCHW, dtype)
        with torch.no_grad():
            for buffer, value in zip(backbone.buffers(), before, strict=True):
                buffer.copy_(value)
        return found

    with tf32_convolutions(False):
        # In float32, as the reference of both: it shows how far rounding alone may lead.
        true = results(backbone.trunk, None)
    plain, fused = results(backbone.trunk, dtype), results(fused_trunk, dtype)
    size = {name: tensor.square().mean().sqrt().item() for name, tensor in true.items()}
    least = _LEAST * median(size.values())
    errors = {
        name: [((found[name] - tensor).norm() / tensor.norm()).item() for found in (plain, fused)]
        for name, tensor in true.items()
        if size[name] > least
    }
    for name, (by_plain, by_fused) in errors.items():
        # Not a comparison for "larger": NaN must be refused.
        if not by_fused <= _MOST_TIMES * by_plain + _ROUNDING:
            return f"{name} differs from float32 by {by_fused:.2g}, and PyTorch's by {by_plain:.2g}"
    ratio = median(by_fused / max(by_plain, 1e-6) for by_plain, by_fused in errors.values())
    if not ratio <= _MOST_IN_THE_MEDIAN:
        return f"their errors are {ratio:.2g} times as large as PyTorch's in the median"
    return ""


def _results(
    backbone: Backbone, trunk: Callable[[Tensor], Tensor], image_BCHW: Tensor, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return embeddings, gradients and floating-point buffers of one step; `dtype`: of autocast, None: without."""
    trained = {name: weight for name, weight in backbone.named_parameters() if weight.requires_grad}
    device = image_BCHW.device
    # The same dropout in each trunk, and the same random numbers afterwards as without the comparison.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            feature = trunk(image_BCHW)
        embedding_BD = backbone.neck(feature.float())
        # Any gradient of the embeddings will do; a random one reaches all weights.
        slope_BD = torch.randn_like(embedding_BD)
    # Not `backward`: it would store the gradients, and let DDP exchange them.
    gradients = torch.autograd.grad(embedding_BD, list(trained.values()), slope_BD, allow_unused=True)
    found = {"the embedding": embedding_BD.detach()}
    found |= {
        f"the gradient of {name}": grad
        for name, grad in zip(trained, gradients, strict=True)
        if grad is not None
    }
    found |= {
        f"the buffer {name}": buffer.clone()
        for name, buffer in backbone.named_buffers()
        if buffer.is_floating_point()
    }
    return {name: tensor.float() for name, tensor in found.items()}
