"""Low resolution: to one of a few sizes by areas, and bilinear enlargement, as in arcface_torch's DALI reader."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from facetrain.data.augmentations.draws import Draws


def augment(image: Tensor, draws: Draws, *, sizes: Sequence[int] = ()) -> Tensor:
    """Shrink to one of the sizes, or to 50, 60, 70 or 80 % of the size, and enlarge again."""
    sizes = sizes or [int((0.5 + 0.1 * n) * image.shape[2]) for n in range(4)]
    level_R, out = draws.choice(1, len(sizes)), image.clone()
    for level, size in enumerate(sizes):
        rows = draws.to_device((level_R == level).nonzero()[:, 0])
        if len(rows):
            small = F.interpolate(image[rows], size=(size, size), mode="area")
            out[rows] = F.interpolate(small, size=image.shape[2:], mode="bilinear", align_corners=False)
    return out
