"""A torch.export program: a network without its Python code, checked against the network that it was made of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.errors import ModelError, RunError
from facetrain.models.model_file import EmbeddingModel
from facetrain.models.onnx_network import OnnxNetwork

_TOLERANCE = 1e-3


class _Program(nn.Module):
    """A program that can be put into evaluation mode: it knows no other, and itself refuses to be asked."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        run: Callable[[Tensor], Tensor] = program.module().forward  # a method, so that it is no part of this
        self._run = run

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self._run(image_BCHW)


def export_program(model: EmbeddingModel, path: Path) -> tuple[float, EmbeddingModel]:
    """Write a .pt2 that takes float32 images (N, 3, H, W) as the network does, N free, and gives embeddings (N, D).

    Return the largest difference of embeddings to those of the network, and the model as the file holds it.

    Raises:
        ModelError: the model is ONNX.
        RunError: the file cannot be written, or gives embeddings that differ by more than 0.001 of their size.
    """
    if isinstance(model.network, OnnxNetwork):
        raise ModelError(f"{model.description}: is run by onnxruntime, and no torch network to export")
    example = torch.zeros(2, 3, model.image_size, model.image_size)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model.network.eval().cpu(), (example,), dynamic_shapes=({0: batch},))
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp.pt2")
    try:
        torch.export.save(program, scratch)
        # Only what was written a moment ago is loaded so: a .pt2 from elsewhere may run code.
        with warnings.catch_warnings():
            # torch 2.11 warns of a buffer of its own, into which nobody writes.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            written = replace(model, network=_Program(torch.export.load(scratch)))
        difference = _difference(written, model)
        if not difference < _TOLERANCE:
            raise RunError(f"{path}: gives embeddings that differ by {difference:.2g} of their size")
        os.replace(scratch, path)
    except OSError as error:
        raise RunError(f"{error.filename or path}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return difference, written


def _difference(written: EmbeddingModel, model: EmbeddingModel) -> float:
    # Of another number of images than the program was made with.
    shape = (5, model.image_size, model.image_size, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = (found.network(found.prepare(pixels)) for found in (written, model))
    return float((theirs - ours).abs().max() / ours.abs().max())
