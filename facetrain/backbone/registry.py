"""Registry of the backbones: name in the config, place of the class, and its arguments.

The places are text, so that the settings have the names without importing torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from facetrain.own_parts import is_place


class ChannelStatistics(NamedTuple):
    """Mean and standard deviation of the channels of RGB images, for pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Architecture(NamedTuple):
    """Class of a backbone, and the arguments that its name implies."""

    place: str
    """MODULE:CLASS."""
    arguments: dict[str, Any]
    changeable: tuple[str, ...] = ()
    """Keys of the section `model` that take the place of arguments of the same name."""
    is_published: bool = True
    """Whether other programs publish weights of it."""

    def shape_problem(self, layers: Sequence[int] | None, widths: Sequence[int] | None) -> str:
        """Return why a network cannot have these blocks and channels per stage, "" if it can; None is not given."""
        given = {"layers": layers, "widths": widths}
        for key, numbers in given.items():
            names = [name for name, architecture in BACKBONES.items() if key in architecture.changeable]
            if numbers is not None and key not in self.changeable:
                return (
                    f"{key} are fixed for this backbone; leave them out, or choose one of {', '.join(names)}"
                )
            if numbers is not None and len(numbers) != 4:
                return f"{key} must have four numbers, not {len(numbers)}"
        if missing := [key for key in self.changeable if key not in self.arguments and given[key] is None]:
            return f"{' and '.join(missing)} must be given for this backbone, with four numbers each"
        # A MobileFaceNet without blocks in a later stage only halves the image there.
        if layers is not None and 0 in layers[: 4 if "widths" in self.changeable else 1]:
            return (
                "layers: each stage of an IResNet and the first of a MobileFaceNet needs at least one block"
            )
        return ""


_IRESNET = "facetrain.backbone.iresnet:IResNet"
_MOBILE = "facetrain.backbone.mobilefacenet:MobileFaceNet"
_VIT = "facetrain.backbone.vit:VisionTransformer"
_KEYPOINT_VIT = "facetrain.backbone.keypoint_vit:KeypointVisionTransformer"
_TIMM_VIT = "facetrain.backbone.timm_vit:TimmVisionTransformer"
_RESNET = "facetrain.backbone.resnet:TorchvisionResNet"

IRESNET_LAYERS = {
    "r18": (2, 2, 2, 2),
    "r34": (3, 4, 6, 3),
    "r50": (3, 4, 14, 3),
    "r100": (3, 13, 30, 3),
    "r200": (6, 26, 60, 6),
    "r2060": (3, 128, 896, 3),
}
"""Blocks per stage of arcface_torch's IResNets."""


def _vit(place: str, width: int, depth: int, **arguments: Any) -> Architecture:
    return Architecture(place, {"width": width, "depth": depth, **arguments})


def _mobile(layers: tuple[int, int, int, int], scale: int) -> Architecture:
    return Architecture(_MOBILE, {"layers": layers, "scale": scale}, changeable=("layers",))


def _dino(width: int, depth: int) -> Architecture:
    """Return DINOv2's network with patches of 14 pixels (Oquab et al., arXiv 2304.07193)."""
    imagenet = ChannelStatistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    arguments = {"patch": 14, "layer_scale": True, "pretrained_on": imagenet}
    return _vit(_TIMM_VIT, width, depth, **arguments)._replace(is_published=False)


def _clip(width: int, depth: int, patch: int, activation: str = "gelu") -> Architecture:
    """Return CLIP's image encoder (Radford et al., arXiv 2103.00020)."""
    pixels = ChannelStatistics((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    arguments = {"patch": patch, "norm_before": True, "eps": 1e-5, "activation": activation}
    return _vit(_TIMM_VIT, width, depth, **arguments, pretrained_on=pixels)._replace(is_published=False)


def _ir(layers: str) -> Architecture:
    return Architecture(_IRESNET, {"layers": IRESNET_LAYERS[layers], "subsample_shortcut": True})


BACKBONES: dict[str, Architecture] = {
    # arcface_torch
    **{name: Architecture(_IRESNET, {"layers": layers}) for name, layers in IRESNET_LAYERS.items()},
    "mbf_small": _mobile((1, 4, 6, 2), scale=1),
    "mbf": _mobile((1, 4, 6, 2), scale=2),
    "mbf_large": _mobile((2, 8, 12, 4), scale=4),
    "vit_t": _vit(_VIT, 256, 12, drop_path=0.05),
    "vit_s": _vit(_VIT, 512, 12, drop_path=0.05),
    "vit_b": _vit(_VIT, 512, 24, drop_path=0.05),
    "vit_l": _vit(_VIT, 768, 24, drop_path=0.05),
    "vit_h": _vit(_VIT, 1024, 48, drop_path=0.05),
    # AdaFace and CVLface. Their IR-101 has the depths of r100: the numbers count other layers.
    "ir18": _ir("r18"),
    "ir34": _ir("r34"),
    "ir50": _ir("r50"),
    "ir101": _ir("r100"),
    # CVLface
    "vit_s_patch8": _vit(_VIT, 512, 12, drop_path=0.1, patch=8, mlp_ratio=5, mask_token=False),
    "vit_b_patch8": _vit(_VIT, 512, 24, drop_path=0.1, patch=8, heads=16, mlp_ratio=3, mask_token=False),
    "vit_s_kprpe": _vit(_KEYPOINT_VIT, 512, 12, drop_path=0.1, mlp_ratio=5),
    "vit_b_kprpe": _vit(_KEYPOINT_VIT, 512, 24, drop_path=0.1, heads=16, mlp_ratio=3),
    # timm, in the sizes of gau-nernst/timm-face
    "timm_vit_t_patch8": _vit(_TIMM_VIT, 192, 12),
    "timm_vit_s_patch8_gap": _vit(_TIMM_VIT, 384, 12, class_token=False),
    # Image encoders under timm's names, to be fine-tuned. is_published is false: their files are no face networks.
    "vit_small_patch14_dinov2": _dino(384, 12),
    "vit_base_patch14_dinov2": _dino(768, 12),
    "vit_large_patch14_dinov2": _dino(1024, 24),
    "vit_base_patch16_clip_224": _clip(768, 12, 16),
    "vit_large_patch14_clip_224": _clip(1024, 24, 14),
    "vit_base_patch16_clip_quickgelu_224": _clip(768, 12, 16, "quick_gelu"),
    "vit_large_patch14_clip_quickgelu_224": _clip(1024, 24, 14, "quick_gelu"),
    # torchvision
    **{
        name: Architecture(_RESNET, {"name": name}, is_published=False)
        for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
    },
    "iresnet": Architecture(_IRESNET, {}, changeable=("layers", "widths"), is_published=False),
}


def name_in_facetrain(name: str) -> str | None:
    """Return the IResNet that other projects name iresnet50 or ir_50; None if there is none.

    difflib would find torchvision's resnet50, another network.
    """
    depth = re.fullmatch(r"(?:l?resnet|ir|iresnet)[-_]?(\d+)(?:e-ir)?", name.lower())
    if depth and f"r{depth[1]}" in IRESNET_LAYERS and name.lower().replace("_", "") not in BACKBONES:
        return f"r{depth[1]}"
    return None


def architecture(name: str) -> Architecture:
    """Return the architecture of a name in the config; of MODULE:NAME, the place of the user's own.

    Raises:
        KeyError: there is no such name.
    """
    return Architecture(name, {}, is_published=False) if is_place(name) else BACKBONES[name]
