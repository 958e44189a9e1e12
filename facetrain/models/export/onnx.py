"""Export to ONNX, opened again by onnxruntime."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from facetrain.errors import ModelError
from facetrain.models.export.deployed import Deployed
from facetrain.models.export.example_inputs import example_pixels, inputs_of_file
from facetrain.models.export.formats import ExportOptions
from facetrain.models.export.int8 import write_int8
from facetrain.models.export.runtime import Runtime, Written
from facetrain.models.export.save_onnx import save_onnx
from facetrain.models.model_file import THRESHOLDS_KEY, EmbeddingModel
from facetrain.models.onnx_network import LANDMARKS_INPUT

_INPUTS = "image", LANDMARKS_INPUT
"""Names of the inputs; a network without KP-RPE has the first one."""


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Written:
    """Write an ONNX file, with a free batch size unless `batch` is set.

    Weights that are too large for one file are in a second one, NAME.data, beside it.

    The input is `image`: float32 (N, 3, H, W) as the network takes it, or with `from_pixels` uint8
    (N, H, W, 3) RGB. A network with KP-RPE has a second input `landmarks`: float32 (N, 5, 2), x and y as fractions of
    the image's sides. The output is `embedding`: float32 (N, D), of unit length with `unit`. The metadata
    of the file describe the input and have the description of the model file.

    With `int8` the file has no thresholds: those of the model were measured on other embeddings.

    Raises:
        ModelError: torch or onnx cannot write the opset, or the network is too large for `int8`.
    """

    def write_float32(path: Path) -> None:
        save_onnx(trace_onnx(model, options), path, model, options)

    if not options.int8:
        write_float32(path)
        return Written(_open(path, model, options))
    kept = {key: value for key, value in model.metadata.items() if key != THRESHOLDS_KEY}
    cosine = write_int8(replace(model, metadata=kept), path, options, write_float32)
    return Written(_open(path, model, options), cosine)


def _open(path: Path, model: EmbeddingModel, options: ExportOptions) -> Runtime:
    import onnxruntime

    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base
        if options.opset is None:
            raise
        raise ModelError(
            f"{model.description}: onnxruntime {onnxruntime.__version__} does not open a file with opset "
            f"{options.opset}; give a smaller --opset or leave it out"
        ) from error

    def run(*inputs: np.ndarray) -> np.ndarray:
        embedding: np.ndarray
        (embedding,) = session.run(None, dict(zip(_INPUTS, inputs, strict=False)))
        return embedding

    return Runtime(f"onnxruntime {onnxruntime.__version__}", run, options.batch)


def trace_onnx(model: EmbeddingModel, options: ExportOptions) -> Any:
    """Return the graph of a network as an ONNX protobuf, see `write`, with the size of the batch as asked.

    Raises:
        ModelError: torch or onnx cannot write the opset.
    """
    _require_known_opset(options.opset)
    deployed = Deployed(model, options).eval().cpu()
    example = inputs_of_file(model, options, example_pixels(model, options.batch or 2))
    free = None if options.batch else ({0: torch.export.Dim("batch", min=1)},) * len(example)
    with warnings.catch_warnings(), _quiet_onnxscript():
        # The exporter warns of its own deprecated parts, other ones in each version.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            deployed,
            example,
            dynamo=True,
            input_names=_INPUTS[: len(example)],
            dynamic_shapes=free,
            opset_version=options.opset,
            verbose=False,
        )
    assert program is not None
    _name_output(program.model.graph, "embedding")
    proto = program.model_proto
    # Where the conversion to another opset fails, torch keeps its own one without an error.
    (written,) = (entry.version for entry in proto.opset_import if entry.domain == "")
    if options.opset not in (None, written):
        raise ModelError(
            f"{model.description}: torch writes it with opset {written}, not {options.opset}; "
            f"give --opset {written} or leave it out"
        )
    return proto


def _name_output(graph: Any, name: str) -> None:
    """Give the output of a graph a name, and another one to a value that has it already.

    `output_names` of the exporter would write the name twice: it names the value of a lookup in a table `embedding`.
    """
    for value in (value for node in graph for value in node.outputs if value.name == name):
        value.name = f"{name}_lookup"
    (output,) = graph.outputs
    output.name = name


def _require_known_opset(opset: int | None) -> None:
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if opset is not None and opset > newest:
        raise ModelError(
            f"--opset {opset}: onnx {onnx.__version__} knows versions up to {newest}; give one of them or leave it out"
        )


@contextmanager
def _quiet_onnxscript() -> Iterator[None]:
    """Keep onnxscript from logging the traceback of a failed conversion: `trace_onnx` reports it in one line."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
