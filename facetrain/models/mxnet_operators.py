"""Table of MXNet's operators as layers.

Operators and defaults of MXNet 1.x, as far as InsightFace's published networks use them
(https://mxnet.apache.org/versions/1.9.1/api/python/docs/api/symbol/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.models.file_layers import Node
from facetrain.models.layer_graph import Layer

_Attributes = Mapping[str, Any]
_Reader = Callable[[Node, _Attributes], Layer]
_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softrelu": F.softplus, "softsign": F.softsign,
    "leaky": F.leaky_relu, "elu": F.elu,
}  # fmt: skip
"""Functions by `act_type`; the last two take the slope after the input."""


def _convolution(node: Node, given: _Attributes) -> Layer:
    return node.layer(
        "conv",
        stride=given.get("stride", (1, 1)),
        padding=given.get("pad", (0, 0)),
        dilation=given.get("dilate", (1, 1)),
        groups=given.get("num_group", 1),
    )


def _batch_norm(node: Node, given: _Attributes) -> Layer:
    layer = node.layer("norm", eps=given.get("eps", 1e-3))
    if given.get("fix_gamma", True):
        # The file stores a gamma here too, but MXNet ignores it.
        layer.weights["weight"] = torch.ones_like(layer.weights["weight"])
    return layer


def _leaky_relu(node: Node, given: _Attributes) -> Layer:
    kind = given.get("act_type", "leaky")
    if kind == "prelu":
        return node.layer("prelu")
    compute, slope = _ACTIVATIONS[kind], given.get("slope", 0.25)
    return _computed(node, lambda x: compute(x, slope))


def _fully_connected(node: Node, given: _Attributes) -> Layer:
    return node.layer("linear") if given.get("flatten", True) else _computed(node, F.linear)


def _pooling(node: Node, given: _Attributes) -> Layer:
    pool: Any = {"max": F.max_pool2d, "avg": F.avg_pool2d}[given.get("pool_type", "max")]
    if given.get("global_pool", False):
        return _computed(node, lambda x: pool(x, x.shape[2:]))
    sizes = given.get("kernel", (1, 1)), given.get("stride", (1, 1)), given.get("pad", (0, 0))
    options = {"ceil_mode": given.get("pooling_convention", "valid") == "full"}
    if pool is F.avg_pool2d:
        options["count_include_pad"] = given.get("count_include_pad", True)
    return _computed(node, lambda x: pool(x, *sizes, **options))


def _l2_normalization(node: Node, given: _Attributes) -> Layer:
    axes = {"instance": None, "channel": 1}[given.get("mode", "instance")]
    eps = given.get("eps", 1e-10)
    return _computed(
        node, lambda x: x / (x.square().sum(axes or tuple(range(1, x.dim())), keepdim=True) + eps).sqrt()
    )


def _computed(node: Node, compute: Callable[..., Tensor]) -> Layer:
    """Return a layer that no backbone has: a function of all inputs of a node."""
    return replace(node.layer(node.operator), sources=node.sources, compute=compute)


def _add(node: Node, _: _Attributes) -> Layer:
    # A sum with a weight of the file is no shortcut.
    return _computed(node, torch.add) if node.constants else Layer("add", node.sources)


def _identity(node: Node, _: _Attributes) -> Layer:
    return Layer("identity", node.sources)


def _with_number(operation: str) -> _Reader:
    return lambda node, given: node.with_number(operation, float(given["scalar"]))


OPERATORS: dict[str, _Reader] = {
    "Convolution": _convolution,
    "BatchNorm": _batch_norm,
    "LeakyReLU": _leaky_relu,
    "Activation": lambda node, given: _computed(node, _ACTIVATIONS[given["act_type"]]),
    "FullyConnected": _fully_connected,
    "Pooling": _pooling,
    "L2Normalization": _l2_normalization,
    "Concat": lambda node, given: _computed(node, lambda *inputs: torch.cat(inputs, given.get("dim", 1))),
    "Flatten": lambda node, _: Layer("flatten", node.sources),
    **dict.fromkeys(("Dropout", "identity", "_copy", "BlockGrad"), _identity),
    # MXNet has renamed its arithmetic operators; files have every name.
    **dict.fromkeys(("elemwise_add", "_plus", "_Plus", "broadcast_add"), _add),
    **dict.fromkeys(("elemwise_mul", "_mul", "broadcast_mul"), lambda node, _: _computed(node, torch.mul)),
    **dict.fromkeys(("_plus_scalar", "_PlusScalar"), _with_number("add")),
    **dict.fromkeys(("_minus_scalar", "_MinusScalar"), _with_number("sub")),
    **dict.fromkeys(("_mul_scalar", "_MulScalar"), _with_number("mul")),
    **dict.fromkeys(("_div_scalar", "_DivScalar"), _with_number("div")),
}
"""By the name in the field `op` of a node."""
