"""Conversion to gray, with three equal channels."""

from __future__ import annotations

from torch import Tensor

from facetrain.data.augmentations.colors import gray_of
from facetrain.data.augmentations.draws import Draws


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return gray images."""
    return gray_of(image).expand_as(image)
