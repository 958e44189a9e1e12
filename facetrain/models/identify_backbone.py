"""Identification of a published network by the names and the shapes of its weights."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from facetrain.backbone.base import DEFAULT_IMAGE_SIZE
from facetrain.backbone.registry import BACKBONES, IRESNET_LAYERS
from facetrain.backbone.timm_network import HALF, PREFIX
from facetrain.backbone.zoo import build_on_meta
from facetrain.errors import ModelError
from facetrain.models.model_file import describe_backbone
from facetrain.models.published_weights import TIMM_FACES, stated_statistics
from facetrain.models.weight_files import COUNTER
from facetrain.text import listed

_DEFAULT_EMBEDDING_SIZE = 512
_LAST_WEIGHTS = ("features.weight", "features.layers.3.weight", "feature.3.weight", "head.weight")
"""Names of the weight in a published network's last layer; its length is D."""


def identify_backbone(weights: dict[str, Tensor], origin: str) -> dict[str, Any]:
    """Return the description of the network that has weights of these names and shapes.

    Raises:
        ModelError: no known network at 112 pixels has such weights, or config.json beside a file of timm states other
            pixels.
    """
    # The names in DINOv2, DINOv3 and CLIP.
    if weights.keys() & {"blocks.0.ls1.gamma", "blocks.0.gamma_1", "norm_pre.weight"}:
        raise ModelError(
            f"{origin}: is an image encoder (DINOv2, DINOv3, CLIP), not a face network; train one from it with "
            "model.init_from"
        )
    names = [name for name, architecture in BACKBONES.items() if architecture.is_published]
    embedding_size = stored_embedding_size(weights) or _DEFAULT_EMBEDDING_SIZE
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items() if not name.endswith(COUNTER)}
    for name in names:
        # Building the 1,030 blocks of r2060 takes seconds, even without memory for the weights.
        if name in IRESNET_LAYERS and f"layer3.{IRESNET_LAYERS[name][2] - 1}.bn1.weight" not in weights:
            continue
        if shapes == _published_shapes(name, embedding_size):
            return describe_backbone(name, embedding_size=embedding_size, image_size=DEFAULT_IMAGE_SIZE)
    if "blocks.0.attn.qkv.bias" in weights:
        for name, own in TIMM_FACES:
            if {f"{PREFIX}{key}": shape for key, shape in shapes.items()} == _published_shapes(
                name, embedding_size, tuple(own.items())
            ):
                _require_half(origin)
                return describe_backbone(
                    name, own=own, embedding_size=embedding_size, image_size=DEFAULT_IMAGE_SIZE
                )
    raise ModelError(
        f"{origin}: its {len(weights)} weights are not those of {', '.join(names)} at {DEFAULT_IMAGE_SIZE} pixels; "
        + _advice_on_names(weights, origin)
    )


def _require_half(origin: str) -> None:
    """Refuse a face network of timm whose config.json states other pixels than those of our backbones."""
    stated = stated_statistics(Path(origin))
    if stated not in (None, HALF):
        raise ModelError(
            f"{origin}: config.json beside it states mean {listed(map(str, stated.mean))} and std "
            f"{listed(map(str, stated.std))}; face networks of timm that facetrain reads take "
            "(pixels − 127.5) / 127.5, that is 0.5 for each channel"
        )


def stored_embedding_size(weights: dict[str, Tensor]) -> int | None:
    """Return D of a published network, from its last layer; None if it has no such layer."""
    last = (weights[name] for name in _LAST_WEIGHTS if name in weights and weights[name].dim())
    return next(map(len, last), None)


def _advice_on_names(weights: dict[str, Tensor], origin: str) -> str:
    """Return what to do with weights that are not those of a known network."""
    parts = zip(*(name.split(".")[:-1] for name in weights), strict=False)
    prefix = "".join(f"{same[0]}." for same in takewhile(lambda each: len(set(each)) == 1, parts))
    if prefix:
        renamed = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        with suppress(ModelError):
            name = identify_backbone(renamed, origin)["backbone"]["name"]
            return (
                f"without {listed([prefix])} at the beginning of each name they are those of {name}: save them so, "
                "if its input is (pixels − 127.5) / 127.5 of RGB images"
            )
    return "for another network give a .safetensors file of facetrain, which describes it, or an ONNX file"


@lru_cache(maxsize=64)
def _published_shapes(
    name: str, embedding_size: int, own: tuple[tuple[str, Any], ...] = ()
) -> dict[str, tuple[int, ...]]:
    state = build_on_meta(name, embedding_size=embedding_size, own=dict(own)).state_dict()
    return {key: tuple(tensor.shape) for key, tensor in state.items() if not key.endswith(COUNTER)}
