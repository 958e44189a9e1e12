"""Construction of a run's backbone from its config: architecture, initial weights, frozen parts and adapters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from facetrain.backbone.base import Backbone
from facetrain.backbone.low_rank import add_adapters
from facetrain.backbone.settings import ModelSettings
from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import plain_config
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import describe_backbone
from facetrain.optim.frozen_parts import freeze
from facetrain.remote.download import local_path
from facetrain.run.parts.open_data import evenly_spread_images


def describe_model(config: Config) -> dict[str, Any]:
    """Return the metadata of a model file: the network and its input, and the config that it was trained with."""
    described = describe_backbone(
        config.model.backbone,
        **config.model.shape,
        embedding_size=config.model.embedding_size,
        image_size=config.data.image_size,
    )
    return described | {"config": plain_config(config)}


def build_initial_backbone(config: Config, source: FaceDataset) -> tuple[Backbone, dict[str, Any]]:
    """Build the backbone on the CPU with its initial weights, frozen parts and adapters; the same on every rank.

    Also return the description of `model.init_from`, empty without it.

    Raises:
        ModelError: `model.init_from` cannot be read, or does not fit the backbone.
        CheckpointError: `model.init_from` is a damaged checkpoint.
    """
    torch.manual_seed(config.seed)  # the same weights on every rank
    options = describe_model(config)["backbone"]
    backbone = build_backbone(
        **options,
        dropout=config.model.dropout,
        checkpoint_activations=config.model.checkpoint_activations,
    )
    description: dict[str, Any] = {}
    if config.model.init_from:
        description = initialize_backbone(
            backbone,
            local_path(config.model.init_from),
            partial(evenly_spread_images, source, config.data.image_size),
            first_blocks_of=options if config.model.init_blocks == "first" else None,
        )
    restrict_training(backbone, config.model)
    return backbone, description


def restrict_training(backbone: Backbone, model: ModelSettings) -> None:
    """Freeze the parts of a backbone that are not trained, and add the adapters.

    Raises:
        ConfigError: a prefix names no part, or no part is left to train.
    """
    freeze(backbone, model.freeze, train_batch_norm=model.train_batch_norm)
    if (lora := model.lora) is not None:
        # After the freeze: the adapters of a frozen layer are trained.
        add_adapters(backbone, lora, new_layers=backbone.new_layers)
