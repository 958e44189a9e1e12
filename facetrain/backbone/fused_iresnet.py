"""IResNet's trunk in training, with batch norm, PReLU and residual addition fused into a few kernels.

The plain trunk reads and writes each activation once per operation. The fused one computes the same function and
gradient (the plain trunk is the oracle of the tests) with fewer passes over memory, and keeps three activations of a
block for the backward pass instead of six: the block's input x and the outputs c1 and c2 of its convolutions. The
backward pass recomputes the results of batch norm and PReLU.

One block, with N(·) for batch norm with batch statistics:

    y1 = N1(x)    c1 = conv1(y1)    y2 = PReLU(N2(c1))    c2 = conv2(y2)    z = N3(c2) + shortcut(x)

**The first batch norm needs no pass over its output in the backward pass.** y1 = scale·x + shift is affine in x, and
conv1 is linear. With g = ∂c1, k a tap of the 3 × 3 kernel, ∂Wx the weight gradient of conv1 as if its input were x, and
S[o, k] = Σ g[o, p] over the positions p where tap k does not read padding:

    ∂W[o, i, k] = scale_i · ∂Wx[o, i, k] + shift_i · S[o, k]
    Σ ∂y1_i     = Σ_{o,k} W[o, i, k] · S[o, k]
    Σ ∂y1_i·x_i = Σ_{o,k} W[o, i, k] · ∂Wx[o, i, k]

The first line holds because the weight gradient is linear in the input; the other two because ∂y1 is the transposed
convolution of g, so ⟨∂y1_i, v⟩ = ⟨W_i, weight gradient for the input v⟩ for each channel i, with v = 1 and v = x. S
follows from the sums of g over the image, its borders and its corners.
"""

# B local batch   C channels   P partial results

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.backbone.iresnet import IBasicBlock, IResNet
from facetrain.backbone.kernels.gradient import apply_gradient, border_sums, reduce_gradient
from facetrain.backbone.kernels.normalize import Normalization, normalize
from facetrain.backbone.kernels.statistics import finish_statistics, partial_statistics

_BatchNorm = nn.BatchNorm2d | nn.SyncBatchNorm


