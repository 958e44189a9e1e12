"""Gaussian blur with σ of 0.5 to 2 pixels, cut off at 4 pixels.

As a sampled kernel of 9 pixels, it has a standard deviation of 0.46 to 1.85 pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.data.augmentations.draws import Draws

_REACH = 4
"""Pixels to each side. Two deviations of the widest blur: a longer kernel would change the images of all seeds."""


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Convolve along rows, and then along columns."""
    offset = torch.arange(-_REACH, _REACH + 1, device=image.device)
    kernel = torch.exp(-0.5 * (offset / draws.between(1, 0.5, 2.0)[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    return _convolve(_convolve(image, kernel[:, None, :]), kernel[:, :, None])


def _convolve(image: Tensor, kernel_RKL: Tensor) -> Tensor:
    """Return each image of (R, 3, S, S) after its kernel, (R, K, L) with odd K and L; edges are continued."""
    rows, columns = (size // 2 for size in kernel_RKL.shape[1:])
    padded = F.pad(image, (columns, columns, rows, rows), mode="replicate")
    # Grouped, because every channel of every image has a kernel.
    flat = padded.reshape(1, -1, *padded.shape[2:])
    kernel = kernel_RKL.repeat_interleave(image.shape[1], 0)[:, None]
    return F.conv2d(flat, kernel, groups=len(kernel)).view(image.shape)
