"""Networks that are ready to embed images, opened from files of all formats."""

# B images   H, W height and width   D embedding size

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facetrain import own_parts
from facetrain.backbone.base import DEFAULT_IMAGE_SIZE
from facetrain.backbone.registry import TIMM_PREFIX
from facetrain.backbone.timm_network import PREFIX
from facetrain.backbone.zoo import build_backbone, build_on_meta
from facetrain.errors import ConfigError, ModelError
from facetrain.files import error_reason
from facetrain.models.identify_backbone import identify_backbone
from facetrain.models.model_file import ORIGIN_KEY, STEP_KEY
from facetrain.models.mxnet_network import open_mxnet
from facetrain.models.onnx_network import open_onnx
from facetrain.models.preprocessing import (
    FRACTIONS,
    NAMES_OF_SCALES,
    PREPROCESSING,
    PREPROCESSING_KEY,
    RAW_PIXELS,
    float_pixels,
    prepare_of,
    uint8_pixels,
)
from facetrain.models.read_model import is_graph, read_model, warn_of_other_code
from facetrain.models.weight_files import load_weights_into, require_same_shapes
from facetrain.text import listed

_WEIGHTS_PER_BLOCK = 4
"""A block of every network has more; to build one takes time, also without memory."""


@dataclass(frozen=True)
class EmbeddingModel:
    """A network that is ready to embed images."""

    network: nn.Module
    image_size: int
    embedding_size: int
    prepare: Callable[[Tensor], Tensor]
    """Maps uint8 images (B, H, W, 3) RGB to the input of the network."""
    description: str
    """One line for people: the backbone and its size, or the format of the file."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Description in the model file: `backbone` (for facetrain's backbones), `preprocessing`, `config`."""

    @property
    def takes_landmarks(self) -> bool:
        """Whether the network takes the landmarks (B, 5, 2) of the faces after the images."""
        return bool(getattr(self.network, "takes_landmarks", False))

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The input of the network: channels, layout, and (x − mean) / scale for pixels x from 0 to 255."""
        return dict(self.metadata.get(PREPROCESSING_KEY, PREPROCESSING))


def open_model(path: Path, device: torch.device, *, allow_code: bool = False) -> EmbeddingModel:
    """Open a network in evaluation mode on a device (ONNX: on the CPU).

    `path` is a run folder, a checkpoint, the file `latest` that names one, a .safetensors file, a .pt, .pth or .ckpt
    file of arcface_torch, AdaFace, CVLface or timm, a .onnx file, or either file of an MXNet network. With
    `allow_code`, the network may be code that the file names (MODULE:NAME).

    Raises:
        ConfigError: the file names code that may not run.
        ModelError: the file is missing or damaged, or its network is unknown.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if is_graph(path):
        return _open_onnx(path) if path.suffix == ".onnx" else _open_mxnet(path, device)
    weights, description, origin = read_model(path)
    if not description.keys() - {ORIGIN_KEY, PREPROCESSING_KEY}:
        description = identify_backbone(weights, origin) | description
        if description["backbone"]["name"].startswith(TIMM_PREFIX):
            weights = {f"{PREFIX}{name}": weight for name, weight in weights.items()}
    if allow_code:
        own_parts.allow([str((description.get("backbone") or {}).get("name"))])
    return _build_model(weights, description, origin, device)


def _build_model(
    weights: dict[str, Tensor], description: dict[str, Any], origin: str, device: torch.device
) -> EmbeddingModel:
    try:
        options = dict(description["backbone"])
        name = options.pop("name")
        if own_parts.is_place(name):
            own_parts.require_allowed(name, origin)
        _check_options(options, len(weights))
        stated = description.get(PREPROCESSING_KEY, PREPROCESSING)
        if stated not in (PREPROCESSING, FRACTIONS):
            raise ValueError(
                f"its preprocessing is {listed([str(stated)])}, not {PREPROCESSING} or {FRACTIONS}"
            )
        # On the meta device first, without memory: a crafted file may describe a network of any size.
        described = build_on_meta(name, **options)
    except ConfigError:  # code that may not run, or that the user's own code does not take
        raise
    except Exception as error:  # torch's layers raise many types for impossible sizes, without a common base
        raise ModelError(
            f"{origin}: has no valid description of its network ({error_reason(error)})"
        ) from error
    # Names and shapes are compared before the network gets memory.
    require_same_shapes(described, weights, origin)
    warn_of_other_code(description, origin)
    with torch.random.fork_rng([]):  # the initial weights are drawn, and replaced
        backbone = build_backbone(name, **options)
    load_weights_into(backbone, weights, origin)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    return EmbeddingModel(
        backbone.eval().to(device),
        options.get("image_size", DEFAULT_IMAGE_SIZE),
        backbone.embedding_size,
        prepare_of(stated),
        f"{name}, {parameters:,} parameters{_origin_of(description)}",
        description,
    )


def _origin_of(metadata: dict[str, Any]) -> str:
    """Return the step of the weights and the program that wrote them, for the description, as far as they are known."""
    step, program = metadata.get(STEP_KEY), metadata.get(ORIGIN_KEY)
    return (f", step {step:,}" if isinstance(step, int) else "") + (f" ({program})" if program else "")


def _check_options(options: dict[str, Any], num_weights: int) -> None:
    """Refuse a network that would take long to build, also without memory.

    Raises:
        ValueError: the description of the network has more blocks than the weights are for.
        TypeError: a number of blocks is not a whole number.
    """
    # abs: negative numbers would hide large ones, as NaN would without `index`
    blocks = sum(abs(operator.index(number)) for number in options.get("layers") or ())
    if _WEIGHTS_PER_BLOCK * blocks > num_weights:
        raise ValueError(f"{num_weights} weights for {blocks:,} blocks")


def _open_onnx(path: Path) -> EmbeddingModel:
    network = open_onnx(path)
    given: dict[str, Any] = PREPROCESSING | dict(zip(("mean", "scale"), network.mean_and_scale, strict=True))
    metadata = {PREPROCESSING_KEY: given} | network.metadata
    return EmbeddingModel(
        network.eval(),
        network.image_size,
        network.embedding_size,
        uint8_pixels if network.from_pixels else prepare_of(given),
        f"ONNX, {path.name}, takes {NAMES_OF_SCALES[given['scale']]}{_origin_of(metadata)}",
        metadata,
    )


def _open_mxnet(path: Path, device: torch.device) -> EmbeddingModel:
    network, size = open_mxnet(path).to(device), DEFAULT_IMAGE_SIZE
    images = torch.zeros(1, 3, size, size, dtype=torch.float32, device=device)
    try:
        # The graph does not store the shape of its output.
        with torch.no_grad():
            embedding_size = network(images).shape[-1]
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(
            f"{path}: the graph does not run on images of {size} pixels: {error_reason(error)}"
        ) from error
    metadata = {PREPROCESSING_KEY: RAW_PIXELS}
    return EmbeddingModel(network, size, embedding_size, float_pixels, f"MXNet, {path.name}", metadata)
