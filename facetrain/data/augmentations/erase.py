"""Random erasing: a rectangle of 2 to 33 % of the area becomes gray (Zhong et al., AAAI 2020).

Area and ratio of the sides are those of torchvision's `RandomErasing`.
"""

from __future__ import annotations

import math

from torch import Tensor

from facetrain.data.augmentations.draws import Draws
from facetrain.data.augmentations.rectangles import rectangle

_AREA, _RATIO = (0.02, 0.33), (0.3, 3.3)


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return images that are 0, which is gray, inside of a rectangle."""
    area = draws.between(1, *_AREA)
    ratio = draws.between(2, math.log(_RATIO[0]), math.log(_RATIO[1])).exp()
    inside = rectangle(image, area, ratio, draws.between(3, 0, 1), draws.between(4, 0, 1))
    return image.masked_fill(inside, 0.0)
