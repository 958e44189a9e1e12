"""Export to ExecuTorch's format for its XNNPACK backend, compared with the network in ExecuTorch on the CPU."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from facetrain.errors import RunError
from facetrain.files import new_file
from facetrain.models.export.checks import compare, require_exportable, require_no_landmarks
from facetrain.models.export.deployed import Deployed, file_metadata
from facetrain.models.export.example_inputs import example_pixels, inputs_of_file
from facetrain.models.export.formats import Exported, ExportOptions
from facetrain.models.export.runtime import Runtime, runtime_model
from facetrain.models.model_file import EmbeddingModel


def export_executorch(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write a .pte file for one image per call, or for `batch` images.

    Input and output of its method `forward` are those of `export_onnx`. Each part of the metadata is a method
    without arguments, such as `preprocessing`, that returns JSON.

    Raises:
        ModelError: the model was opened from an ONNX file, has diverged, or takes landmarks.
        RunError: the file cannot be written, or its embeddings differ.
    """
    require_exportable(model)
    require_no_landmarks(model, "executorch")
    batch = options.batch or 1
    program = _lower(model, options, batch)
    with new_file(path, RunError, suffix=".pte") as scratch:
        scratch.write_bytes(program)
        runtime = _open(program, batch)
        comparison = compare(path, runtime, model, options)
    return Exported(comparison, runtime_model(model, runtime, options))


def _lower(model: EmbeddingModel, options: ExportOptions, batch: int) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    example = inputs_of_file(model, options, example_pixels(model, batch))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns of what executorch calls
        exported = torch.export.export(Deployed(model, options).eval().cpu(), example)
        lowered = to_edge_transform_and_lower(
            exported,
            partitioner=[XnnpackPartitioner()],
            constant_methods=file_metadata(model, options),
        )
        program: bytes = lowered.to_executorch().buffer
    return program


def _open(program: bytes, batch: int) -> Runtime:
    from executorch.runtime import Runtime as ExecuTorch

    forward = ExecuTorch.get().load_program(program).load_method("forward")

    def run(images: np.ndarray) -> np.ndarray:
        (embedding,) = forward.execute([torch.from_numpy(images)])
        # The copy: the next call overwrites the memory of the output.
        found: np.ndarray = embedding.numpy().copy()
        return found

    return Runtime(f"executorch {version('executorch')}", run, batch)
