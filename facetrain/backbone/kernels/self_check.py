"""Check that the kernels work on a device, and agree with PyTorch."""

# C channels

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from facetrain.backbone.kernels.gradient import apply_gradient, reduce_gradient
from facetrain.backbone.kernels.normalize import Normalization, normalize
from facetrain.backbone.kernels.statistics import finish_statistics, partial_statistics
from facetrain.backbone.kernels.tiles import count_rows
from facetrain.device.kernel_launches import launch_error


def why_unusable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernels cannot be used on a device, "" if they can.

    Compiles and launches them once, and compares them with PyTorch's batch norm and PReLU on a small batch: Triton
    needs a C compiler and Python's headers besides a GPU, which a container may lack.
    """
    interpreted = not isinstance(count_rows, triton.JITFunction)
    if not interpreted and device.type != "cuda":
        return f"the kernels need a GPU, and this is {device.type}"
    if not interpreted and torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or higher"

    def compare() -> None:
        error = _error_beside_torch(device, dtype)
        # Rounding gives 2e-6 (float32), 1e-3 (float16) and 8e-3 (bfloat16).
        if not error < 0.03:
            raise ValueError(f"the kernels differ from PyTorch's batch norm by {error:.2g}")

    return launch_error(compare)


def _error_beside_torch(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of a forward and backward pass on (2, 64, 5, 5), in the norm of each result."""
    generator = torch.Generator().manual_seed(0)
    x, grad, residual = (torch.randn(2, 64, 5, 5, generator=generator) for _ in range(3))
    x, grad, residual = (
        t.to(device, dtype).contiguous(memory_format=torch.channels_last) for t in (x, grad, residual)
    )
    weight_C, bias_C, slope_C = (torch.linspace(low, 1.0, 64, device=device) for low in (0.5, -1.0, 0.1))
    leaves = [t.float().requires_grad_() for t in (x, weight_C, bias_C, slope_C)]
    y_true = F.prelu(F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True), leaves[3])
    grads_true = torch.autograd.grad(y_true, leaves, grad.float())
    mean_C, _, invstd_C = finish_statistics(partial_statistics(x), 1e-5)
    norm = Normalization(mean_C, invstd_C, weight_C, bias_C)
    y, *_ = normalize(x, norm, slope_C=slope_C)
    z, *_ = normalize(x, norm, residual=residual, residual_norm=norm, statistics=True)
    # Not by `F.batch_norm` with the given statistics: torch 2.11 refuses its eps of 0.
    scale_C11 = (weight_C * invstd_C)[:, None, None]
    shift_C11 = bias_C[:, None, None] - mean_C[:, None, None] * scale_C11
    z_true = (x.float() + residual.float()) * scale_C11 + 2 * shift_C11
    sums_3C, again = reduce_gradient(grad, x, norm, slope_C=slope_C, recompute=True)
    grad_x, _ = apply_gradient(grad, x, norm, sums_3C, x.numel() // 64, slope_C=slope_C)
    assert again is not None
    pairs = [(y, y_true), (again, y_true), (z, z_true), (grad_x, grads_true[0])]
    pairs += list(zip((sums_3C[1], sums_3C[0], sums_3C[2]), grads_true[1:], strict=True))
    return max(((found.float() - true).norm() / true.norm()).item() for found, true in pairs)
