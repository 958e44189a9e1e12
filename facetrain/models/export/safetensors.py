"""Export of the weights of a backbone with its description, which `open_model` reads."""

from __future__ import annotations

from pathlib import Path

from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.export.formats import ExportOptions, Runtime
from facetrain.models.model_file import public_description, write_model


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Runtime | None:
    """Write a .safetensors file."""
    write_model(path, model.network.state_dict(), public_description(model.metadata))
    return None
