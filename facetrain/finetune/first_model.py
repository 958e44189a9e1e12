"""The model that a fine-tuning begins from: its network, and trainable weights."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from facetrain.backbone.base import DEFAULT_IMAGE_SIZE
from facetrain.backbone.zoo import build_backbone
from facetrain.data.dataset import FaceDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import ModelError
from facetrain.finetune.workplace import Workplace
from facetrain.models.embedding_model import open_model
from facetrain.models.identify_backbone import identify_backbone
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.models.preprocessing import require_trainable_input
from facetrain.models.read_model import is_graph, read_model
from facetrain.run.parts.open_data import evenly_spread_images
from facetrain.text import listed

_GRAPH_NETWORKS = ("mbf_small", "mbf", "mbf_large", "r18", "r34", "r50", "r100")
"""Networks that an ONNX or MXNet file may have."""


def backbone_of(model: Path) -> dict[str, Any]:
    """Return the arguments of `build_backbone` for the network of a model file, a run or a checkpoint.

    Raises:
        ModelError: the file cannot be read, or is no network that facetrain can train.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if not is_graph(model):
        weights, description, origin = read_model(model)
        require_trainable_input(description, origin)
        described = description if "backbone" in description else identify_backbone(weights, origin)
        return {"image_size": DEFAULT_IMAGE_SIZE} | described["backbone"]
    opened = open_model(model, torch.device("cpu"))
    for name in _GRAPH_NETWORKS:
        options: dict[str, Any] = describe_backbone(
            name, embedding_size=opened.embedding_size, image_size=opened.image_size
        )["backbone"]
        with suppress(ModelError):
            initialize_backbone(build_backbone(**options), model, None)
            return options
    raise ModelError(
        f"{model}: is not {listed(_GRAPH_NETWORKS)}, whose weights can be taken from such a file; give a run, a "
        ".safetensors file or arcface_torch's .pt"
    )


def trainable_model(model: Path, backbone: dict[str, Any], place: Workplace) -> Path:
    """Return the first model, or the trainable copy of an ONNX or MXNet file, which is written once."""
    if not is_graph(model):
        return model
    if not place.first.exists():
        _write_trainable_copy(model, backbone, open_dataset(place.train), place.first)
    return place.first


def _write_trainable_copy(path: Path, options: dict[str, Any], source: FaceDataset, copy: Path) -> None:
    """Write the network of an ONNX or MXNet file as a model file with batch norm statistics.

    Such a file often has batch norms merged into other layers. Their statistics are measured once, on training images,
    so that the run, its teacher and the averages with it start from the same weights.
    """
    backbone = build_backbone(**options)
    images = partial(evenly_spread_images, source, options["image_size"])
    description = initialize_backbone(backbone, path, images)
    save_model(copy, backbone.state_dict(), describe_backbone(**options) | description)
