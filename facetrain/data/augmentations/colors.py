"""Gray values and blends of images."""

from __future__ import annotations

import torch
from torch import Tensor

_LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue: ITU-R BT.601, as in OpenCV and torchvision."""


def gray_of(image: Tensor) -> Tensor:
    """Return the gray values of RGB images: (R, 3, S, S) -> (R, 1, S, S)."""
    # Created on the host: torch.tensor(device=…) would synchronize with the device.
    weight = torch.tensor(_LUMA).to(image.device, non_blocking=True).view(1, 3, 1, 1)
    return (image * weight).sum(1, keepdim=True)


def blend(image: Tensor, other: Tensor, share_R: Tensor) -> Tensor:
    """Return `share` of images and 1 − `share` of others, beyond them if it exceeds 1."""
    return other + (image - other) * share_R[:, None, None, None]
