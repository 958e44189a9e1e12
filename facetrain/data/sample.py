"""A few pictures of a dataset, as a network takes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from facetrain.data.augment import normalise
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.source import FaceSource

_FACES = 128


def some_faces(source: FaceSource, image_size: int) -> Tensor:
    """Return pictures of a dataset, evenly spread: float32 (B, 3, H, W) from −1 to 1.

    Raises:
        ImageError: one of them cannot be decoded.
    """
    step = max(source.num_images // _FACES, 1)
    pictures = [
        resize_square(decode_rgb(source.read(number), where=source.where(number)), image_size)
        for number in range(0, source.num_images, step)[:_FACES]
    ]
    return normalise(torch.from_numpy(np.stack(pictures)))
