"""Rotation around the center by up to 15 degrees; corners without a pixel are black."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.data.augmentations.draws import Draws

_LARGEST = math.radians(15)


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return images that are turned clockwise by an angle from −15 to 15 degrees."""
    cos, sin = _angle(draws)
    zero = torch.zeros_like(cos)
    # From a place in the turned image to that in the image.
    theta = torch.stack([torch.stack([cos, sin, zero], 1), torch.stack([-sin, cos, zero], 1)], 1)
    grid = F.affine_grid(theta, list(image.shape), align_corners=False)
    # Black is −1, and `grid_sample` fills with 0.
    return F.grid_sample(image + 1, grid, mode="bilinear", padding_mode="zeros", align_corners=False) - 1


def move(landmarks_R52: Tensor, draws: Draws) -> Tensor:
    """Return the turned landmarks."""
    cos, sin = (value[:, None] for value in _angle(draws))
    x, y = (2 * landmarks_R52 - 1).unbind(-1)
    return (torch.stack([cos * x - sin * y, sin * x + cos * y], -1) + 1) / 2


def _angle(draws: Draws) -> tuple[Tensor, Tensor]:
    angle = draws.between(1, -_LARGEST, _LARGEST)
    return angle.cos(), angle.sin()
