"""JPEG compression artifacts, computed on the device (ITU-T T.81; colors: JFIF)."""

# S images   C channels   H, W padded to multiples of 16   8×8 blocks

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# ITU-T T.81, tables K.1 and K.2: quantization tables that encoders scale by the quality.
_LUMA = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMA = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99, *([99] * 32),
)  # fmt: skip
_RGB_TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
_YCC_TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136, -0.714136), (1.0, 1.772, 0.0))


def recompress(image: Tensor, quality_S: Tensor) -> Tensor:
    """Compress and decompress images as JPEG with 4:2:0 chroma: float32 (S, 3, H, W) in [-1, 1] -> same shape.

    `quality_S`, float32 (S,), is the quality of each image from 1 to 100, scaled as in libjpeg.
    """
    height, width = image.shape[2:]
    pixels = ((image + 1) * 127.5).round()
    pixels = F.pad(pixels, (0, -width % 16, 0, -height % 16), mode="replicate")
    luma, blue, red = _convert_color(pixels, _RGB_TO_YCC).unbind(1)
    luma = _quantize_dct(luma[:, None] - 128, _table(_LUMA, quality_S))
    chroma = F.avg_pool2d(torch.stack([blue, red], 1), 2)
    chroma = _quantize_dct(chroma, _table(_CHROMA, quality_S))
    chroma = F.interpolate(chroma, scale_factor=2, mode="bilinear", align_corners=False)
    pixels = _convert_color(torch.cat([luma + 128, chroma], 1), _YCC_TO_RGB)
    return pixels.round().clamp(0, 255)[:, :, :height, :width] / 127.5 - 1


def _convert_color(image: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    # Created on the host, here and below: torch.tensor(device=…) would synchronize with the device.
    return torch.einsum("schw,dc->sdhw", image, torch.tensor(matrix).to(image.device, non_blocking=True))


def _table(base: tuple[int, ...], quality_S: Tensor) -> Tensor:
    """Scale a quantization table as libjpeg does: (S,) -> (S, 1, 1, 1, 8, 8)."""
    scale = torch.where(quality_S < 50, 5000 / quality_S, 200 - 2 * quality_S).floor()
    table = torch.tensor(base, dtype=torch.float32).to(quality_S.device, non_blocking=True).view(8, 8)
    return ((table * scale.view(-1, 1, 1, 1, 1, 1) + 50) / 100).floor().clamp(1, 255)


def _quantize_dct(image: Tensor, table: Tensor) -> Tensor:
    """Quantize the 8 × 8 DCT blocks of float32 (S, C, H, W) with a table per image."""
    frequency = torch.arange(8, device=image.device, dtype=torch.float32)
    cosine = torch.cos(frequency[:, None] * (2 * frequency + 1) * math.pi / 16) / 2
    cosine[0] /= math.sqrt(2)
    count, channels, height, width = image.shape
    block = image.reshape(count, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
    quantized = ((cosine @ block @ cosine.T) / table).round() * table
    return (cosine.T @ quantized @ cosine).transpose(3, 4).reshape(count, channels, height, width)
