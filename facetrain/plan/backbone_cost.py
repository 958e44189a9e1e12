"""Memory and operations of a backbone, counted in a training step on tensors that have shapes but no memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from facetrain.backbone.base import Backbone
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.zoo import build_backbone
from facetrain.torch_private import FakeTensorMode, LiveBytes

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class BackboneCost:
    """Bytes and operations of one backbone on one rank. The bytes of a step are linear in the batch."""

    parameters: int
    """Number of trainable parameters."""
    state_bytes: int
    """Bytes of parameters and buffers."""
    flops_per_image: int
    """Operations of forward and backward pass without recomputation; a multiply-add counts as two."""
    moved_per_image: int
    """Bytes that the operations of a step read and write if none are fused, without the part that is the same for
    every batch size."""
    measured: tuple[tuple[int, int, int], tuple[int, int, int]]
    """Two points (batch, bytes kept by the forward pass, peak of bytes in the backward pass)."""

    def kept(self, batch: int) -> int:
        """Return the bytes that exist after the forward pass: activations, and weights cast to 16 bits."""
        return self._at(batch, 1)

    def peak(self, batch: int) -> int:
        """Return the peak of bytes of forward and backward pass."""
        return self._at(batch, 2)

    def _at(self, batch: int, column: int) -> int:
        low, high = self.measured
        slope = (high[column] - low[column]) / (high[0] - low[0])
        return round(low[column] + slope * (batch - low[0]))


def measure_backbone(
    options: dict[str, Any],
    *,
    precision: str,
    batch: int,
    checkpoint_activations: bool = False,
    gradients_held: bool = True,
) -> BackboneCost:
    """Count a training step of `build_backbone(**options)` with `batch` images and with twice as many.

    Args:
        options: arguments of `build_backbone`.
        precision: fp32, bf16 or fp16.
        batch: images per rank and micro-batch.
        checkpoint_activations: recompute activations in the backward pass.
        gradients_held: the gradients exist before the backward pass, as DDP's buckets do.

    Raises:
        ModelError: there is no such backbone.
    """
    net = _on_meta(options, checkpoint_activations=checkpoint_activations)
    state = sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    (*low, moved), (*high, moved_by_two) = (
        _count_bytes(net, options, size, precision, gradients_held) for size in (batch, 2 * batch)
    )
    return BackboneCost(
        parameters=sum(p.numel() for p in net.parameters() if p.requires_grad),
        state_bytes=state,
        flops_per_image=_count_flops(options),
        moved_per_image=(moved_by_two - moved) // batch,
        measured=((batch, low[0], low[1]), (2 * batch, high[0], high[1])),
    )


def forward_bytes(options: dict[str, Any], *, precision: str, batch: int) -> int:
    """Return the peak of bytes while `build_backbone(**options)` embeds a batch, as in verification."""
    net = _on_meta(options).eval()
    with FakeTensorMode():
        _give_fake_tensors(net)
        image = _image(options, batch)
        with torch.no_grad(), LiveBytes() as live:
            _forward(net, image, precision)
        return live.peak


def _on_meta(options: dict[str, Any], *, checkpoint_activations: bool = False) -> Backbone:
    with torch.device("meta"):
        return build_backbone(**options, checkpoint_activations=checkpoint_activations)


def _count_bytes(
    net: Backbone, options: dict[str, Any], batch: int, precision: str, gradients_held: bool
) -> tuple[int, int, int]:
    """Return the bytes that the forward pass keeps, their peak, and the bytes read and written."""
    with FakeTensorMode():
        _give_fake_tensors(net)
        if gradients_held:
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
        image = _image(options, batch)
        with LiveBytes() as live:
            embedding_BD = _forward(net, image, precision)
            kept = live.now
            embedding_BD.backward(torch.zeros_like(embedding_BD))
        return kept, live.peak, live.moved


def _count_flops(options: dict[str, Any]) -> int:
    # Not together with the bytes: the counter's hooks would keep recomputed activations alive.
    net = _on_meta(options)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        _give_fake_tensors(net)
        _forward(net, _image(options, 2), "fp32").sum().backward()
    return counter.get_total_flops() // 2


def _forward(net: Backbone, image_BCHW: Tensor, precision: str) -> Tensor:
    with torch.autocast("cpu", _DTYPES[precision]) if precision in _DTYPES else nullcontext():
        feature = net.trunk(image_BCHW)
    return net.neck(feature.float())


def _image(options: dict[str, Any], batch: int) -> Tensor:
    side = options.get("image_size", 112)
    return torch.zeros(batch, 3, side, side)


def _give_fake_tensors(net: nn.Module) -> None:
    """Replace the tensors of a network on the meta device by fake tensors on the CPU."""
    # The CPU-only backward pass of PReLU has other temporaries than the one that a GPU runs.
    use_torch_backward(net)
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = nn.Parameter(torch.zeros(parameter.shape), parameter.requires_grad)
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
