"""Memory and operations of a backbone, counted in a training step on tensors that have shapes but no memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.low_rank import add_adapters
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.settings import LoraSettings
from facetrain.backbone.zoo import build_on_meta
from facetrain.optim.frozen_parts import freeze, has_frozen_batch_norm, trained_buffers
from facetrain.optim.parameter_names import require_prefixes
from facetrain.plan.memory_traffic import MemoryTraffic
from facetrain.torch_private import FakeTensorMode, LiveBytes

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainedParts:
    """Parts of a backbone that are trained; the keys of the config's section `model` with these names."""

    freeze: tuple[str, ...] = ()
    train_batch_norm: bool = True
    lora: LoraSettings | None = None
    lr_factors: tuple[str, ...] = ()
    """Prefixes only: the factors change neither memory nor time."""

    def apply(self, net: nn.Module) -> None:
        """Freeze the other parts of a backbone, and add the adapters.

        Raises:
            ConfigError: a prefix names no part, or no part is left to train.
        """
        require_prefixes(net, self.lr_factors, "model.lr_factors")
        freeze(net, self.freeze, train_batch_norm=self.train_batch_norm)
        if self.lora is not None:
            add_adapters(net, self.lora.rank, alpha=self.lora.alpha, targets=self.lora.targets)


@dataclass(frozen=True)
class BackboneCost:
    """Bytes and operations of one backbone on one rank. The bytes of a step are linear in the batch."""

    parameters: int
    """Number of trainable parameters."""
    averaged_bytes: int
    """Bytes of a moving average of all that is trained."""
    state_bytes: int
    """Bytes of parameters and buffers."""
    flops_per_image: int
    """Operations of forward and backward pass without recomputation; a multiply-add counts as two."""
    moved_per_image: int
    """Bytes that the kernels of forward and backward pass read and write for an image."""
    moved_per_pass: int
    """Bytes that they read and write for any number of images: casts of weights, and gradients that are added up."""
    launches: int
    """Kernels that the host launches for forward and backward pass."""
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
    fused: bool = False,
    trained: TrainedParts | None = None,
    image_size: int | None = None,
) -> BackboneCost:
    """Count a training step of `build_backbone(**options)` with `batch` images and with twice as many.

    Args:
        options: arguments of `build_backbone`.
        precision: fp32, bf16 or fp16.
        batch: images per rank and micro-batch.
        checkpoint_activations: recompute activations in the backward pass.
        gradients_held: the gradients exist before the backward pass, as DDP's buckets do.
        fused: count the fused trunk of an IResNet (`train.fused`); needs Triton.
        trained: parts that are trained; None: all.
        image_size: side of the images in pixels; None: that of the options.

    Raises:
        ModelError: there is no such backbone.
        ConfigError: `trained` does not fit it.
    """
    net = _on_meta(options, trained, checkpoint_activations=checkpoint_activations)
    state = sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    low, high = (
        _count_pass(
            net,
            _image_shape(options, images, image_size),
            precision,
            gradients_held=gradients_held,
            fused=fused,
        )
        for images in (batch, 2 * batch)
    )
    moved_per_image = (high.moved - low.moved) // batch
    weights = [p for p in net.parameters() if p.requires_grad]
    averaged = [*weights, *(b for _, b in trained_buffers(net) if b.is_floating_point())]
    return BackboneCost(
        parameters=sum(p.numel() for p in weights),
        averaged_bytes=sum(t.numel() * t.element_size() for t in averaged),
        state_bytes=state,
        flops_per_image=_count_flops(tuple(options.items()), trained, image_size),
        moved_per_image=moved_per_image,
        moved_per_pass=low.moved - batch * moved_per_image,
        launches=low.launches,
        measured=((batch, low.kept, low.peak), (2 * batch, high.kept, high.peak)),
    )


def forward_bytes(options: dict[str, Any], *, precision: str, batch: int) -> int:
    """Return the peak of bytes while `build_backbone(**options)` embeds a batch, as in verification."""
    net = _on_meta(options).eval()
    with FakeTensorMode():
        _give_fake_tensors(net)
        image = torch.zeros(_image_shape(options, batch))
        with torch.no_grad(), LiveBytes() as live:
            _forward(net, net.trunk, image, precision)
        return live.peak


