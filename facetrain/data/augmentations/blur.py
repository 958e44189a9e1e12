"""Gaussian blur with a standard deviation of 0.5 to 2 pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from facetrain.data.augmentations.convolution import convolve
from facetrain.data.augmentations.draws import Draws

_REACH = 4


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Convolve along rows, and then along columns."""
    offset = torch.arange(-_REACH, _REACH + 1, device=image.device)
    kernel = torch.exp(-0.5 * (offset / draws.between(1, 0.5, 2.0)[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    return convolve(convolve(image, kernel[:, None, :]), kernel[:, :, None])
