"""Checks of an ONNX graph before it is loaded: declared sizes against the bytes of the file, and sizes of all values.

onnxruntime allocates what a graph declares, and computes the values that depend on constants while it loads the graph:
without these checks, a file of 100 bytes could fill the memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from facetrain.errors import ModelError, missing_package
from facetrain.text import listed

_MAX_VALUE_BYTES = 1 << 31
"""Largest value between two layers, as in an IResNet for a fixed batch of 600 images of 112 pixels."""
_SMALL_BYTES = 1 << 12
"""Constants up to this size keep their numbers for the inference of shapes: they may be shapes."""
_MOST_DIMENSIONS = 32
"""More than any runtime supports. The product of very many sizes would take quadratic time."""
_TWO_IN_A_BYTE = ("INT4", "UINT4", "FLOAT4E2M1")


def read_model_proto(path: Path) -> Any:
    """Return the `onnx.ModelProto` of a file, without weights in another file.

    Raises:
        ModelError: it is not an ONNX file, or the package onnx is not installed.
        OSError: the file cannot be read.
    """
    try:
        import onnx
    except ImportError as error:
        raise ModelError(f"{path}: {missing_package(error, 'onnx')}") from error
    fault = f"{path}: is not an ONNX file, or is damaged or incomplete; copy it again"
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf's own, whose text names its messages
        raise ModelError(fault) from error
    if not model.graph.node:  # an empty file is a model without layers
        raise ModelError(fault)
    return model


def external_files(path: Path) -> list[Path]:
    """Return the files beside an ONNX file that have weights of it, in the order of their names.

    Errors as `read_model_proto`.
    """
    entries = (entry for tensor in _constants(read_model_proto(path)) for entry in tensor.external_data)
    return sorted({path.parent / entry.value for entry in entries if entry.key == "location"})


def require_stored_weights(path: Path, model: Any) -> None:
    """Check that every weight has the bytes that its shape needs, in the model or in the file with its data.

    Raises:
        ModelError: a weight is larger than its data, or the file with its data is missing.
    """
    for tensor in _constants(model):
        needed = _numbers(path, tensor.name, tensor.dims) * _bytes_per_number(tensor.data_type)
        # Without raw data, small integers are packed into less than their size in memory.
        stored = len(tensor.raw_data) or 8 * tensor.ByteSize()
        external = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in external:
            data = path.parent / external["location"]
            if not data.exists():
                name = listed([external["location"]])
                raise ModelError(
                    f"{path}: its weights are in {name}, which is missing; copy it to {path.parent}"
                )
            offset = external.get("offset", "0")
            is_known = data.is_file() and re.fullmatch("[0-9]{1,18}", offset)
            stored = max(data.stat().st_size - int(offset), 0) if is_known else 0
        if min(tensor.dims, default=1) < 0 or needed > stored:
            raise ModelError(
                f"{path}: the weight {tensor.name} has the shape {_text(tensor.dims)} and needs {needed:,} bytes, but "
                f"its data has at most {stored:,}; the file is damaged or incomplete: copy it again"
            )


def require_small_values(path: Path, model: Any) -> None:
    """Check that no value of a model in its `plain_form` is too large to compute. It loses its large weights.

    Raises:
        ModelError: a value is too large.
    """
    import onnx

    for tensor in _constants(model):
        if len(tensor.raw_data) > _SMALL_BYTES:
            tensor.ClearField("raw_data")
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except (onnx.shape_inference.InferenceError, ValueError):
        return  # of 2 GiB and more, say; onnxruntime infers them itself
    # Some exporters list the weights among the values; these have their bytes.
    weights = {weight.name for weight in graph.initializer}
    values = (value for each in _graphs(graph) for value in (*each.input, *each.value_info, *each.output))
    for value in values:
        dimensions = value.type.tensor_type.shape.dim
        shape = [dimension.dim_value for dimension in dimensions if dimension.HasField("dim_value")]
        size = _numbers(path, value.name, shape) * _bytes_per_number(value.type.tensor_type.elem_type)
        if size > _MAX_VALUE_BYTES and value.name not in weights:
            raise ModelError(
                f"{path}: the value {value.name} has the shape {_text(shape)}, {size:,} bytes; "
                f"the limit is {_MAX_VALUE_BYTES:,}"
            )


def graph_inputs(graph: Any) -> list[Any]:
    """Return the inputs of a graph; old exporters list the weights among them too."""
    weights = {weight.name for weight in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def _constants(model: Any) -> list[Any]:
    graphs = [each for outer in (model.graph, *model.functions) for each in _graphs(outer)]
    attributes = (attribute for graph in graphs for node in graph.node for attribute in node.attribute)
    # Functions have no initializers.
    weights = (weight for graph in graphs for weight in getattr(graph, "initializer", ()))
    return [*weights, *(attribute.t for attribute in attributes if attribute.HasField("t"))]


def _graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph, or a function, and the graphs inside it: branches and bodies of loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _graphs(inner)


def _bytes_per_number(kind: int) -> int:
    from onnx import TensorProto, helper

    try:
        if TensorProto.DataType.Name(kind) in _TWO_IN_A_BYTE:
            return 0
        return int(helper.tensor_dtype_to_np_dtype(kind).itemsize)
    except (KeyError, TypeError, ValueError):
        return 1


def _numbers(path: Path, name: str, shape: Sequence[int]) -> int:
    if len(shape) > _MOST_DIMENSIONS:
        raise ModelError(
            f"{path}: the value {name} has {len(shape):,} dimensions; the limit is {_MOST_DIMENSIONS}"
        )
    return math.prod(shape)


def _text(shape: Any) -> str:
    return " × ".join(str(size) for size in shape)
