"""Synchronized batch normalization: statistics over the batches of all ranks, on CUDA and on CPU.

`torch.nn.SyncBatchNorm` supports CUDA only (torch 2.13). With the version here, a run on CPU depends on the
global batch alone, not on the number of ranks.
"""

# N local samples and positions   C channels   W world size

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.distributed import collectives
from facetrain.errors import ConfigError

_LocalBatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
BatchNorm = _LocalBatchNorm | nn.SyncBatchNorm
"""Every batch norm, also the synchronized ones of this module."""


def use_sync_batch_norm(module: nn.Module, device: torch.device) -> None:
    """Replace every batch norm inside `module` by a synchronized one. Names in the state dict stay the same.

    Raises:
        ConfigError: a batch norm has a forward of its own, other than timm's with an activation.
    """
    if collectives.world_size() == 1:
        return
    for name, child in module.named_children():
        if isinstance(child, _LocalBatchNorm):
            setattr(module, name, _synchronized(child, device))
        else:
            use_sync_batch_norm(child, device)


def _synchronized(norm: _LocalBatchNorm, device: torch.device) -> nn.Module:
    # Not imported: without it, the network has no layer of timm.
    timm: Any = sys.modules.get("timm.layers")
    forward = type(norm).forward
    has_activation = timm is not None and forward is timm.BatchNormAct2d.forward
    if not has_activation and forward is not nn.BatchNorm2d.forward:
        raise ConfigError(
            f"model.batch_norm: sync cannot replace {type(norm).__name__}, a batch norm with a forward of its own; "
            "set model.batch_norm to local"
        )
    if device.type == "cuda":
        # torch's own function would leave the activation out.
        convert = timm.convert_sync_batchnorm if has_activation else nn.SyncBatchNorm.convert_sync_batchnorm
        synchronized: nn.Module = convert(norm)
        return synchronized
    return (_HostSyncBatchNormAct if has_activation else _HostSyncBatchNorm).sharing_tensors_of(norm)


class _HostSyncBatchNorm(nn.BatchNorm2d):
    """Synchronized batch norm for CPU tensors of any shape. All ranks must have the same batch size."""

    @classmethod
    def sharing_tensors_of(cls, norm: _LocalBatchNorm) -> _HostSyncBatchNorm:
        """Return a synchronized norm that shares the parameters, buffers and submodules of `norm`."""
        sync = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        # Shared, not copied: an optimizer may hold the parameters already.
        for name, parameter in norm.named_parameters(recurse=False):
            sync.register_parameter(name, parameter)
        for name, buffer in norm.named_buffers(recurse=False):
            sync.register_buffer(name, buffer)
        for name, child in norm.named_children():
            sync.add_module(name, child)
        return sync.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, C, …): by the statistics of all ranks in training, by the running statistics in evaluation."""
        if not self.training:
            mean_C, var_C = self.running_mean, self.running_var
            return F.batch_norm(
                x, mean_C, var_C, self.weight, self.bias, training=mean_C is None, eps=self.eps
            )
        y, mean_C, var_C = _SyncNormalize.apply(x, self.weight, self.bias, self.eps)
        self._track(mean_C, var_C, x.numel() // self.num_features * collectives.world_size())
        return y

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        # A momentum of None means the mean of all batches, as in torch.
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), share)
        # As torch: batches are normalized by the biased variance, and the running one is unbiased.
        unbiased_C = var_C * (count / max(count - 1, 1))
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), share)


class _HostSyncBatchNormAct(_HostSyncBatchNorm):
    """Synchronized form of timm's BatchNormAct2d, for CPU tensors."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, C, H, W) and apply the activation."""
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


class _SyncNormalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # One pass, and many times as fast as `torch.var_mean` over all dimensions but one.
        mean_C, var_C = torch.batch_norm_update_stats(_wide(x), None, None, 0.0)
        mean_C, var_C = _combine(mean_C, var_C)
        ctx.save_for_backward(x, weight_C, mean_C, var_C)
        ctx.eps, ctx.has_bias = eps, bias_C is not None
        # They are returned for the running statistics alone; the gradient through them is part of `backward`.
        ctx.mark_non_differentiable(mean_C, var_C)
        # As in evaluation, with the statistics of all ranks in place of the running ones: torch's fused kernel in one
        # pass.
        y = torch.batch_norm(x, weight_C, bias_C, mean_C, var_C, False, 0.0, eps, False)
        return y, mean_C, var_C

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight_C, mean_C, var_C = ctx.saved_tensors
        wide = _wide(x)
        invstd_C = (var_C + ctx.eps).rsqrt()
        slope_C = invstd_C if weight_C is None else invstd_C * weight_C
        # With x̂ the normalized input and g the gradient: dx = (g − mean(g) − x̂ · mean(g·x̂)) · w / σ, and both means
        # are over all ranks. torch's kernel gives g · w / σ with both sums of this rank, in one pass as in evaluation.
        factor_C = torch.ones_like(mean_C) if weight_C is None else weight_C.to(wide.dtype)
        grad_x, grad_weight_C, grad_bias_C = torch.ops.aten.native_batch_norm_backward(
            _wide(grad_y), wide, factor_C, mean_C, var_C, None, None, False, ctx.eps, [True, True, True]
        )
        # The two sums of all ranks in one message; the gradients of weight and bias stay local, as DDP averages them.
        count = x.numel() // x.shape[1] * collectives.world_size()
        mean_grad_C, mean_product_C = (
            collectives.sum_(torch.stack([grad_bias_C, grad_weight_C])) / count * slope_C
        )
        # The rest of dx is linear in x: a normalization with other numbers.
        product_C, none_C = mean_product_C * invstd_C, torch.zeros_like(mean_C)
        offset_C = mean_grad_C - mean_C * product_C
        grad_x -= torch.batch_norm(wide, product_C, offset_C, none_C, none_C + 1, False, 0.0, 0.0, False)
        return (
            grad_x.to(x.dtype),
            grad_weight_C if weight_C is not None else None,
            grad_bias_C if ctx.has_bias else None,
            None,
        )


def _wide(x: Tensor) -> Tensor:
    """Return x in the dtype of its statistics: float32 for bf16 activations, too, as in torch's own kernels."""
    return x if x.dtype == torch.float64 else x.float()


def _combine(mean_C: Tensor, var_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance over all ranks from mean and variance of each rank, for equal numbers of samples.

    The total variance is the mean of the variances plus the variance of the means. A difference of
    sums of squares would lose digits by cancellation.
    """
    means_WC, vars_WC = collectives.gather(torch.stack([mean_C, var_C])).unbind(1)
    return means_WC.mean(0), vars_WC.mean(0) + means_WC.var(0, correction=0)
