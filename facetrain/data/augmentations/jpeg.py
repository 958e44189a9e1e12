"""JPEG compression again, with a quality of 30 to 95.

The loss of ITU-T T.81 with the tables of its annex K, scaled as libjpeg does, and halved chroma. It runs on the device:
torchvision's `jpeg` runs on the host, which would have to wait for the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.data.augmentations.draws import Draws

_QUALITY = (30.0, 95.0)
_LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61), (12, 12, 14, 19, 26, 58, 60, 55), (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62), (18, 22, 37, 56, 68, 109, 103, 77), (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101), (72, 92, 95, 98, 112, 100, 103, 99),
)  # fmt: skip
_CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99), (18, 21, 26, 66, 99, 99, 99, 99), (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99), *(((99,) * 8,) * 4),
)  # fmt: skip
_TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
_TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136, -0.714136), (1.0, 1.772, 0.0))
_DCT = tuple(
    tuple(
        math.sqrt((1 if row == 0 else 2) / 8) * math.cos((2 * n + 1) * row * math.pi / 16) for n in range(8)
    )
    for row in range(8)
)


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return images with the loss of JPEG."""
    return compressed(image, draws.between(1, *_QUALITY).round())


def compressed(image: Tensor, quality_R: Tensor) -> Tensor:
    """Return images (R, 3, S, S) from −1 to 1 with the loss of JPEG at a quality from 1 to 100 each."""
    side = image.shape[-1]
    padded = F.pad(((image + 1) * 127.5).round() - 128, (0, -side % 16, 0, -side % 16), mode="replicate")
    ycc = torch.einsum("ij,rjhw->rihw", _constant(_TO_YCC, image), padded)
    luma = _quantized(ycc[:, :1], _LUMA, quality_R)
    chroma = _quantized(F.avg_pool2d(ycc[:, 1:], 2), _CHROMA, quality_R)
    chroma = F.interpolate(chroma, scale_factor=2, mode="bilinear", align_corners=False)
    rgb = torch.einsum("ij,rjhw->rihw", _constant(_TO_RGB, image), torch.cat([luma, chroma], 1))
    return ((rgb[..., :side, :side].round() + 128) / 127.5 - 1).clamp(-1, 1)


def _quantized(plane: Tensor, table: tuple[tuple[int, ...], ...], quality_R: Tensor) -> Tensor:
    """Quantize the frequencies of the blocks of 8 × 8 pixels of planes (R, P, H, W)."""
    scale_R = torch.where(quality_R < 50, (5000 / quality_R).floor(), 200 - 2 * quality_R)
    step = ((_constant(table, plane) * scale_R[:, None, None] + 50) / 100).floor().clamp(1, 255)
    dct, step = _constant(_DCT, plane), step[:, None, None, None]
    blocks = plane.unflatten(2, (-1, 8)).unflatten(4, (-1, 8)).transpose(3, 4)
    frequency = (dct @ blocks @ dct.T / step).round() * step
    return (dct.T @ frequency @ dct).transpose(3, 4).reshape(plane.shape).clamp(-128, 127)


def _constant(values: tuple[tuple[float, ...], ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(like.device, non_blocking=True)
