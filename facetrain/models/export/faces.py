"""Images of faces on which an exported file is compared with the network."""

# N images   S side in pixels

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.synthetic.render import render_jpeg

_NUM_DRAWN = 20
"""Drawn faces, each of another person. Drawing 100 would take longer than the export."""


def drawn_faces(size: int) -> Tensor:
    """Return drawn faces, uint8 (N, S, S, 3), the same at every call."""
    return decode_faces([render_jpeg(0, identity, 0, size) for identity in range(_NUM_DRAWN)], size)


def decode_faces(images: Sequence[bytes], size: int) -> Tensor:
    """Return encoded images as uint8 (N, S, S, 3) RGB.

    Raises:
        ImageError: an image cannot be decoded.
    """
    decoded = [resize_square(decode_rgb(data, location=f"image {n}"), size) for n, data in enumerate(images)]
    return torch.from_numpy(np.stack(decoded))
