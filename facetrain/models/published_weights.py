"""Weights that other programs publish, converted to the parameter names and the color order of our backbones.

AdaFace (mk-minchul/AdaFace), CVLface (mk-minchul/CVLface), TFace (Tencent/TFace), InsightFace_Pytorch
(TreB1eN/InsightFace_Pytorch) and face.evoLVe (ZhaoJ9014/face.evoLVe) name the layers of their IR networks by position,
and some of their networks take BGR images.
MagFace (IrvingMeng/MagFace) has an IResNet for BGR images of pixels / 255, with another epsilon in its batch norms.
arcface_torch and timm have the names of our backbones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm2d

from facetrain.backbone.timm_network import ChannelStatistics
from facetrain.errors import ModelError
from facetrain.files import error_reason, parse_json
from facetrain.strict_yaml import parse_yaml
from facetrain.text import listed

_CVLFACE_PREFIXES = ("model.net.", "net.")
"""Prefixes of parameter names in CVLface's model.safetensors and in its model.pt."""
_LIGHTNING_PREFIX = "model."
"""Prefix of the backbone's parameter names in AdaFace's checkpoints."""
_MAGFACE = "MagFace"
_MAGFACE_PREFIX = "features.module."
_FEATURES_PREFIX = "features."
"""Prefixes of the backbone's parameter names in MagFace's checkpoints; the second one is also used by others."""
_MAGFACE_CENTERS = "fc.weight"
"""Name of the class centers (D, C) in MagFace's checkpoints; a linear layer of torch would have (C, D)."""
_MAGFACE_EPSILON = 2e-5
"""Epsilon of all batch norms of MagFace (models/iresnet.py)."""
_COLOR_ORDERS = {"AdaFace": "BGR", _MAGFACE: "BGR"}
"""Programs with names of their own, all of whose published networks were trained on one order of the channels."""
_FIRST_LAYERS = ("conv1.weight", "patch_embed.proj.weight")
"""Weights of the layer that takes the image, (C, 3, kernel, kernel)."""
_IR_STEM = {
    "input_layer.0": "conv1",
    "input_layer.1": "bn1",
    "input_layer.2": "prelu",
    "output_layer.0": "bn2",
    "output_layer.3": "fc",
    "output_layer.4": "features",
}
_IR_BLOCK = {
    **{
        f"res_layer.{number}": name
        for number, name in enumerate(("bn1", "conv1", "bn2", "prelu", "conv2", "bn3"))
    },
    "shortcut_layer.0": "downsample.0",
    "shortcut_layer.1": "downsample.1",
    "res_layer.se_block.fc1": "se.fc1",
    "res_layer.se_block.fc2": "se.fc2",
}
_EVOLVE_BLOCK = {
    **{f"res_layer.{number}": name for number, name in enumerate(("bn1", "conv1", "prelu", "conv2", "bn3"))},
    "shortcut_layer.0": "downsample.0",
    "shortcut_layer.1": "downsample.1",
    "res_layer.5.fc1": "se.fc1",
    "res_layer.5.fc2": "se.fc2",
}
"""Layers of a block without a norm between its convolutions."""
_IR_PARAMETER = re.compile(
    r"(?:body\.(?P<block>\d{1,4})\.)?(?P<layer>[a-z]+_layer\.(?:\d|se_block)(?:\.fc\d)?)\.(?P<parameter>[a-z_]+)"
)

TIMM_FACES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("timm/vit_tiny_patch16_224", {"patch_size": 8}),
    ("timm/vit_small_patch16_224", {"patch_size": 8, "class_token": False, "global_pool": "avg"}),
)
"""Face networks of gau-nernst/timm-face: names in timm, and their arguments."""


@dataclass(frozen=True)
class ConvertedWeights:
    """State dict of one of our backbones, which takes RGB images."""

    weights: dict[str, Tensor]
    program: str
    """Program that wrote the weights, and the color order that they were trained with; "" for unchanged weights."""
    takes_fractions: bool = False
    """Whether the network takes pixels / 255, and not (pixels − 127.5) / 127.5. No weights of the first convolution
    could change one into the other: its zero padding is black for the one and gray for the other."""


