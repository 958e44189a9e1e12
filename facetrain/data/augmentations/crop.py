"""Random square crop of 80 to 100 % of the side, enlarged to the full size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.data.augmentations.draws import Draws


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return enlarged crops."""
    scale, x, y = _window(draws)
    zero = torch.zeros_like(scale)
    theta = torch.stack([torch.stack([scale, zero, x], 1), torch.stack([zero, scale, y], 1)], 1)
    grid = F.affine_grid(theta, list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)


def move(landmarks_R52: Tensor, draws: Draws) -> Tensor:
    """Return the landmarks in the crops."""
    scale, x, y = _window(draws)
    # The crop shows the coordinate scale · c + shift, both from −1 to 1, at c.
    shift = torch.stack([x, y], 1)[:, None]
    return ((2 * landmarks_R52 - 1 - shift) / scale[:, None, None] + 1) / 2


def _window(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return the side of each crop as a fraction, and x and y of its center, −1 to 1."""
    scale = draws.between(1, 0.8, 1.0)
    return scale, (1 - scale) * draws.between(2, -1, 1), (1 - scale) * draws.between(3, -1, 1)
