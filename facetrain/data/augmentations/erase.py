"""Random erasing: a rectangle of 2 to 33 % of the area becomes gray (Zhong et al., AAAI 2020).

Area and ratio of the sides are those of torchvision's `RandomErasing`.
"""

from __future__ import annotations

from torch import Tensor

from facetrain.data.augmentations.draws import Draws
from facetrain.data.augmentations.rectangles import random_rectangle


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return images that are 0, which is gray, inside of a rectangle."""
    inside = random_rectangle(image, draws, area=(0.02, 0.33), ratio=(0.3, 3.3))
    return image.masked_fill(inside, 0.0)