def convert_published(weights: Mapping[str, Tensor], path: Path) -> ConvertedWeights:
    """Return weights with the names of our backbones, for RGB images; weights of other layouts unchanged.

    Args:
        weights: The tensors of the file by name; of a Lightning checkpoint, its `state_dict`.
        path: The file. CVLface writes the color order to a file beside it.

    Raises:
        ModelError: the color order is not known, or the network is a variant that facetrain does not have.
    """
    program, inner = _backbone_of(weights)
    if not program:
        return ConvertedWeights(dict(weights), "")
    _require_known_variant(inner, path)
    channels = _color_order(program, path)
    if "input_layer.0.weight" in inner:
        inner = _convert_ir(inner, path)
    if program == _MAGFACE:
        inner = _with_epsilon(inner, _MAGFACE_EPSILON)
    if "features.weight" not in inner:
        # CVLface masks tokens of its ViTs in training only; embeddings do not depend on the mask token.
        inner.pop("mask_token", None)
    # Once here, so that no command has to know the order of the training.
    if channels == "BGR":
        inner = _reverse_channels(inner)
    return ConvertedWeights(inner, f"{program}, trained on {channels}", takes_fractions=program == _MAGFACE)


def _backbone_of(weights: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Return the program whose names the weights have, and the backbone's weights without prefix; "" for others."""
    for prefix in _CVLFACE_PREFIXES:
        # A network of one's own may have a part with the name `net`.
        if any(f"{prefix}{name}" in weights for name in ("input_layer.0.weight", *_FIRST_LAYERS)):
            return "CVLface", below(weights, prefix)
    if f"{_MAGFACE_PREFIX}features.running_var" in weights:
        return _MAGFACE, below(weights, _MAGFACE_PREFIX)
    last = weights.get(f"{_FEATURES_PREFIX}features.running_var")
    if last is not None:
        centers = weights.get(_MAGFACE_CENTERS)
        is_magface = centers is not None and centers.shape[:1] == last.shape
        return _MAGFACE if is_magface else "IResNet", below(weights, _FEATURES_PREFIX)
    if f"{_LIGHTNING_PREFIX}input_layer.0.weight" in weights:
        return "AdaFace", below(weights, _LIGHTNING_PREFIX)
    if "input_layer.0.weight" not in weights:
        return "", {}
    # Names that several programs share, whose color orders differ: AdaFace's and CVLface's without a prefix, and
    # InsightFace_Pytorch's and face.evoLVe's.
    return "IR network", dict(weights)


def _has_no_norm_between(weights: Mapping[str, Tensor]) -> bool:
    """Return whether the second layer of a block after its first norm is a PReLU, and no batch norm."""
    return "body.0.res_layer.1.weight" in weights and "body.0.res_layer.2.running_mean" not in weights


def below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _require_known_variant(weights: Mapping[str, Tensor], path: Path) -> None:
    for part, variant in (
        ("rpe_", "has relative position encodings without landmarks (iRPE)"),
        ("res_layer.7", "has bottleneck blocks"),
    ):
        if any(part in name for name in weights):
            raise ModelError(f"{path}: its network {variant}; facetrain has no such backbone")


def _convert_ir(weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Rename the parameters of an IR network: its body numbers all blocks, our stages number theirs from 0."""
    converted = dict(_renamed_ir(weights, path))
    if "features.running_mean" in converted:
        # Their last batch norm has no weight and bias.
        size = converted["features.running_mean"].numel()
        converted.setdefault("features.weight", torch.ones(size))
        converted.setdefault("features.bias", torch.zeros(size))
    return converted


def _renamed_ir(weights: Mapping[str, Tensor], path: Path) -> Iterator[tuple[str, Tensor]]:
    places = _stages_of_blocks(weights)
    of_block = _EVOLVE_BLOCK if _has_no_norm_between(weights) else _IR_BLOCK
    for name, tensor in weights.items():
        match = _IR_PARAMETER.fullmatch(name)
        block = int(match["block"]) if match and match["block"] else None
        layer = match and (_IR_STEM if block is None else of_block).get(match["layer"])
        if not match or not layer or (block is not None and block not in places):
            raise ModelError(f"{path}: its weight {name} is not one of an IR network")
        place = "" if block is None else places[block]
        yield f"{place}{layer}.{match['parameter']}", tensor


def _stages_of_blocks(weights: Mapping[str, Tensor]) -> dict[int, str]:
    """Return `layerS.K.` for each number of a block: the stages after the first begin with a convolved shortcut."""
    places: dict[int, str] = {}
    stage, first, number = 1, 0, 0
    while f"body.{number}.res_layer.1.weight" in weights:
        if number and f"body.{number}.shortcut_layer.0.weight" in weights:
            stage, first = stage + 1, number
        places[number] = f"layer{stage}.{number - first}."
        number += 1
    return places


def _with_epsilon(weights: Mapping[str, Tensor], epsilon: float) -> dict[str, Tensor]:
    """Return the weights of a network with torch's epsilon in its batch norms that computes the same as with another.

    A batch norm divides by √(variance + epsilon).
    """
    added = epsilon - BatchNorm2d(1).eps
    return {
        name: tensor + added if name.endswith(".running_var") else tensor for name, tensor in weights.items()
    }


def _reverse_channels(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a network for RGB images that computes the same as one for BGR images."""
    for name in _FIRST_LAYERS:
        if name in weights and weights[name].dim() == 4:
            weights[name] = weights[name].flip(1)
    return weights


def _settings_files(path: Path) -> tuple[Path, Path, Path]:
    """Return the files beside weights that may state the input of their network; timm writes the last one."""
    folder = path.parent
    return path.with_suffix(".yaml"), folder / "pretrained_model" / "model.yaml", folder / "config.json"


def _color_order(program: str, path: Path) -> str:
    """Return RGB or BGR from a file beside the weights, such as CVLface writes, or that of the program."""
    files, usual = _settings_files(path), _COLOR_ORDERS.get(program)
    # The files of other names may be those of another model in the same folder.
    for file in files[:1] if usual else files:
        if file.is_file():
            content = _read_settings(file, "color_space" if usual else "")
            channels = {**content, **(content.get("conf") or {})}.get("color_space")
            if usual and channels is None:  # a file of the user's own
                continue
            if channels not in ("RGB", "BGR"):
                raise ModelError(f"{file}: color_space is {listed([str(channels)])}; expected RGB or BGR")
            return str(channels)
    if usual:
        return usual
    # Without the class centers, MagFace's names are those of any module with a part `features`.
    magface = f"; if it is MagFace's, give the file that has {_MAGFACE_CENTERS}, too" * (program == "IResNet")
    raise ModelError(
        f"{path}: does not state whether its network takes RGB or BGR images; download CVLface's model.yaml or "
        f"config.json with it, or write {files[0].name} beside it with the line `color_space: RGB` or `BGR`, as the "
        f"model's page states (AdaFace, InsightFace_Pytorch: BGR; face.evoLVe: RGB){magface}"
    )


def stated_statistics(path: Path) -> ChannelStatistics | None:
    """Return the mean and standard deviation that timm's config.json beside the weights states; None without one."""
    file = _settings_files(path)[-1]
    if not file.is_file():
        return None
    stated = _read_settings(file).get("pretrained_cfg") or {}
    if not isinstance(stated, dict):
        raise ModelError(f"{file}: pretrained_cfg is not a list of settings")
    values = {name: stated.get(name) or [0.5] * 3 for name in ChannelStatistics._fields}
    for name, value in values.items():
        if (
            not isinstance(value, list)
            or len(value) != 3
            or not all(isinstance(x, int | float) for x in value)
        ):
            raise ModelError(f"{file}: pretrained_cfg.{name} is {listed([str(value)])}, not three numbers")
    return ChannelStatistics(*(tuple(map(float, value)) for value in values.values()))


def _read_settings(file: Path, word: str = "") -> dict[str, Any]:
    """Return the settings of a file; none if it does not have a word: its YAML may be of any kind, with tags or a list.

    Raises:
        ModelError: the file cannot be read, or has no settings.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if word not in text:
            return {}
        content = parse_json(text) if file.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error_reason(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("conf") or {}, dict):
        raise ModelError(f"{file}: is not a list of settings")
    return content
