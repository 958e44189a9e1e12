"""Two networks of one architecture, of which small faces take one and other faces the other.

A network that learns small faces loses accuracy on large ones, and learns less about small ones if it must keep both.
The choice by the quality of each image avoids this: PETALface (Narayan et al., WACV 2025, arXiv 2412.07771) weighs two
low-rank adapters by it. Here each image takes one of two whole networks, so that any training can give them. Both must
give similar embeddings of one face, as the student of `distill` and its teacher do.
"""

# B batch   H, W height and width   D embedding

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.errors import ModelError

GATE_KEY = "size_gate"
"""Key in the description of a model file: true if the file has two networks."""
REDUCTION = 4
"""Small faces look alike after a reduction to a quarter of the side, 28 of 112 pixels. This side has to divide by 4."""
_LOST = 0.005
"""Share of an image's variance that the reduction may lose if the face is small. Of the training data's faces that were
enlarged from 16, 20, 24, 32 and 40 pixels, 100, 98, 89, 48 and 18 % are small, and none of full size. Twice as much is
better for faces of 24 pixels and worse for faces of 32 (docs/log/log.md)."""


class SizeGate(nn.Module):
    """Two networks, and the choice between them for each image."""

    def __init__(self, large: nn.Module, small: nn.Module) -> None:
        """Take the network for large faces and the network for small ones, with equal inputs and embedding sizes."""
        super().__init__()
        self.large, self.small = large, small
        self.takes_landmarks = bool(getattr(large, "takes_landmarks", False))

    def forward(self, image_BCHW: Tensor, *landmarks: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W), and the landmarks if the networks take them, to embeddings (B, D)."""
        small_B = is_small(image_BCHW)
        # An exported graph has no branches. A batch of both kinds runs whole through both networks: an embedding would
        # depend on the other images of its batch if the networks got parts of it, see `BLOCK` of inference_network.py.
        if not torch.compiler.is_exporting() and bool(small_B.all() == small_B.any()):
            return (self.small if small_B[0] else self.large)(image_BCHW, *landmarks)
        embeddings = self.small(image_BCHW, *landmarks), self.large(image_BCHW, *landmarks)
        return torch.where(small_B[:, None], *embeddings)


def require_one_network(description: Mapping[str, Any], origin: str) -> None:
    """Check by the description of a model file that it can be trained, averaged, or one of two networks.

    Raises:
        ModelError: the file has two networks.
    """
    if description.get(GATE_KEY) is True:
        raise ModelError(
            f"{origin}: has two networks, for small and for other faces, and one is needed; give one of the models "
            "that it was made of"
        )


def is_small(image_BCHW: Tensor) -> Tensor:
    """Return whether the faces of images (B, 3, H, W) have no more detail than small faces, bool (B,).

    As `finetune.face_detail`, with one size and in tensor operations, which a file in ONNX can have.
    """
    image = image_BCHW.float().mean(1, keepdim=True)
    small = F.avg_pool2d(image, REDUCTION)
    enlarged = F.interpolate(small, size=image.shape[2:], mode="bicubic", align_corners=False)
    lost_B = (image - enlarged).square().mean((1, 2, 3))
    return lost_B <= _LOST * image.var((1, 2, 3), correction=0)
