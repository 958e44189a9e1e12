"""Rectangles in images."""

from __future__ import annotations

import torch
from torch import Tensor


def rectangle(image: Tensor, area_R: Tensor, ratio_R: Tensor, x_R: Tensor, y_R: Tensor) -> Tensor:
    """Return which pixels of each image (R, 3, S, S) are inside its rectangle, bool (R, 1, S, S).

    Args:
        image: the images, for their size and device.
        area_R: share of the area.
        ratio_R: width divided by height; a side that exceeds the image's is cut.
        x_R: place between the left and the right edge, from 0 to 1.
        y_R: place between the upper and the lower edge, from 0 to 1.
    """
    side = image.shape[-1]
    pixel = torch.arange(side, device=image.device)

    def inside(length_R: Tensor, place_R: Tensor) -> Tensor:
        length_R = length_R.mul(side).round().clamp(1, side)
        first_R = (place_R * (side - length_R + 1)).floor().clamp(max=side - 1)
        return (pixel >= first_R[:, None]) & (pixel < (first_R + length_R)[:, None])

    columns_RS = inside((area_R * ratio_R).sqrt(), x_R)
    rows_RS = inside((area_R / ratio_R).sqrt(), y_R)
    return (rows_RS[:, :, None] & columns_RS[:, None, :])[:, None]
