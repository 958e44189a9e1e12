"""Model files with small networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.models.model_file import describe_backbone, save_model

SMALL = {"layers": (1, 1, 1, 1), "widths": (8, 8, 8, 8), "embedding_size": 16, "image_size": 32}
"""Options of a small IResNet."""


def write_model(
    path: Path,
    name: str = "iresnet",
    options: dict[str, Any] = SMALL,
    *,
    network: nn.Module | None = None,
    **description: Any,
) -> nn.Module:
    """Write a model file, and return its network, by default one with random weights."""
    network = network or build_backbone(name, **options)
    save_model(path, network.state_dict(), describe_backbone(name, **options) | description)
    return network
