"""IResNet's trunk in training, with batch norm, PReLU and residual addition fused into a few kernels.

The plain trunk reads and writes each activation once per operation. The fused one computes the same function and
gradient (the plain trunk is the oracle of the tests) with fewer passes over memory, and keeps three activations of a
block for the backward pass instead of six: the normalized input x̂ and the outputs c1 and c2 of its convolutions. The
backward pass recomputes the results of batch norm and PReLU.

One block, with N(·) for batch norm with batch statistics:

    y1 = N1(x)    c1 = conv1(y1)    y2 = PReLU(N2(c1))    c2 = conv2(y2)    z = N3(c2) + shortcut(x)

**The first batch norm needs no pass over its output in the backward pass.** y1 = w·x̂ + b is affine in the normalized
input x̂, and conv1 is linear. With g = ∂c1, k a tap of the 3 × 3 kernel, ∂Wx̂ the weight gradient of conv1 as if its
input were x̂, and S[o, k] = Σ g[o, p] over the positions p where tap k does not read padding:

    ∂W[o, i, k] = w_i · ∂Wx̂[o, i, k] + b_i · S[o, k]
    Σ ∂y1_i     = Σ_{o,k} W[o, i, k] · S[o, k]
    Σ ∂y1_i·x̂_i = Σ_{o,k} W[o, i, k] · ∂Wx̂[o, i, k]

The first line holds because the weight gradient is linear in the input; the other two because ∂y1 is the transposed
convolution of g, so ⟨∂y1_i, v⟩ = ⟨W_i, weight gradient for the input v⟩ for each channel i, with v = 1 and v = x̂. S
follows from the sums of g over the image, its borders and its corners. So a block keeps x̂ in place of x: its first
kernel writes it beside y1. Similar identities hold for x itself, but where |mean| is far above the deviation, their
two products cancel: at a ratio of 50, the error of ∂W in 16 bits was eight times as large.
"""

# B local batch   C channels   P partial results

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.backbone.iresnet import IBasicBlock, IResNet
from facetrain.backbone.kernels.gradient import (
    apply_gradient,
    border_sums,
    finish_weight_gradient,
    reduce_gradient,
)
from facetrain.backbone.kernels.normalize import Normalization, normalize
from facetrain.backbone.kernels.statistics import finish_statistics, partial_statistics
from facetrain.torch_private import foreach_add_, foreach_copy_


