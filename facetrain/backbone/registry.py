"""Registry of the backbones: name in the config, place of the class, and its arguments.

The places are text, so that the settings have the names without importing torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from facetrain.own_parts import is_place


class Architecture(NamedTuple):
    """Class of a backbone, and the arguments that its name implies."""

    place: str
    """MODULE:CLASS."""
    arguments: dict[str, Any]
    changeable: tuple[str, ...] = ()
    """Keys of the section `model` that take the place of arguments of the same name."""
    is_published: bool = True
    """Whether other programs publish weights of it."""

    def shape_problem(
        self, layers: Sequence[int] | None, widths: Sequence[int] | None, stem_stride: int | None
    ) -> str:
        """Return why a network cannot have these blocks and channels per stage, or this stride; "" if it can.

        None is not given.
        """
        stages = {"layers": layers, "widths": widths}
        given = {**stages, "stem_stride": stem_stride}
        for key, value in given.items():
            names = [name for name, architecture in BACKBONES.items() if key in architecture.changeable]
            if value is not None and key not in self.changeable:
                return (
                    f"{key}: fixed for this backbone; leave the key out, or choose one of {', '.join(names)}"
                )
        for key, numbers in stages.items():
            if numbers is not None and len(numbers) != 4:
                return f"{key} must have four numbers, not {len(numbers)}"
        if stem_stride not in (None, 1, 2):
            return f"stem_stride must be 1 or 2, not {stem_stride!r}"
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
_TIMM = "facetrain.backbone.timm_network:TimmNetwork"
_RESNET = "facetrain.backbone.resnet:TorchvisionResNet"
TIMM_PREFIX = "timm/"
"""Beginning of the names of timm's networks, all of which are backbones."""

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


def _ir(layers: str, **variant: bool) -> Architecture:
    return Architecture(_IRESNET, {"layers": IRESNET_LAYERS[layers], "subsample_shortcut": True, **variant})


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
    # TFace and CVLface, with squeeze-and-excitation
    "irse50": _ir("r50", squeeze=True),
    "irse101": _ir("r100", squeeze=True),
    # InsightFace_Pytorch and face.evoLVe, without a norm after the first convolution of a block
    "evolve_ir50": _ir("r50", norm_between=False),
    "evolve_ir101": _ir("r100", norm_between=False),
    "evolve_irse50": _ir("r50", norm_between=False, squeeze=True),
    "evolve_irse101": _ir("r100", norm_between=False, squeeze=True),
    # CVLface
    "vit_s_patch8": _vit(_VIT, 512, 12, drop_path=0.1, patch=8, mlp_ratio=5, mask_token=False),
    "vit_b_patch8": _vit(_VIT, 512, 24, drop_path=0.1, patch=8, heads=16, mlp_ratio=3, mask_token=False),
    "vit_s_kprpe": _vit(_KEYPOINT_VIT, 512, 12, drop_path=0.1, mlp_ratio=5),
    "vit_b_kprpe": _vit(_KEYPOINT_VIT, 512, 24, drop_path=0.1, heads=16, mlp_ratio=3),
    # torchvision
    **{
        name: Architecture(_RESNET, {"name": name}, is_published=False)
        for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
    },
    "iresnet": Architecture(
        _IRESNET, {"stem_stride": 1}, changeable=("layers", "widths", "stem_stride"), is_published=False
    ),
}


def name_in_facetrain(name: str) -> str | None:
    """Return the IResNet that other projects name iresnet50 or ir_100; None if there is none.

    difflib would find torchvision's resnet50, another network.
    """
    depth = re.fullmatch(r"(?:l?resnet|ir|iresnet)[-_]?(\d+)(?:e-ir)?", name.lower())
    if depth and f"r{depth[1]}" in IRESNET_LAYERS and re.sub("[-_]", "", name.lower()) not in BACKBONES:
        return f"r{depth[1]}"
    return None


def architecture(name: str) -> Architecture:
    """Return the architecture of a name in the config: of the registry, `timm/NAME`, or MODULE:NAME.

    Raises:
        KeyError: there is no such name.
    """
    if name.startswith(TIMM_PREFIX):
        return Architecture(_TIMM, {"name": name.removeprefix(TIMM_PREFIX)}, is_published=False)
    return Architecture(name, {}, is_published=False) if is_place(name) else BACKBONES[name]
