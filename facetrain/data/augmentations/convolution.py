"""Convolution of images with a kernel of their own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def convolve(image: Tensor, kernel_RKL: Tensor) -> Tensor:
    """Return each image of (R, 3, S, S) after its kernel, (R, K, L) with odd K and L; edges are continued."""
    rows, columns = (size // 2 for size in kernel_RKL.shape[1:])
    padded = F.pad(image, (columns, columns, rows, rows), mode="replicate")
    # Grouped, because every channel of every image has a kernel.
    flat = padded.reshape(1, -1, *padded.shape[2:])
    kernel = kernel_RKL.repeat_interleave(image.shape[1], 0)[:, None]
    return F.conv2d(flat, kernel, groups=len(kernel)).view(image.shape)
