"""Registry of the backbones by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from facetrain.backbone import mobilefacenet, resnet
from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import LAYERS, IResNet
from facetrain.backbone.keypoint_vit import KeypointVisionTransformer
from facetrain.backbone.mobilefacenet import MobileFaceNet
from facetrain.backbone.timm_vit import TimmVisionTransformer
from facetrain.backbone.vit import VisionTransformer
from facetrain.errors import ModelError

_MOBILE: dict[str, Callable[..., Backbone]] = {
    name: partial(MobileFaceNet, depths=mobilefacenet.LAYERS[name], scale=scale)
    for name, scale in {"mbf_small": 1, "mbf": 2, "mbf_large": 4}.items()
}
_ARCFACE_TORCH: dict[str, Callable[..., Backbone]] = {
    **{name: partial(IResNet, layers) for name, layers in LAYERS.items()},
    **_MOBILE,
    "vit_t": partial(VisionTransformer, 256, 12, drop_path=0.05),
    "vit_s": partial(VisionTransformer, 512, 12, drop_path=0.05),
    "vit_b": partial(VisionTransformer, 512, 24, drop_path=0.05),
    "vit_l": partial(VisionTransformer, 768, 24, drop_path=0.05),
    "vit_h": partial(VisionTransformer, 1024, 48, drop_path=0.05),
}
_WITH_LANDMARKS: dict[str, Callable[..., Backbone]] = {
    # CVLface
    "vit_s_kprpe": partial(KeypointVisionTransformer, 512, 12, drop_path=0.1, mlp_ratio=5),
    "vit_b_kprpe": partial(KeypointVisionTransformer, 512, 24, drop_path=0.1, heads=16, mlp_ratio=3),
}
_OTHER_PROGRAMS: dict[str, Callable[..., Backbone]] = {
    # AdaFace and CVLface. Their IR-101 has the depths of r100: the numbers count other layers.
    **{
        name: partial(IResNet, LAYERS[depths], subsample_shortcut=True)
        for name, depths in {"ir18": "r18", "ir34": "r34", "ir50": "r50", "ir101": "r100"}.items()
    },
    # CVLface
    "vit_s_patch8": partial(
        VisionTransformer, 512, 12, drop_path=0.1, patch=8, mlp_ratio=5, mask_token=False
    ),
    "vit_b_patch8": partial(
        VisionTransformer, 512, 24, drop_path=0.1, patch=8, heads=16, mlp_ratio=3, mask_token=False
    ),
    **_WITH_LANDMARKS,
    # timm, in the sizes of gau-nernst/timm-face
    "timm_vit_t_patch8": partial(TimmVisionTransformer, 192, 12),
    "timm_vit_s_patch8_gap": partial(TimmVisionTransformer, 384, 12, class_token=False),
}
_ZOO: dict[str, Callable[..., Backbone]] = {
    **_ARCFACE_TORCH,
    **_OTHER_PROGRAMS,
    **{name: partial(resnet.TorchvisionResNet, name) for name in resnet.NAMES},
}
PUBLISHED_NAMES = (*_ARCFACE_TORCH, *_OTHER_PROGRAMS)
"""Names of the backbones that other programs publish weights of."""

_OPTIONS = ("embedding_size", "image_size", "dropout", "checkpoint_activations")
"""Options of every backbone."""


def names() -> list[str]:
    """Return every name that `build_backbone` accepts."""
    return [*_ZOO, "iresnet"]


def takes_landmarks(name: str) -> bool:
    """Return whether a backbone takes landmarks with each image, see `Backbone.takes_landmarks`."""
    return name in _WITH_LANDMARKS


def build_backbone(
    name: str,
    *,
    layers: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    **options: Any,
) -> Backbone:
    """Build a backbone with random weights, on the CPU and in float32.

    `layers` and `widths` are the blocks and the channels of the four stages. `iresnet` needs both; a MobileFaceNet can
    take `layers`, in place of the published numbers. The options are embedding_size, image_size, dropout and
    checkpoint_activations.

    Raises:
        ModelError: no backbone has that name, or it does not have an option.
    """
    if unknown := options.keys() - _OPTIONS:
        raise ModelError(f"model.backbone: {name} has no option {min(unknown)}; use {', '.join(_OPTIONS)}")
    if name == "iresnet":
        if layers is None or widths is None:
            raise ModelError("model.backbone: iresnet needs model.layers and model.widths, four numbers each")
        return IResNet(layers, widths, **options)
    if name not in _ZOO:
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names())}"
        raise ModelError(f"model.backbone: {name!r} is not a backbone; {hint}")
    if widths is not None:
        raise ModelError(f"model.widths: the channels of {name} are fixed; leave them out")
    if layers is not None:
        if name not in _MOBILE:
            raise ModelError(f"model.layers: the number of blocks of {name} is fixed; leave it out")
        options["depths"] = layers
    return _ZOO[name](**options)


def build_on_meta(name: str, **options: Any) -> Backbone:
    """Build a backbone without memory for its weights, for their names and shapes; see `build_backbone`.

    Raises:
        ModelError: as `build_backbone`.
    """
    with torch.device("meta"), _WithoutInitialization():
        return build_backbone(name, **options)


class _WithoutInitialization(TorchFunctionMode):
    """Skip the functions of `torch.nn.init`.

    On the meta device there are no values to set, but `Tensor.normal_` imports torch.compile's tracer there, which
    takes more than a second.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor that should be initialized; call all other functions."""
        kwargs = kwargs or {}
        # `kaiming_normal_` does not announce itself to modes, but the method that it calls does.
        if getattr(function, "__module__", None) == "torch.nn.init" or function == torch.Tensor.normal_:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)
