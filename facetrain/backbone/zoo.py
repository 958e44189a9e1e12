"""Backbones by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from facetrain.backbone import resnet
from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import LAYERS, IResNet
from facetrain.backbone.mobilefacenet import MobileFaceNet
from facetrain.backbone.vit import VisionTransformer
from facetrain.errors import ModelError

_ZOO: dict[str, Callable[..., Backbone]] = {
    **{name: partial(IResNet, layers) for name, layers in LAYERS.items()},
    "mbf_small": partial(MobileFaceNet, (1, 4, 6, 2), 1),
    "mbf": partial(MobileFaceNet, (1, 4, 6, 2), 2),
    "mbf_large": partial(MobileFaceNet, (2, 8, 12, 4), 4),
    "vit_t": partial(VisionTransformer, 256, 12, drop_path=0.05),
    "vit_s": partial(VisionTransformer, 512, 12, drop_path=0.05),
    "vit_b": partial(VisionTransformer, 512, 24, drop_path=0.05),
    "vit_l": partial(VisionTransformer, 768, 24, drop_path=0.05),
    "vit_h": partial(VisionTransformer, 1024, 48, drop_path=0.05),
    **{name: partial(resnet.TorchvisionResNet, name) for name in resnet.NAMES},
}


def names() -> list[str]:
    """Return every name that `build_backbone` knows."""
    return [*_ZOO, "iresnet"]


def build_backbone(
    name: str,
    *,
    layers: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    **options: Any,
) -> Backbone:
    """Build a backbone with fresh weights, on the CPU and in float32.

    `layers` and `widths` are for `iresnet`, four numbers each. Options: embedding_size, image_size,
    dropout, checkpoint_activations.

    Raises:
        ModelError: there is no backbone of that name, or it has no such option.
    """
    if name == "iresnet":
        if layers is None or widths is None:
            raise ModelError("backbone iresnet needs layers and widths, four numbers each")
        return IResNet(layers, widths, **options)
    if name not in _ZOO:
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names())}"
        raise ModelError(f"model.backbone: {name!r} does not exist; {hint}")
    return _ZOO[name](**options)
