"""Random rectangles in images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from facetrain.data.augmentations.draws import Draws


def random_rectangle(
    image: Tensor, draws: Draws, *, area: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Return which pixels of each image (R, 3, S, S) are inside its rectangle, bool (R, 1, S, S).

    Args:
        image: the images, for their size and device.
        draws: the numbers 1 to 4 are taken.
        area: bounds of the share of the area.
        ratio: bounds of width divided by height; a side that exceeds the image's is cut.
    """
    area_R = draws.between(1, *area)
    ratio_R = draws.between(2, *map(math.log, ratio)).exp()
    side = image.shape[-1]
    pixel = torch.arange(side, device=image.device)

    def inside(length_R: Tensor, place_R: Tensor) -> Tensor:
        length_R = length_R.mul(side).round().clamp(1, side)
        first_R = (place_R * (side - length_R + 1)).floor().clamp(max=side - 1)
        return (pixel >= first_R[:, None]) & (pixel < (first_R + length_R)[:, None])

    columns_RS = inside((area_R * ratio_R).sqrt(), draws.between(3, 0, 1))
    rows_RS = inside((area_R / ratio_R).sqrt(), draws.between(4, 0, 1))
    return (rows_RS[:, :, None] & columns_RS[:, None, :])[:, None]
