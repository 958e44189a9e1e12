"""AdaFace's change of brightness, contrast and saturation by factors from 0.5 to 1.5, in any order.

torchvision's `ColorJitter(0.5, 0.5, 0.5)`, as in AdaFace (Kim et al., CVPR 2022), dataset/augmenter.py.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from facetrain.data.augmentations.colors import blend, gray_of
from facetrain.data.augmentations.draws import Draws

_ORDERS = tuple(itertools.permutations(range(3)))


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Apply the three changes in a drawn order; each clips to the range of pixels."""
    factors = [draws.between(number, 0.5, 1.5) for number in (1, 2, 3)]
    order_R3 = torch.tensor(_ORDERS)[draws.choice(4, len(_ORDERS))]
    image = (image + 1) / 2
    for step in range(3):
        changed = image.clone()
        for kind, change in enumerate((_brightness, _contrast, _saturation)):
            rows = draws.to_device((order_R3[:, step] == kind).nonzero()[:, 0])
            if len(rows):
                changed[rows] = change(image[rows], factors[kind][rows]).clamp(0, 1)
        image = changed
    return image * 2 - 1


def _brightness(image: Tensor, factor_R: Tensor) -> Tensor:
    return image * factor_R[:, None, None, None]


def _contrast(image: Tensor, factor_R: Tensor) -> Tensor:
    return blend(image, gray_of(image).mean((1, 2, 3), keepdim=True), factor_R)


def _saturation(image: Tensor, factor_R: Tensor) -> Tensor:
    return blend(image, gray_of(image), factor_R)