@dataclass(frozen=True)
class _Context:
    """Values that the parts of a trunk share in a step."""

    weights: dict[nn.Conv2d, Tensor]
    """Weights of the convolutions in the dtype of the activations."""

    def statistics(self, norm: nn.BatchNorm2d, parts_P3C: Tensor) -> Normalization:
        """Return the normalization of a batch, and move the running statistics of `norm` toward it."""
        assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
        mean_C, invstd_C = finish_statistics(
            parts_P3C, norm.eps, running=(norm.running_mean, norm.running_var), momentum=norm.momentum
        )
        return Normalization(mean_C, invstd_C, norm.weight, norm.bias)

    def convolve(self, convolution: nn.Conv2d, x: Tensor) -> Tensor:
        """Return the result of a convolution, channels_last."""
        y = F.conv2d(x, self.weights[convolution], None, convolution.stride, convolution.padding)
        return y.contiguous(memory_format=torch.channels_last)

    def input_gradient(self, convolution: nn.Conv2d, grad: Tensor, *, like: Tensor) -> Tensor:
        """Return the gradient of a convolution's input; only shape and strides of `like` are read.

        A tensor with the strides of real activations: for one that looks like NCHW, cuDNN transposes `grad` and the
        result, 68 MB for each image of an r100.
        """
        grad_x, _, _ = self._backward(convolution, grad, like, [True, False, False])
        return grad_x.contiguous(memory_format=torch.channels_last)

    def weight_gradient(self, convolution: nn.Conv2d, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of a convolution's weight for the input x, in the dtype of x, channels_last."""
        _, grad_weight, _ = self._backward(convolution, grad, x, [False, True, False])
        return grad_weight.contiguous(memory_format=torch.channels_last)

    def _backward(
        self, convolution: nn.Conv2d, grad: Tensor, x: Tensor, wanted: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            grad, x, self.weights[convolution], None,
            convolution.stride, convolution.padding, convolution.dilation, False, [0, 0], 1, wanted,
        )  # fmt: skip
        return gradients


class FusedTrunk:
    """The trunk of an IResNet in training, on fused kernels; it shares the network's parameters and buffers."""

    def __init__(self, network: IResNet) -> None:
        self._network = network
        blocks = [module for block in network.blocks() for module in _norms_and_convolutions(block)]
        self._convolutions = [module for module in blocks if isinstance(module, nn.Conv2d)]
        self._norms = [module for module in (network.bn1, *blocks) if isinstance(module, nn.BatchNorm2d)]

    def __call__(self, image_BCHW: Tensor, *, key_B: Tensor | None = None) -> Tensor:
        """Map normalized images (B, 3, H, W), channels_last, to flat features; see `Backbone.draws_by_sample`."""
        network = self._network
        c = network.conv1(image_BCHW).contiguous(memory_format=torch.channels_last)
        context = _Context(self._round_weights(c.dtype))
        # All at once: the counters of an r100 would be 150 launches of a kernel.
        foreach_add_([norm.num_batches_tracked for norm in self._norms], 1)  # type: ignore[misc]
        x, parts_P3C = _Stem.apply(
            c, network.bn1.weight, network.bn1.bias, network.prelu.weight, network, context
        )
        for block in network.blocks():
            weights = [p for module in _norms_and_convolutions(block) for p in module.parameters()]
            x, parts_P3C = _Block.apply(x, parts_P3C, block, context, *weights)
        return network.flatten_features(x, key_B)

    @torch.no_grad()
    def _round_weights(self, dtype: torch.dtype) -> dict[nn.Conv2d, Tensor]:
        """Return the weights of the convolutions in a dtype, for the forward and the backward pass of a step."""
        weights = [convolution.weight for convolution in self._convolutions]
        rounded = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        foreach_copy_(rounded, weights)
        return dict(zip(self._convolutions, rounded, strict=True))


def _norms_and_convolutions(block: IBasicBlock) -> list[nn.Module]:
    """Return the modules of a block in the order of the gradients that `_Block.backward` returns."""
    modules: list[nn.Module] = [block.bn1, block.conv1, block.bn2, block.prelu, block.conv2, block.bn3]
    return modules + ([] if block.downsample is None else list(block.downsample.children()))


def _downsample(block: IBasicBlock) -> tuple[nn.Conv2d, nn.BatchNorm2d] | None:
    """Return convolution and batch norm of the shortcut; None where the shortcut is the input."""
    if block.downsample is None:
        return None
    convolution, norm = block.downsample.children()
    return cast("nn.Conv2d", convolution), cast("nn.BatchNorm2d", norm)


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
        x, parts_P3C, _ = normalize(c, norm, slope_C=slope_C, statistics=True)
        assert parts_P3C is not None
        ctx.save_for_backward(c, norm.mean_C, norm.invstd_C, weight_C, bias_C, slope_C)
        ctx.mark_non_differentiable(parts_P3C)
        ctx.set_materialize_grads(False)  # of the parts: zeros, which a kernel would write
        return x, parts_P3C

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        c, mean_C, invstd_C, weight_C, bias_C, slope_C = ctx.saved_tensors
        norm = Normalization(mean_C, invstd_C, weight_C, bias_C)
        grad_c, sums_3C = _norm_backward(grad, c, norm, slope_C=slope_C)
        return grad_c, sums_3C[1], sums_3C[0], sums_3C[2], None, None


class _Block(torch.autograd.Function):
    """One IBasicBlock, with the partial statistics of its input and of its result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parts_P3C: Tensor, block: IBasicBlock, context: _Context, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm1 = context.statistics(block.bn1, parts_P3C)
        y1, _, normed = normalize(x, norm1, normed=True)
        c1 = context.convolve(block.conv1, y1)
        del y1  # its memory is used again by y2
        norm2 = context.statistics(block.bn2, partial_statistics(c1))
        y2, *_ = normalize(c1, norm2, slope_C=block.prelu.weight)
        c2 = context.convolve(block.conv2, y2)
        del y2
        norm3 = context.statistics(block.bn3, partial_statistics(c2))
        # The shortcut's batch norm is applied by the kernel that adds it: its result is never written.
        shortcut, shortcut_norm = x, None
        if (downsample := _downsample(block)) is not None:
            shortcut = context.convolve(downsample[0], x)
            shortcut_norm = context.statistics(downsample[1], partial_statistics(shortcut))
        z, z_parts_P3C, _ = normalize(
            c2, norm3, residual=shortcut, residual_norm=shortcut_norm, statistics=True
        )
        norms = [norm1, norm2, norm3] + ([shortcut_norm] if shortcut_norm else [])
        statistics = [tensor for norm in norms for tensor in (norm.mean_C, norm.invstd_C)]
        # Not the weights of the batch norms: the optimizer changes them only after the backward pass.
        ctx.save_for_backward(normed, c1, c2, shortcut if shortcut_norm else None, *statistics)
        ctx.block, ctx.context = block, context
        assert z_parts_P3C is not None
        ctx.mark_non_differentiable(z_parts_P3C)
        ctx.set_materialize_grads(False)
        return z, z_parts_P3C

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        normed, c1, c2, shortcut, *statistics = ctx.saved_tensors
        block: IBasicBlock = ctx.block
        context: _Context = ctx.context
        downsample = _downsample(block)
        modules = [block.bn1, block.bn2, block.bn3] + ([downsample[1]] if downsample else [])
        norm1, norm2, norm3, *others = (
            Normalization(statistics[2 * n], statistics[2 * n + 1], module.weight, module.bias)
            for n, module in enumerate(modules)
        )
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_c2, sums3_3C = _norm_backward(grad, c2, norm3)
        # The input's gradient comes first: the kernel that reads it also recomputes y2, for the weight's gradient.
        grad_y2 = context.input_gradient(block.conv2, grad_c2, like=c1)
        slope_C = block.prelu.weight
        sums2_3C, y2 = reduce_gradient(grad_y2, c1, norm2, slope_C=slope_C, recompute=True)
        assert y2 is not None
        grad_w2 = context.weight_gradient(block.conv2, grad_c2, y2).float()
        del y2, grad_c2
        grad_c1, total_C = apply_gradient(grad_y2, c1, norm2, sums2_3C, slope_C=slope_C, sums=True)
        assert total_C is not None
        del grad_y2
        grad_y1 = context.input_gradient(block.conv1, grad_c1, like=normed)
        grad_w1, sums1_3C = through_batch_norm(context, block.conv1, grad_c1, normed, norm1, total_C)
        grads_shortcut: list[Tensor | None] = []
        # Where the shortcut is the input itself, the gradient passes unchanged.
        grad_shortcut = grad
        if downsample is not None:
            grad_d, sums_3C = _norm_backward(grad, shortcut, others[0])
            grad_shortcut = context.input_gradient(downsample[0], grad_d, like=normed)
            # Of the input x = mean + x̂ / invstd: the sums of `grad_d`, a gradient of a batch norm's input, are 0.
            grad_w = context.weight_gradient(downsample[0], grad_d, normed).float()
            grad_w = grad_w.div_(norm1.invstd_C[:, None, None])
            grads_shortcut = [grad_w, sums_3C[1], sums_3C[0]]
        grad_x, _no_sums = apply_gradient(
            grad_y1, normed, norm1, sums1_3C, residual=grad_shortcut, x_is_normed=True
        )
        return (
            grad_x, None, None, None,
            sums1_3C[1], sums1_3C[0], grad_w1, sums2_3C[1], sums2_3C[0], sums2_3C[2],
            grad_w2, sums3_3C[1], sums3_3C[0], *grads_shortcut,
        )  # fmt: skip


def _norm_backward(
    grad: Tensor, x: Tensor, norm: Normalization, *, slope_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a batch norm's input, and (∂bias, ∂weight, ∂slope), (3, C)."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    sums_3C, _ = reduce_gradient(grad, x, norm, slope_C=slope_C)
    grad_x, _no_sums = apply_gradient(grad, x, norm, sums_3C, slope_C=slope_C)
    return grad_x, sums_3C


def through_batch_norm(
    context: _Context,
    convolution: nn.Conv2d,
    grad: Tensor,
    normed: Tensor,
    norm: Normalization,
    total_C: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the weight gradient of a 3 × 3 convolution of w·x̂ + b, and (∂bias, ∂weight, 0) of that norm, (3, C).

    By the identities at the top of this file; `grad` is the gradient of the convolution's result, `total_C` its sums.
    """
    by_normed = context.weight_gradient(convolution, grad, normed)
    return finish_weight_gradient(by_normed, context.weights[convolution], norm, total_C, border_sums(grad))
