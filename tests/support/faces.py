"""Images of one color per identity, and a network that embeds an image as its mean color."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import cv2
import numpy as np
import torch
from torch import Tensor

from facetrain.embeddings.embedder import ImageEmbedder


def face(person: int, variation: int = 0, size: int = 16) -> bytes:
    """Return a PNG of one color, which depends on the person and slightly on the variation."""
    color = np.random.default_rng(person).uniform(30, 225, 3)
    color += np.random.default_rng((person, variation)).normal(0, 12, 3)
    image = np.full((size, size, 3), color.clip(0, 255), np.uint8)
    return bytes(cv2.imencode(".png", image)[1])


def mean_color(image_BCHW: Tensor, factors: Sequence[float] = (1, 1, 1)) -> Tensor:
    """Embed images as their mean color, each channel times its factor."""
    return image_BCHW.mean((2, 3)) * torch.tensor(factors)


def embedder(size: int = 16, factors: Sequence[float] = (1, 1, 1)) -> ImageEmbedder:
    """Return an embedder with `mean_color` as its network."""
    return ImageEmbedder(partial(mean_color, factors=factors), size, 7, torch.device("cpu"))
