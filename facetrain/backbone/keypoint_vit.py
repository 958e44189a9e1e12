"""Vision transformers with keypoint relative position encoding (KP-RPE), with CVLface's parameter names.

Kim et al., "KeyPoint Relative Position Encoding for Face Recognition", CVPR 2024, arXiv 2403.14852. The attention of
patch i to patch j gets a bias that depends on the relative position of the two patches, and on the position of i
relative to five landmarks of the face. So the network can follow a face that is not where the alignment expects it.
"""

# B batch   N tokens   H heads   P parameters of a bias: 10 factors of the offsets and one constant

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.backbone.recompute import run_block
from facetrain.backbone.vit import Attention, Block, VisionTransformer
from facetrain.face_landmarks import NORMALIZED_TEMPLATE

_OFFSETS = 2 * len(NORMALIZED_TEMPLATE)
"""Numbers that place a patch relative to the landmarks: x and y of its distance to each."""
_LEAST_DISTANCES = (1, 2, 4)
"""Least distance, in patches, of the bins 1, 2 and 3 of a relative coordinate: the piecewise function of iRPE (Wu et
al., ICCV 2021, arXiv 2107.14222, equation 18) with the published α = 1.9, β = 3.8 and γ = 15.2."""
_BINS = 2 * len(_LEAST_DISTANCES) + 1
"""Bins of a relative coordinate, of both signs."""
BUCKETS = _BINS**2
"""Classes of relative positions of two patches; each has one bias (method "product" of iRPE)."""


def bucket_ids(side: int, device: torch.device) -> Tensor:
    """Return the bucket of each pair of patches (i, j) of a square grid, row by row: int64 (side², side²)."""
    position = torch.arange(side, device=device)
    distance = position[:, None] - position
    size = sum((distance.abs() >= least).long() for least in _LEAST_DISTANCES)
    coordinate = distance.sign() * size + len(_LEAST_DISTANCES)
    ids = coordinate[:, None, :, None] * _BINS + coordinate[None, :, None, :]
    return ids.reshape(side**2, side**2)


def landmark_offsets(landmarks_B52: Tensor, side: int) -> Tensor:
    """Return the centers of the patches of a square grid minus the landmarks, in units of the image's side.

    Maps landmarks (B, 5, 2), x and y from 0 to 1, to float32 (B, side², 10).
    """
    center = (torch.arange(side, dtype=torch.float32, device=landmarks_B52.device) + 0.5) / side
    grid_N2 = torch.stack([center.repeat(side), center.repeat_interleave(side)], 1)
    return (grid_N2[:, None] - landmarks_B52.float()[:, None]).flatten(2)


class KeypointAttention(Attention):
    """Multi-head self-attention with a bias that depends on landmarks."""

    def forward(  # type: ignore[override]
        self, x: Tensor, offset_BNP: Tensor, table: Tensor, bucket_NN: Tensor
    ) -> Tensor:
        """Map tokens (B, N, width) to the same shape.

        Args:
            x: tokens.
            offset_BNP: offsets of the patches from the landmarks, and a one.
            table: parameters of the bias, (H, buckets, P).
            bucket_NN: bucket of each pair of patches, int64.
        """
        return super().forward(x, _attention_bias(offset_BNP, table, bucket_NN))


def _attention_bias(offset_BNP: Tensor, table: Tensor, bucket_NN: Tensor) -> Tensor:
    """Return bias[b, h, i, j] = offset[b, i] · table[h, bucket[i, j]], (B, H, N, N)."""
    heads, buckets, numbers = table.shape
    tokens = len(bucket_NN)
    # The lookup comes before the product: its gradient then is as large as the table of one image, not of the batch,
    # and that of `embedding` is the same in each run, which that of `gather` is not on a GPU.
    rows = F.embedding(bucket_NN, table.transpose(0, 1).reshape(buckets, heads * numbers))
    rows = rows.view(tokens, tokens, heads, numbers).permute(0, 3, 2, 1).reshape(tokens, numbers, -1)
    bias = torch.bmm(offset_BNP.transpose(0, 1), rows)
    return bias.view(tokens, -1, heads, tokens).permute(1, 2, 0, 3)


class KeypointBlock(Block):
    """Attention with KP-RPE and MLP, each with layer norm before it and a shortcut around it."""

    attention = KeypointAttention


class KeypointVisionTransformer(VisionTransformer):
    """Vision transformer with KP-RPE.

    Corresponds to CVLface's `rel_keypoint_splithead_unshared`: each head of each block has its own biases, which are
    linear in the offsets. They begin at 0, so a new network computes what one without KP-RPE does.
    """

    takes_landmarks = True
    block = KeypointBlock

    def __init__(
        self,
        width: int,
        depth: int,
        *,
        patch: int = 8,
        heads: int = 8,
        **options: Any,
    ) -> None:
        """Take the options of `VisionTransformer`."""
        super().__init__(width, depth, patch=patch, heads=heads, mask_token=False, **options)
        self._heads = heads
        self.keypoint_linear = nn.Linear(_OFFSETS, depth * heads * BUCKETS)
        nn.init.zeros_(self.keypoint_linear.weight)
        nn.init.zeros_(self.keypoint_linear.bias)

    def trunk(
        self, image_BCHW: Tensor, landmarks_B52: Tensor | None = None, *, key_B: Tensor | None = None
    ) -> Tensor:
        """Map normalized images (B, 3, H, W) and their landmarks to tokens, flat (B, N·width).

        The landmarks (B, 5, 2) are x and y as fractions of the image's sides. None: the landmarks of an aligned face.
        """
        if landmarks_B52 is None:
            landmarks_B52 = _aligned_landmarks(image_BCHW)
        offset = landmark_offsets(landmarks_B52, self._side)
        offset_BNP = torch.cat([offset, torch.ones_like(offset[..., :1])], 2)
        linear = self.keypoint_linear
        tables = torch.cat([linear.weight, linear.bias[:, None]], 1)
        tables = tables.view(len(self.blocks), self._heads, BUCKETS, _OFFSETS + 1)
        bucket_NN = bucket_ids(self._side, image_BCHW.device)
        x = self.embed_patches(image_BCHW, key_B)
        scales = self.scales(image_BCHW, key_B)
        for block, scale_2B, table in zip(self.blocks, scales, tables.unbind(0), strict=True):
            x = run_block(block, x, scale_2B, offset_BNP, table, bucket_NN, recompute=self._recompute)
        return self.flatten_tokens(x)

    def forward(self, image_BCHW: Tensor, landmarks_B52: Tensor | None = None) -> Tensor:
        """Map normalized images (B, 3, H, W) and their landmarks (B, 5, 2), see `trunk`, to embeddings (B, D)."""
        return self.neck(self.trunk(image_BCHW, landmarks_B52))


def _aligned_landmarks(image_BCHW: Tensor) -> Tensor:
    """Return the landmarks of an aligned face for each image: float32 (B, 5, 2)."""
    # From Python numbers and on the device, so that a CUDA graph can record it and the host does not wait.
    points = [
        torch.full((), float(value), device=image_BCHW.device) for value in np.ravel(NORMALIZED_TEMPLATE)
    ]
    return torch.stack(points).view(1, -1, 2).expand(len(image_BCHW), -1, -1)
