"""Numbers that an ONNX graph computes from its small constants, such as the shape of a larger value.

The shape inference of onnx does not compute them, or with `data_prop` computes a few operators, and then constants of
any size: a vector that is doubled 30 times would fill the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.errors import ModelError

_MOST_NUMBERS = 64
"""More than a shape has."""
_MOST_COMBINATIONS = 1 << 20
"""Product of the sizes of a node's operands: a node has no more results, even if it repeats each along the others."""
_MOST_NODES = 10_000
_ARITHMETIC = frozenset((
    "Abs", "Add", "Cast", "Ceil", "DequantizeLinear", "Div", "Equal", "Floor", "Gather", "Greater", "Identity", "Less",
    "Max", "Min", "Mod", "Mul", "Neg", "Not", "Pow", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape",
    "Slice", "Sqrt", "Squeeze", "Sub", "Unsqueeze", "Where",
))  # fmt: skip
_APPENDING = "Concat"
"""An operator whose results are as many as all its operands have numbers."""


def plain_form(path: Path, model: Any) -> Any:
    """Return a model without local functions, and with the numbers in place of nodes that compute a few from constants.

    Raises:
        ModelError: there are too many of them.
    """
    from onnx import inliner, numpy_helper

    if model.functions:
        model = inliner.inline_local_functions(model)
    graph, known = model.graph, dict[str, np.ndarray]()
    for weight in graph.initializer:
        if (array := _small_array(weight)) is not None:
            known[weight.name] = array
    kept, folded = [], 0
    for node in graph.node:
        found = _result(node, known, model.opset_import)
        if found is None:
            kept.append(node)
            continue
        folded += 1
        if folded > _MOST_NODES:
            raise ModelError(
                f"{path}: more than {_MOST_NODES:,} nodes compute constants; fold them when you export the graph"
            )
        known[node.output[0]] = found
        graph.initializer.append(numpy_helper.from_array(found, node.output[0]))
    del graph.node[:]
    graph.node.extend(kept)
    return model


def _result(node: Any, known: dict[str, np.ndarray], opsets: Sequence[Any]) -> np.ndarray | None:
    """Return the numbers that a node computes; None for other nodes, and for more than a few numbers."""
    if node.domain or len(node.output) != 1:
        return None
    if node.op_type == "Constant":
        tensors = [attribute.t for attribute in node.attribute if attribute.HasField("t")]
        return _small_array(tensors[0]) if tensors else None
    operands = {name: known[name] for name in node.input if name in known}
    if not operands or not all(name in known for name in node.input if name):
        return None
    if node.op_type in _ARITHMETIC:
        is_cheap = math.prod(known[name].size or 1 for name in node.input if name) <= _MOST_COMBINATIONS
    else:
        is_cheap = node.op_type == _APPENDING and len(node.input) <= _MOST_NUMBERS
    return _computed(node, operands, opsets) if is_cheap else None


def _computed(node: Any, operands: dict[str, np.ndarray], opsets: Sequence[Any]) -> np.ndarray | None:
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "DequantizeLinear":  # which the evaluator lacks in older versions
        opsets = [helper.make_opsetid("", 19)]
    function = helper.make_function("facetrain", "compute", list(operands), node.output, [node], opsets)
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(ReferenceEvaluator(function).run(None, operands, attributes={})[0])
    except Exception:
        # Operands that do not fit give errors without a common base; onnxruntime refuses them later.
        return None
    return found if _is_small(found.shape) and found.dtype.kind in "biuf" else None


def _is_small(shape: Sequence[int]) -> bool:
    # Without its zeros: the sum over an axis of size 0 has as many numbers as the other axes.
    return math.prod(size or 1 for size in shape) <= _MOST_NUMBERS


def _small_array(tensor: Any) -> np.ndarray | None:
    from onnx import numpy_helper

    if not _is_small(tensor.dims) or tensor.external_data:
        return None
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "biuf" else None
