"""Export to PyTorch's formats: a torch.export program (.pt2), which needs no Python code, and .safetensors weights."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.errors import ModelError, RunError
from facetrain.files import error_reason, new_file
from facetrain.models.export.checks import compare, require_exportable
from facetrain.models.export.example_inputs import example_landmarks
from facetrain.models.export.formats import Exported, ExportOptions
from facetrain.models.export.runtime import Runtime
from facetrain.models.model_file import EmbeddingModel, save_model


class _Program(nn.Module):
    """An exported program as a module with `eval()`.

    The module that torch makes of a program raises an error in `eval()`, because it has no other mode.
    """

    def __init__(self, program: Any, *, takes_landmarks: bool) -> None:
        super().__init__()
        # The bound method and not the module: a submodule would get the call of `eval()` too.
        run: Callable[..., Tensor] = program.module().forward
        self._run, self.takes_landmarks = run, takes_landmarks

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._run(*inputs)


def export_program(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write a .pt2 file with a free batch size.

    It maps float32 images (N, 3, H, W), as the network takes them, to embeddings (N, D). That of a network with KP-RPE
    takes landmarks (N, 5, 2) after the images.

    Raises:
        ModelError: the model was opened from an ONNX file or has diverged.
        RunError: the file cannot be written, or its embeddings differ.
    """
    require_exportable(model)
    example = (torch.zeros(2, 3, model.image_size, model.image_size), *example_landmarks(model, 2))
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        model.network.eval().cpu(), example, dynamic_shapes=({0: batch},) * len(example)
    )
    with new_file(path, RunError, suffix=".pt2") as scratch:
        try:
            torch.export.save(program, scratch)
        except RuntimeError as error:  # torch's own file writer, for a missing folder or a full disk
            raise RunError(f"{path}: {error_reason(error)}") from error
        with warnings.catch_warnings():
            # torch 2.11 warns about a read-only buffer that it creates itself and never writes to.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            # Safe only for a file that was written just now: a .pt2 from elsewhere can run code when it is loaded.
            written = replace(
                model, network=_Program(torch.export.load(scratch), takes_landmarks=model.takes_landmarks)
            )

        @torch.no_grad()
        def run(*inputs: np.ndarray) -> np.ndarray:
            return written.network(*map(torch.from_numpy, inputs)).numpy()

        runtime = Runtime(f"torch.export {torch.version.__version__}", run)
        comparison = compare(path, runtime, model, options)
    return Exported(comparison, written)


def export_safetensors(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write the weights of a backbone with its description, which `open_model` reads.

    Raises:
        ModelError: the network is not one of facetrain's backbones.
        RunError: the file cannot be written.
    """
    require_exportable(model)
    if "backbone" not in model.metadata:
        raise ModelError(
            f"{model.description}: is a graph of another program, which .safetensors cannot store; "
            "use --format onnx or torch_export"
        )
    save_model(path, model.network.state_dict(), model.metadata)
    return Exported(comparison=None, model=path)
