"""AdaFace's low resolution: to 20 to 100 % of the side and back, each by one of OpenCV's five interpolations.

AdaFace (Kim et al., CVPR 2022), dataset/augmenter.py. Both ways together are one linear map of the rows and of the
columns, whose matrix OpenCV gives.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np
from torch import Tensor

from facetrain.data.augmentations.draws import Draws
from facetrain.device.page_locked import to_device

INTERPOLATIONS = (
    cv2.INTER_NEAREST,
    cv2.INTER_LINEAR,
    cv2.INTER_AREA,
    cv2.INTER_CUBIC,
    cv2.INTER_LANCZOS4,
)
_SMALLEST = 0.2


def augment(image: Tensor, draws: Draws) -> Tensor:
    """Return images of a low resolution, clipped to the range of pixels."""
    side, count = image.shape[-1], len(INTERPOLATIONS)
    small_R = ((_SMALLEST + (1 - _SMALLEST) * draws.on_host(1)) * side).long().clamp_(min=1)
    chosen = zip(
        small_R.tolist(), draws.choice(2, count).tolist(), draws.choice(3, count).tolist(), strict=True
    )
    # Not by `draws`: from 64 KiB on, the host would wait for the copy, and each map of 112 pixels has 50 KB.
    map_RSS = to_device(np.stack([_there_and_back(side, *one) for one in chosen]), image.device)[:, None]
    return (map_RSS @ image @ map_RSS.mT).clamp(-1, 1)


@lru_cache(maxsize=1024)
def _there_and_back(side: int, small: int, down: int, up: int) -> np.ndarray:
    """Return the matrix (side, side) of a reduction to `small` pixels and the enlargement."""
    columns = cv2.resize(np.eye(side, dtype=np.float32), (side, small), interpolation=INTERPOLATIONS[down])
    return cv2.resize(columns, (side, side), interpolation=INTERPOLATIONS[up])
