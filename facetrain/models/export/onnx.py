"""Export to ONNX, compared with the network in onnxruntime."""

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

from facetrain.errors import ModelError, RunError
from facetrain.files import new_file
from facetrain.models.export.checks import compare, fits_onnx_file, require_exportable
from facetrain.models.export.deployed import Deployed, file_metadata
from facetrain.models.export.example_inputs import example_pixels, inputs_of_file
from facetrain.models.export.file_pair import new_file_pair
from facetrain.models.export.formats import Comparison, Exported, ExportOptions
from facetrain.models.export.int8 import export_int8
from facetrain.models.export.runtime import Runtime
from facetrain.models.model_file import THRESHOLDS_KEY, EmbeddingModel
from facetrain.models.onnx_network import LANDMARKS_INPUT

_INPUTS = "image", LANDMARKS_INPUT
"""Names of the inputs; a network without KP-RPE has the first one."""


def export_onnx(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write an ONNX file, with a free batch size unless `batch` is set.

    Weights that are too large for one file are in a second one, NAME.data, beside it.

    The input is `image`: float32 (N, 3, H, W) as the network takes it, or with `from_pixels` uint8
    (N, H, W, 3) RGB. A network with KP-RPE has a second input `landmarks`: float32 (N, 5, 2), x and y as fractions of
    the image's sides. The output is `embedding`: float32 (N, D), of unit length with `unit`. The metadata
    of the file describe the input and have the description of the model file.

    With `int8` the result has the cosines of the embeddings with those of the network, see `int8.export_int8`. The
    file then has no thresholds: those of the model were measured on other embeddings.

    Raises:
        ModelError: the model was opened from an ONNX file or has diverged, torch or onnx cannot write the opset, or
            the network is too large for `int8`.
        ImageError: a calibration image cannot be decoded.
        RunError: the file cannot be written, or its embeddings differ too much.
    """
    if not options.int8:
        return _write_float32(model, path, options)
    require_exportable(model)
    kept = {key: value for key, value in model.metadata.items() if key != THRESHOLDS_KEY}
    model = replace(model, metadata=kept)
    return export_int8(model, path, options, lambda float32: _save_compared(model, float32, options, path))


def _write_float32(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write the file, or both files, and compare them with the network."""
    if fits_onnx_file(model):
        with new_file(path, RunError) as scratch:
            return Exported(_save_compared(model, scratch, options, path), path)
    weights = _data_file(path)
    with new_file_pair(path, weights) as folder:
        comparison = _save_compared(model, folder / path.name, options, path)
    return Exported(comparison, path, weights=weights)


def _save_compared(model: EmbeddingModel, scratch: Path, options: ExportOptions, path: Path) -> Comparison:
    """Write a temporary file, and return the comparison with the network; messages name `path`."""
    import onnx

    proto = trace_onnx(model, options)
    onnx.helper.set_model_props(proto, file_metadata(model, options))
    save_onnx(proto, scratch, model)
    return compare(path, _open(scratch, model, options), model, options)


def save_onnx(proto: Any, path: Path, model: EmbeddingModel) -> None:
    """Write the graph of a network, with the weights in NAME.data beside it if they do not fit into one file."""
    import onnx

    if fits_onnx_file(model):
        onnx.save(proto, str(path))
        return
    data = _data_file(path)
    onnx.save(proto, str(path), save_as_external_data=True, location=data.name)
    data.chmod(path.stat().st_mode)  # by the umask; onnx writes the second file for its owner only


def _data_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


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
    """Return the graph of a network as an ONNX protobuf, see `export_onnx`, with the size of the batch as asked.

    Raises:
        ModelError: the model was opened from an ONNX file or has diverged, or torch or onnx cannot write the opset.
    """
    require_exportable(model)
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
