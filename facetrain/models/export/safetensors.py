"""Export to a .safetensors model file of facetrain."""

from __future__ import annotations

from pathlib import Path

from facetrain.errors import ModelError
from facetrain.models.export.checks import require_torch_network
from facetrain.models.export.formats import Exported, ExportOptions
from facetrain.models.model_file import EmbeddingModel, save_model


def export_safetensors(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write the weights of a backbone with its description, which `open_model` reads.

    Raises:
        ModelError: the network is not one of facetrain's backbones.
        RunError: the file cannot be written.
    """
    require_torch_network(model)
    if "backbone" not in model.metadata:
        raise ModelError(
            f"{model.description}: is a graph of another program, which .safetensors cannot store; "
            "use --format onnx or torch_export"
        )
    save_model(path, model.network.state_dict(), model.metadata)
    return Exported(difference=None, model=None)
