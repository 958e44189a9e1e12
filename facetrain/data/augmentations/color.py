"""Change of brightness, contrast and saturation, each by up to 30 %."""

from __future__ import annotations

from torch import Tensor

from facetrain.data.augmentations.colors import blend, gray_of
from facetrain.data.augmentations.draws import Draws


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Add a brightness, and scale the distances to the mean and to the gray values."""
    image = image + draws.between(1, -0.3, 0.3)[:, None, None, None]
    image = blend(image, image.mean((1, 2, 3), keepdim=True), draws.between(2, 0.7, 1.3))
    return blend(image, gray_of(image), draws.between(3, 0.7, 1.3)).clamp(-1, 1)
