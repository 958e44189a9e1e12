"""AdaFace's crop: a random part of the image stays at its place, and the rest is black.

The part has 20 to 100 % of the area and a ratio of the sides from 3/4 to 4/3, as torchvision's `RandomResizedCrop`
draws it (AdaFace, dataset/augmenter.py); a part that would be larger than the image is cut, and not drawn again.
"""

from __future__ import annotations

from torch import Tensor

from facetrain.data.augmentations.draws import Draws
from facetrain.data.augmentations.rectangles import random_rectangle


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return images that are black outside of a rectangle."""
    inside = random_rectangle(image, draws, area=(0.2, 1.0), ratio=(3 / 4, 4 / 3))
    return image.where(inside, -1.0)
