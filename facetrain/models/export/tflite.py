"""Export to TensorFlow Lite's format by litert-torch, opened again by LiteRT on the CPU."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from facetrain.models.export.deployed import Deployed
from facetrain.models.export.example_inputs import example_pixels, inputs_of_file
from facetrain.models.export.formats import ExportOptions
from facetrain.models.export.runtime import Runtime
from facetrain.models.model_file import EmbeddingModel


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Runtime:
    """Write a .tflite file for one image per call, or for `batch` images.

    The file has the input and output of the ONNX file, and no metadata; the normalization is in the model card.
    """
    import litert_torch

    # The format has no free size.
    batch = options.batch or 1
    example = inputs_of_file(model, options, example_pixels(model, batch))
    litert_torch.convert(Deployed(model, options).eval().cpu(), example).export(str(path))
    return _open(path, batch)


def _open(path: Path, batch: int) -> Runtime:
    from ai_edge_litert.interpreter import Interpreter

    # From memory: the interpreter maps a file, whose temporary name disappears.
    interpreter = Interpreter(model_content=path.read_bytes(), num_threads=torch.get_num_threads())
    interpreter.allocate_tensors()
    (image,), (embedding,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(images: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(image["index"], images)
        interpreter.invoke()
        embeddings: np.ndarray = interpreter.get_tensor(embedding["index"])
        return embeddings

    return Runtime(f"ai-edge-litert {version('ai-edge-litert')}", run, batch)