def freezes_batch_norm(options: dict[str, Any], trained: TrainedParts) -> bool:
    """Return whether a batch norm of `build_backbone(**options)` is frozen.

    Raises:
        ConfigError: `trained` does not fit the backbone.
    """
    return has_frozen_batch_norm(_on_meta(options, trained))


def _on_meta(
    options: dict[str, Any], trained: TrainedParts | None = None, *, checkpoint_activations: bool = False
) -> Backbone:
    net = build_on_meta(**options, checkpoint_activations=checkpoint_activations)
    if trained is not None:
        with torch.device("meta"):
            trained.apply(net)
    return net


@dataclass(frozen=True)
class _Pass:
    """Counts of one forward and backward pass."""

    kept: int
    """Bytes that exist after the forward pass."""
    peak: int
    moved: int
    launches: int


def _count_pass(
    net: Backbone, image_shape: Sequence[int], precision: str, *, gradients_held: bool, fused: bool
) -> _Pass:
    with FakeTensorMode():
        _give_fake_tensors(net)
        if gradients_held:
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        image_BCHW = torch.zeros(image_shape)
        if fused:
            return _count_fused_pass(net, image_BCHW, precision)
        with LiveBytes() as live, MemoryTraffic() as traffic:
            kept = _forward_and_backward(net, net.trunk, image_BCHW, precision, live)
        return _Pass(kept, live.peak, traffic.bytes, traffic.launches)


def _count_fused_pass(net: Backbone, image_BCHW: Tensor, precision: str) -> _Pass:
    from facetrain.backbone.fused_iresnet import FusedTrunk
    from facetrain.device.kernel_launches import shapes_only

    assert isinstance(net, IResNet)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.weight = nn.Parameter(module.weight.detach().contiguous(memory_format=torch.channels_last))
    image_BCHW = image_BCHW.contiguous(memory_format=torch.channels_last)
    # On fake CPU tensors some convolutions return NCHW, which a clone changes; on CUDA they return channels_last.
    traffic = MemoryTraffic(without=frozenset(["clone"]))
    with shapes_only() as kernels, LiveBytes() as live, traffic:
        kept = _forward_and_backward(net, FusedTrunk(net), image_BCHW, precision, live)
    return _Pass(kept, live.peak, traffic.bytes + kernels.bytes, traffic.launches + kernels.launches)


def _forward_and_backward(
    net: Backbone, trunk: Callable[[Tensor], Tensor], image_BCHW: Tensor, precision: str, live: LiveBytes
) -> int:
    """Run both passes; return the bytes that exist between them."""
    embedding_BD = _forward(net, trunk, image_BCHW, precision)
    kept = live.now
    embedding_BD.backward(torch.zeros_like(embedding_BD))
    return kept


def can_count_fused() -> bool:
    """Return whether the fused trunk can be counted on this machine: its module imports Triton."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=32)  # a search for a change that makes a run fit counts the same network again and again
def _count_flops(
    options: tuple[tuple[str, Any], ...], trained: TrainedParts | None, image_size: int | None
) -> int:
    # Not together with the bytes: the counter's hooks would keep recomputed activations alive.
    net = _on_meta(dict(options), trained)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        _give_fake_tensors(net)
        image_BCHW = torch.zeros(_image_shape(dict(options), 2, image_size))
        _forward(net, net.trunk, image_BCHW, "fp32").sum().backward()
    return counter.get_total_flops() // 2


def _forward(net: Backbone, trunk: Callable[[Tensor], Tensor], image_BCHW: Tensor, precision: str) -> Tensor:
    with torch.autocast("cpu", _DTYPES[precision]) if precision in _DTYPES else nullcontext():
        feature = trunk(image_BCHW)
    return net.neck(feature.float())


def _image_shape(
    options: dict[str, Any], batch: int, image_size: int | None = None
) -> tuple[int, int, int, int]:
    side = image_size or options.get("image_size", 112)
    return batch, 3, side, side


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
