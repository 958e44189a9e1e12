"""Export to ExecuTorch's format for its XNNPACK backend, opened again by ExecuTorch on the CPU."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from facetrain.models.export.deployed import Deployed, file_metadata
from facetrain.models.export.example_inputs import example_pixels, inputs_of_file
from facetrain.models.export.formats import ExportOptions
from facetrain.models.export.runtime import Runtime
from facetrain.models.model_file import EmbeddingModel


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Runtime:
    """Write a .pte file for one image per call, or for `batch` images.

    Its method `forward` has the input and output of the ONNX file. Each part of the metadata is a method
    without arguments, such as `preprocessing`, that returns JSON.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    # The format has no free size.
    batch = options.batch or 1
    example = inputs_of_file(model, options, example_pixels(model, batch))
    with torch.no_grad():
        lowered = to_edge_transform_and_lower(
            torch.export.export(Deployed(model, options).eval().cpu(), example),
            partitioner=[XnnpackPartitioner()],
            constant_methods=file_metadata(model, options),
        )
    program: bytes = lowered.to_executorch().buffer
    path.write_bytes(program)
    return _open(program, batch)


def _open(program: bytes, batch: int) -> Runtime:
    from executorch.runtime import Runtime as ExecuTorch

    forward = ExecuTorch.get().load_program(program).load_method("forward")

    def run(images: np.ndarray) -> np.ndarray:
        (embedding,) = forward.execute([torch.from_numpy(images)])
        # The copy: the next call overwrites the memory of the output.
        copied: np.ndarray = embedding.numpy().copy()
        return copied

    return Runtime(f"executorch {version('executorch')}", run, batch)
