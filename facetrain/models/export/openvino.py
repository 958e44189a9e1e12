"""Export to OpenVINO's format, compared with the network in OpenVINO on the CPU."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from facetrain.models.export.checks import compare
from facetrain.models.export.deployed import file_metadata
from facetrain.models.export.file_pair import new_file_pair
from facetrain.models.export.formats import FORMATS, Exported, ExportOptions
from facetrain.models.export.onnx import save_onnx, trace_onnx
from facetrain.models.export.runtime import Runtime, runtime_model
from facetrain.models.model_file import EmbeddingModel


def export_openvino(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write NAME.xml (the graph) and NAME.bin (the weights, float32), with a free batch size unless `batch` is set.

    Input and output are those of `export_onnx`, whose graph OpenVINO converts. The metadata are in `rt_info` under
    `facetrain`.

    Raises:
        ModelError: the model was opened from an ONNX file or has diverged.
        RunError: the files cannot be written, or their embeddings differ.
    """
    import openvino

    proto = trace_onnx(model, options)
    xml, weights = FORMATS["openvino"].files(path)
    with new_file_pair(xml, weights) as folder:
        save_onnx(proto, folder / "model.onnx", model)
        graph = openvino.convert_model(str(folder / "model.onnx"))
        for name, text in file_metadata(model, options).items():
            graph.set_rt_info(text, ["facetrain", name])
        # This also writes the weights, beside it.
        openvino.save_model(graph, str(folder / xml.name), compress_to_fp16=False)
        runtime = _open(folder / xml.name, options)
        comparison = compare(path, runtime, model, options)
    return Exported(comparison, runtime_model(model, runtime, options))


def _open(xml: Path, options: ExportOptions) -> Runtime:
    import openvino

    settings = {
        # Some CPUs would compute in bfloat16 without this.
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = openvino.Core().compile_model(str(xml), "CPU", settings)

    def run(*inputs: np.ndarray) -> np.ndarray:
        return np.array(compiled(inputs)[0])

    return Runtime(f"openvino {openvino.__version__.split('-')[0]}", run, options.batch)
