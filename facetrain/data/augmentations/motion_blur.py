"""Motion blur: the mean along a line of 3 to 9 pixels in any direction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from facetrain.data.augmentations.convolution import convolve
from facetrain.data.augmentations.draws import Draws

_LENGTHS = (3.0, 9.0)
_REACH = 4


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Convolve with a line, whose pixels at its borders count by the part that it covers."""
    length, angle = (
        value[:, None, None] for value in (draws.between(1, *_LENGTHS), draws.between(2, 0, math.pi))
    )
    offset = torch.arange(-_REACH, _REACH + 1, device=image.device)
    y, x = offset[:, None], offset[None, :]
    along, across = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    kernel = (1 - across.abs()).clamp(0, 1) * (length / 2 + 0.5 - along.abs()).clamp(0, 1)
    return convolve(image, kernel / kernel.sum((1, 2), keepdim=True))
