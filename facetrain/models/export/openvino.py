"""Export to OpenVINO's format, opened again by OpenVINO on the CPU."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.export.deployed import file_metadata
from facetrain.models.export.formats import ExportOptions, Runtime
from facetrain.models.export.onnx import write_float_graph


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Runtime:
    """Write NAME.xml (the graph) and NAME.bin (the weights, float32), with a free batch size unless `batch` fixes it.

    The file has the input and output of the ONNX file, which OpenVINO converts. The metadata are in `rt_info` under
    `facetrain`.
    """
    import openvino

    onnx = path.with_name("model.onnx")
    write_float_graph(model, onnx, options)
    graph = openvino.convert_model(str(onnx))
    for name, text in file_metadata(model, options).items():
        graph.set_rt_info(text, ["facetrain", name])
    # This also writes the weights, beside it.
    openvino.save_model(graph, str(path), compress_to_fp16=False)
    return _open(path)


def _open(xml: Path) -> Runtime:
    import openvino

    settings = {
        # Some CPUs would compute in bfloat16 without this.
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = openvino.Core().compile_model(str(xml), "CPU", settings)

    def run(*inputs: np.ndarray) -> np.ndarray:
        return np.array(compiled(inputs)[0])

    return Runtime(f"openvino {openvino.__version__.split('-')[0]}", run)