class AcrossRanks(Protocol):
    """Batch statistics over all ranks, for SyncBN. Every rank has as many rows."""

    world_size: int

    def combine(self, mean_C: Tensor, var_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance over all ranks from those of each rank. Collective."""

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Start summing over all ranks. Return a function that waits for the sum and returns it. Collective."""


@dataclass(frozen=True)
class _Context:
    """Settings that the parts of a trunk share."""

    across_ranks: AcrossRanks | None

    def statistics(self, norm: _BatchNorm, parts_P3C: Tensor) -> Normalization:
        """Return the normalization of a batch, and move the running statistics of `norm` toward it."""
        assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        running = norm.running_mean, norm.running_var
        if self.across_ranks is None:
            mean_C, _, invstd_C = finish_statistics(
                parts_P3C, norm.eps, running=running, momentum=norm.momentum
            )
        else:
            mean_C, var_C, _ = finish_statistics(parts_P3C, norm.eps)
            mean_C, var_C = self.across_ranks.combine(mean_C, var_C)
            invstd_C = (var_C + norm.eps).rsqrt()
            rows = parts_P3C[:, 0, 0].sum() * self.across_ranks.world_size
            running[0].lerp_(mean_C, norm.momentum)
            running[1].lerp_(var_C * (rows / (rows - 1).clamp_min(1)), norm.momentum)
        return Normalization(mean_C, invstd_C, norm.weight, norm.bias)

    def over_ranks(self, sums_3C: Tensor, x: Tensor) -> tuple[Tensor, int]:
        """Return the sums of the backward pass over all ranks, and the rows that they go over."""
        return self.start_over_ranks(sums_3C, x)()

    def start_over_ranks(self, sums_3C: Tensor, x: Tensor) -> Callable[[], tuple[Tensor, int]]:
        """Do as `over_ranks`, but return a function that waits for the exchange."""
        rows = x.numel() // x.shape[1]
        if self.across_ranks is None:
            return lambda: (sums_3C, rows)
        wait, all_rows = self.across_ranks.start_sum(sums_3C), rows * self.across_ranks.world_size
        return lambda: (wait(), all_rows)


class FusedTrunk:
    """The trunk of an IResNet in training, on fused kernels; it shares the network's parameters and buffers."""

    def __init__(self, network: IResNet, across_ranks: AcrossRanks | None = None) -> None:
        self._network, self._context = network, _Context(across_ranks)

    def __call__(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W), channels_last, to flat features."""
        network = self._network
        c = network.conv1(image_BCHW).contiguous(memory_format=torch.channels_last)
        x, parts_P3C = _Stem.apply(
            c, network.bn1.weight, network.bn1.bias, network.prelu.weight, network, self._context
        )
        for block in network.blocks():
            weights = [p for module in _norms_and_convolutions(block) for p in module.parameters()]
            x, parts_P3C = _Block.apply(x, parts_P3C, block, self._context, *weights)
        return network.flatten_features(x)


def _norms_and_convolutions(block: IBasicBlock) -> list[nn.Module]:
    """Return the modules of a block in the order of the gradients that `_Block.backward` returns."""
    modules: list[nn.Module] = [block.bn1, block.conv1, block.bn2, block.prelu, block.conv2, block.bn3]
    return modules + ([] if block.downsample is None else list(block.downsample.children()))


def _downsample(block: IBasicBlock) -> tuple[nn.Conv2d, _BatchNorm] | None:
    """Return convolution and batch norm of the shortcut; None where the shortcut is the input."""
    if block.downsample is None:
        return None
    convolution, norm = block.downsample.children()
    return cast("nn.Conv2d", convolution), cast("_BatchNorm", norm)


class _Stem(torch.autograd.Function):
    """PReLU(N(c)), which returns partial statistics for the first block too."""

    @staticmethod
    def forward(
        ctx: Any,
        c: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        slope_C: Tensor,
        network: IResNet,
        context: _Context,
    ) -> tuple[Tensor, Tensor]:
        norm = context.statistics(network.bn1, partial_statistics(c))
        x, parts_P3C = normalize(c, norm, slope_C=slope_C, statistics=True)
        assert parts_P3C is not None
        ctx.save_for_backward(c, norm.mean_C, norm.invstd_C, weight_C, bias_C, slope_C)
        ctx.context = context
        ctx.mark_non_differentiable(parts_P3C)
        return x, parts_P3C

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        c, mean_C, invstd_C, weight_C, bias_C, slope_C = ctx.saved_tensors
        norm = Normalization(mean_C, invstd_C, weight_C, bias_C)
        grad_c, sums_3C = _norm_backward(grad, c, norm, ctx.context, slope_C=slope_C)
        return grad_c, sums_3C[1], sums_3C[0], sums_3C[2], None, None


class _Block(torch.autograd.Function):
    """One IBasicBlock, with the partial statistics of its input and of its result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parts_P3C: Tensor, block: IBasicBlock, context: _Context, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm1 = context.statistics(block.bn1, parts_P3C)
        y1, _ = normalize(x, norm1)
        c1 = _convolve(block.conv1, y1)
        del y1
        norm2 = context.statistics(block.bn2, partial_statistics(c1))
        y2, _ = normalize(c1, norm2, slope_C=block.prelu.weight)
        c2 = _convolve(block.conv2, y2)
        del y2
        norm3 = context.statistics(block.bn3, partial_statistics(c2))
        shortcut, shortcut_norm = x, None
        if (downsample := _downsample(block)) is not None:
            shortcut = _convolve(downsample[0], x)
            shortcut_norm = context.statistics(downsample[1], partial_statistics(shortcut))
        z, z_parts_P3C = normalize(c2, norm3, residual=shortcut, residual_norm=shortcut_norm, statistics=True)
        norms = [norm1, norm2, norm3] + ([shortcut_norm] if shortcut_norm else [])
        statistics = [tensor for norm in norms for tensor in (norm.mean_C, norm.invstd_C)]
        ctx.save_for_backward(x, c1, c2, shortcut if shortcut_norm else None, *statistics)
        ctx.block, ctx.context = block, context
        assert z_parts_P3C is not None
        ctx.mark_non_differentiable(z_parts_P3C)
        return z, z_parts_P3C

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, c1, c2, shortcut, *statistics = ctx.saved_tensors
        block: IBasicBlock = ctx.block
        context: _Context = ctx.context
        downsample = _downsample(block)
        modules = [block.bn1, block.bn2, block.bn3] + ([downsample[1]] if downsample else [])
        norm1, norm2, norm3, *others = (
            Normalization(statistics[2 * n], statistics[2 * n + 1], module.weight, module.bias)
            for n, module in enumerate(modules)
        )
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_c2, sums3_3C = _norm_backward(grad, c2, norm3, context)
        # The input's gradient comes first: the kernel that reads it also recomputes y2, for the weight's gradient.
        grad_y2 = _input_gradient(block.conv2, grad_c2, c1.shape)
        slope_C = block.prelu.weight
        sums2_3C, y2 = reduce_gradient(grad_y2, c1, norm2, slope_C=slope_C, recompute=True)
        assert y2 is not None
        # The ranks exchange the sums while the weight's gradient is computed.
        wait_for_sums = context.start_over_ranks(sums2_3C, c1)
        grad_w2 = _weight_gradient(block.conv2, grad_c2, y2)
        del y2, grad_c2
        sums_3C, count = wait_for_sums()
        grad_c1, total_C = apply_gradient(grad_y2, c1, norm2, sums_3C, count, slope_C=slope_C, sums=True)
        assert total_C is not None
        del grad_y2
        grad_y1 = _input_gradient(block.conv1, grad_c1, x.shape)
        grad_w1, sums1_3C = _through_affine(block.conv1, grad_c1, x, norm1, total_C)
        grads_shortcut: list[Tensor | None] = []
        grad_shortcut = grad
        if downsample is not None:
            grad_d, sums_3C = _norm_backward(grad, shortcut, others[0], context)
            grad_shortcut = _input_gradient(downsample[0], grad_d, x.shape)
            grads_shortcut = [_weight_gradient(downsample[0], grad_d, x), sums_3C[1], sums_3C[0]]
        sums_3C, count = context.over_ranks(sums1_3C, x)
        grad_x, _no_sums = apply_gradient(grad_y1, x, norm1, sums_3C, count, residual=grad_shortcut)
        return (
            grad_x, None, None, None,
            sums1_3C[1], sums1_3C[0], grad_w1, sums2_3C[1], sums2_3C[0], sums2_3C[2],
            grad_w2, sums3_3C[1], sums3_3C[0], *grads_shortcut,
        )  # fmt: skip


def _norm_backward(
    grad: Tensor, x: Tensor, norm: Normalization, context: _Context, *, slope_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a batch norm's input, and (∂bias, ∂weight, ∂slope) of this rank, (3, C)."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    local_3C, _ = reduce_gradient(grad, x, norm, slope_C=slope_C)
    sums_3C, count = context.over_ranks(local_3C, x)
    grad_x, _no_sums = apply_gradient(grad, x, norm, sums_3C, count, slope_C=slope_C)
    return grad_x, local_3C


def _through_affine(
    convolution: nn.Conv2d, grad: Tensor, x: Tensor, norm: Normalization, total_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weight gradient of a 3 × 3 convolution of norm(x), and (∂bias, ∂weight, 0) of that norm, (3, C).

    By the identities at the top of this file; `grad` is the gradient of the convolution's result, `total_C` its sums.
    """
    by_x = _weight_gradient(convolution, grad, x)
    top, bottom, left, right, *corners = border_sums(grad)
    zero = torch.zeros_like(top)
    without_row = torch.stack([top, zero, bottom], 1)[:, :, None]
    without_column = torch.stack([left, zero, right], 1)[:, None, :]
    twice = torch.stack([corners[0], zero, corners[1], zero, zero, zero, corners[2], zero, corners[3]], 1)
    valid_O33 = total_C[:, None, None] - without_row - without_column + twice.view(-1, 3, 3)
    # The numbers with which the convolution was computed, not the float32 parameters.
    weight = convolution.weight.to(grad.dtype).to(by_x.dtype)
    grad_bias_C = (weight * valid_O33[:, None]).sum((0, 2, 3))
    product_C = (weight * by_x).sum((0, 2, 3))
    grad_weight_C = (product_C - norm.mean_C * grad_bias_C) * norm.invstd_C
    scale_C = norm.weight_C * norm.invstd_C
    shift_C = norm.bias_C - norm.mean_C * scale_C
    grad_weight = by_x * scale_C[:, None, None] + valid_O33[:, None] * shift_C[:, None, None]
    return grad_weight, torch.stack([grad_bias_C, grad_weight_C, torch.zeros_like(grad_bias_C)])


def _convolve(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    weight = convolution.weight.to(x.dtype)
    y = F.conv2d(x, weight, None, convolution.stride, convolution.padding)
    return y.contiguous(memory_format=torch.channels_last)


def _input_gradient(convolution: nn.Conv2d, grad: Tensor, shape: torch.Size) -> Tensor:
    # Only the shape of the input is read: no memory is taken for it.
    absent = grad.new_empty(1).expand(shape)
    grad_x, _, _ = _convolution_backward(convolution, grad, absent, [True, False, False])
    return grad_x.contiguous(memory_format=torch.channels_last)


def _weight_gradient(convolution: nn.Conv2d, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the float32 weight."""
    _, grad_weight, _ = _convolution_backward(convolution, grad, x, [False, True, False])
    return grad_weight.to(convolution.weight.dtype)


def _convolution_backward(
    convolution: nn.Conv2d, grad: Tensor, x: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        grad, x, convolution.weight.to(grad.dtype), None,
        convolution.stride, convolution.padding, convolution.dilation, False, [0, 0], 1, wanted,
    )  # fmt: skip
    return gradients
