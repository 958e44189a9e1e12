"""A torch.export program: a network without its Python code."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from facetrain.checkpoint.model_file import EmbeddingModel
from facetrain.checkpoint.onnx_file import OnnxNetwork
from facetrain.errors import ModelError, RunError


def export_program(model: EmbeddingModel, path: Path) -> None:
    """Write a .pt2 that takes float32 images (N, 3, H, W) as the network does, N free, and gives embeddings (N, D).

    Raises:
        ModelError: the model is ONNX.
        RunError: the file cannot be written.
    """
    if isinstance(model.network, OnnxNetwork):
        raise ModelError(f"{model.description}: is run by onnxruntime, and no torch network to export")
    example = torch.zeros(2, 3, model.image_size, model.image_size)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model.network.eval().cpu(), (example,), dynamic_shapes=({0: batch},))
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp.pt2")
    try:
        torch.export.save(program, scratch)
        os.replace(scratch, path)
    except OSError as error:
        raise RunError(f"{error.filename or path}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
