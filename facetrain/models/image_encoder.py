"""Published weights of DINOv2 and CLIP as the start of a face network: other pixels, image size and last layer.

Names and shapes are timm's, and Meta's for DINOv2, which agree (arXiv 2304.07193, 2103.00020; as the start of face
networks: FRoundation, arXiv 2410.23831).
"""

# C channels   N tokens   W width

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.backbone.registry import ChannelStatistics
from facetrain.backbone.timm_vit import TimmVisionTransformer
from facetrain.errors import ModelError
from facetrain.models.published_weights import stated_statistics


def adapt_image_encoder(
    backbone: TimmVisionTransformer, weights: dict[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Return published weights for a network on normalized face images.

    The patches take (pixels − 127.5) / 127.5 in place of the encoder's normalization, and compute the same. The
    positions are interpolated to the patches of the images. The embedding layer keeps its random weights, except that
    the projection of CLIP to the same embedding size is taken.

    Args:
        backbone: the network, with `pretrained_on`.
        weights: tensors of the file.
        path: the file. Mean and standard deviation of a config.json beside it replace the usual ones.

    Raises:
        ModelError: the weights are not those of such an encoder.
    """
    if backbone.pretrained_on is None:
        raise ModelError(
            f"{path}: has the weights of an image encoder (DINOv2, CLIP); set model.backbone to its name"
        )
    adapted = {name: weight for name, weight in weights.items() if name != "mask_token"}
    statistics = stated_statistics(path) or backbone.pretrained_on
    own = backbone.state_dict()
    for name in ("head.weight", "head.bias"):
        if name not in adapted or adapted[name].shape != own[name].shape:
            adapted[name] = own[name]
    try:
        patch_bias = adapted.get("patch_embed.proj.bias")
        patches = _for_our_pixels(adapted["patch_embed.proj.weight"], patch_bias, statistics)
        adapted["patch_embed.proj.weight"], adapted["patch_embed.proj.bias"] = patches
        adapted["pos_embed"] = _resize_positions(adapted["pos_embed"], own["pos_embed"].shape[1])
    except (KeyError, RuntimeError, IndexError) as error:
        raise ModelError(f"{path}: its patches or positions do not fit model.backbone") from error
    return adapted


def _for_our_pixels(
    weight: Tensor, bias: Tensor | None, statistics: ChannelStatistics
) -> tuple[Tensor, Tensor]:
    """Return weight (W, 3, P, P) and bias (W) for the pixels x = 2 u − 1 in place of (u − mean) / std."""
    mean_C, std_C = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in statistics)
    exact = weight.double()
    offset = (exact * (0.5 - mean_C) / std_C).sum(dim=(1, 2, 3))
    shifted = offset if bias is None else bias.double() + offset
    return (exact * 0.5 / std_C).float(), shifted.float()


def _resize_positions(position_1NW: Tensor, tokens: int) -> Tensor:
    """Return the positions of a class token and a square grid of patches, as timm interpolates them."""
    if position_1NW.shape[1] == tokens:
        return position_1NW
    grid, side = (round((count - 1) ** 0.5) for count in (position_1NW.shape[1], tokens))
    patches = position_1NW[:, 1:].float().transpose(1, 2).unflatten(2, (grid, grid))
    resized = F.interpolate(patches, (side, side), mode="bicubic", antialias=True)
    return torch.cat([position_1NW[:, :1], resized.flatten(2).transpose(1, 2)], dim=1)
