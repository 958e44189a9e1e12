"""Checks of an ONNX graph before it is loaded: declared sizes against the bytes of the file, and sizes of all values.

onnxruntime allocates what a graph declares, and computes the values that depend on constants while it loads the graph.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from facetrain.errors import ModelError
from facetrain.files import listed

_MAX_VALUE_BYTES = 1 << 28
"""Largest value between two layers: 20 times the largest one of an IResNet for 8 images of 112 pixels. Where a graph
has a fixed batch, this is the limit for one image, as it is where the batch is free."""
_MAX_BATCH = 1024
"""Images for which the limit of a fixed batch grows."""
_SMALL_BYTES = 1 << 12
"""Constants up to this size keep their numbers for the inference of shapes: they may be shapes."""
_TWO_IN_A_BYTE = ("INT4", "UINT4", "FLOAT4E2M1")


def require_fitting_sizes(path: Path) -> None:
    """Check that every weight has the bytes that its shape needs, and that no value is too large to compute.

    Raises:
        ModelError: a weight or a value is too large, or the file with the data of a weight is missing.
        Exception: errors of protobuf and onnx, if the file is not an ONNX file.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    constants = list(model.graph.initializer)
    constants += [
        attribute.t for node in model.graph.node for attribute in node.attribute if attribute.HasField("t")
    ]
    for tensor in constants:
        _require_bytes(path, tensor)
        if len(tensor.raw_data) > _SMALL_BYTES:
            tensor.ClearField("raw_data")
    try:
        inferred = onnx.shape_inference.infer_shapes(model)  # with data_prop, it would compute the values
    except (
        onnx.shape_inference.InferenceError,
        ValueError,
    ):  # of 2 GiB and more, say; onnxruntime infers them itself
        return
    graph = inferred.graph
    inputs = graph_inputs(graph)
    batch, computed = _fixed_batch(inputs), _computed_from(inputs, graph)
    # Some exporters list the weights among the values; these have their bytes.
    weights = {found.name for found in graph.initializer}
    for value in (*inputs, *graph.value_info, *graph.output):
        if value.name in weights:
            continue
        shape = _stated_shape(value)
        size = math.prod(shape) * _bytes_per_number(value.type.tensor_type.elem_type)
        limit = _MAX_VALUE_BYTES * (batch if value.name in computed else 1)
        if size > limit:
            raise ModelError(
                f"{path}: the value {value.name} has the shape {_text(shape)}, {size:,} bytes; the limit is {limit:,}"
            )


def _stated_shape(value: Any) -> list[int]:
    dimensions = value.type.tensor_type.shape.dim
    return [dimension.dim_value for dimension in dimensions if dimension.HasField("dim_value")]


def _fixed_batch(inputs: list[Any]) -> int:
    """Return the number of images that a graph takes at a time; 1 if it is free."""
    shape = _stated_shape(inputs[0]) if inputs else []
    return max(1, min(shape[0], _MAX_BATCH)) if len(shape) == 4 else 1


def _computed_from(inputs: list[Any], graph: Any) -> set[str]:
    """Return the names of the values that onnxruntime cannot compute before it has inputs."""
    given = {value.name for value in inputs}
    computed = set(given)
    for node in graph.node:
        # The shape of a value, and what follows from it, can be known before.
        if node.op_type not in ("Shape", "Size") and not computed.isdisjoint(node.input):
            computed.update(node.output)
    return computed - given


def graph_inputs(graph: Any) -> list[Any]:
    """Return the inputs of a graph; old exporters list the weights among them too."""
    weights = {found.name for found in graph.initializer}
    return [found for found in graph.input if found.name not in weights]


def _require_bytes(path: Path, tensor: Any) -> None:
    """Check that a weight has the bytes that its shape needs, in the model or in the file with its data."""
    needed = math.prod(tensor.dims) * _bytes_per_number(tensor.data_type)
    # Without raw data, small integers are packed into less than their size in memory.
    found = len(tensor.raw_data) or 8 * tensor.ByteSize()
    external = {entry.key: entry.value for entry in tensor.external_data}
    if "location" in external:
        data = path.parent / external["location"]
        if not data.exists():
            name = listed([external["location"]])
            raise ModelError(f"{path}: its weights are in {name}, which is missing; copy it to {path.parent}")
        found += data.stat().st_size if data.is_file() else 0
    if min(tensor.dims, default=1) < 0 or needed > found:
        raise ModelError(
            f"{path}: the weight {tensor.name} has the shape {_text(tensor.dims)} and needs {needed:,} bytes, but its "
            f"data has at most {found:,}; the file is damaged or incomplete"
        )


def _bytes_per_number(kind: int) -> int:
    from onnx import TensorProto, helper

    try:
        if TensorProto.DataType.Name(kind) in _TWO_IN_A_BYTE:
            return 0
        return int(helper.tensor_dtype_to_np_dtype(kind).itemsize)
    except (KeyError, TypeError, ValueError):
        return 1


def _text(shape: Any) -> str:
    return " × ".join(str(size) for size in shape)
