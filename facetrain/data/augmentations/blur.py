"""Gaussian blur with σ of 0.5 to 2 pixels, cut off at 4 pixels.

As a sampled kernel of 9 pixels, it has a standard deviation of 0.46 to 1.85 pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.data.augmentations.convolution import convolve
from facetrain.data.augmentations.draws import Draws

_REACH = 4
"""Pixels to each side. Two deviations of the widest blur: a longer kernel would change the images of all seeds."""


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Convolve along rows, and then along columns."""
    offset = torch.arange(-_REACH, _REACH + 1, device=image.device)
    kernel = torch.exp(-0.5 * (offset / draws.between(1, 0.5, 2.0)[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    return convolve(convolve(image, kernel[:, None, :]), kernel[:, :, None])
