"""Networks and sets whose answers are known: pictures of one colour, and a network that sees nothing else."""

from __future__ import annotations

import cv2
import numpy as np
import torch
from torch import Tensor

from facetrain.verify.embed import PictureEmbedder


def face(person: int, variation: int = 0, size: int = 16) -> bytes:
    """Return a picture of one colour, a person's own, a little different in each variation."""
    colour = np.random.default_rng(person).uniform(30, 225, 3)
    colour += np.random.default_rng((person, variation)).normal(0, 12, 3)
    image = np.full((size, size, 3), colour.clip(0, 255), np.uint8)
    return bytes(cv2.imencode(".png", image)[1])


def mean_colour(image_BCHW: Tensor) -> Tensor:
    """Embed pictures as their mean colour."""
    return image_BCHW.mean((2, 3))


def embedder(size: int = 16) -> PictureEmbedder:
    """Return what `mean_colour` needs to be evaluated."""
    return PictureEmbedder(mean_colour, size, 7, torch.device("cpu"))
