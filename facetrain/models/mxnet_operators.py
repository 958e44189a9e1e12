"""Table of MXNet's operators as layers.

Operators and defaults are those of MXNet 1.x that InsightFace's published networks use
(https://mxnet.apache.org/versions/1.9.1/api/python/docs/api/symbol/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.models.file_layers import Node
from facetrain.models.layer_graph import Layer
from facetrain.models.mxnet_symbol import Attributes

LayerReader = Callable[[Node, Attributes], Layer]
"""Returns a node with its attributes as a layer."""


def _convolution(node: Node, attributes: Attributes) -> Layer:
    return node.layer(
        "conv",
        stride=attributes.pair("stride", 1),
        padding=attributes.pair("pad", 0),
        dilation=attributes.pair("dilate", 1),
        groups=int(attributes.number("num_group", 1)),
    )


def _batch_norm(node: Node, attributes: Attributes) -> Layer:
    layer = node.layer("norm", eps=attributes.number("eps", 1e-3))
    if attributes.flag("fix_gamma", True):
        # The file stores a gamma here too, but MXNet ignores it.
        layer.weights["weight"] = torch.ones_like(layer.weights["weight"])
    return layer


def _leaky_relu(node: Node, attributes: Attributes) -> Layer:
    slope = attributes.number("slope", 0.25)
    kinds: dict[str, Layer] = {
        "prelu": node.layer("prelu"),
        "leaky": _computed(node, lambda x: F.leaky_relu(x, slope)),
        "elu": _computed(node, lambda x: F.elu(x, slope)),
    }
    return kinds[attributes.get("act_type", "leaky")]


def _activation(node: Node, attributes: Attributes) -> Layer:
    kinds: dict[str, Callable[..., Tensor]] = {
        "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softrelu": F.softplus, "softsign": F.softsign,
    }  # fmt: skip
    return _computed(node, kinds[attributes["act_type"]])


def _fully_connected(node: Node, attributes: Attributes) -> Layer:
    return node.layer("linear") if attributes.flag("flatten", True) else _computed(node, F.linear)


def _pooling(node: Node, attributes: Attributes) -> Layer:
    pool: Any = {"max": F.max_pool2d, "avg": F.avg_pool2d}[attributes.get("pool_type", "max")]
    if attributes.flag("global_pool", False):
        return _computed(node, lambda x: pool(x, x.shape[2:]))
    sizes = [attributes.pair(name, default) for name, default in (("kernel", 1), ("stride", 1), ("pad", 0))]
    options = {"ceil_mode": attributes.get("pooling_convention", "valid") == "full"}
    if pool is F.avg_pool2d:
        options["count_include_pad"] = attributes.flag("count_include_pad", True)
    return _computed(node, lambda x: pool(x, *sizes, **options))


def _l2_normalization(node: Node, attributes: Attributes) -> Layer:
    axes = {"instance": None, "channel": 1}[attributes.get("mode", "instance")]
    eps = attributes.number("eps", 1e-10)
    return _computed(
        node,
        lambda x: x / (x.square().sum(axes or tuple(range(1, x.dim())), keepdim=True) + eps).sqrt(),
    )


def _concat(node: Node, attributes: Attributes) -> Layer:
    axis = int(attributes.number("dim", 1))
    return _computed(node, lambda *inputs: torch.cat(inputs, axis))


def _computed(node: Node, compute: Callable[..., Tensor]) -> Layer:
    """Return a layer that no backbone has: a function of all inputs of a node."""
    return replace(node.layer(node.operator), sources=node.sources, compute=compute)


def _add(node: Node, _: Attributes) -> Layer:
    # A sum with a weight of the file is no shortcut.
    return _computed(node, torch.add) if node.constants else Layer("add", node.sources)


def _kind(kind: str) -> LayerReader:
    return lambda node, _: Layer(kind, node.sources)


def _with_number(operation: str) -> LayerReader:
    return lambda node, attributes: node.with_number(operation, float(attributes["scalar"]))


OPERATORS: dict[str, LayerReader] = {
    "Convolution": _convolution,
    "BatchNorm": _batch_norm,
    "LeakyReLU": _leaky_relu,
    "Activation": _activation,
    "FullyConnected": _fully_connected,
    "Pooling": _pooling,
    "L2Normalization": _l2_normalization,
    "Concat": _concat,
    "Flatten": _kind("flatten"),
    **dict.fromkeys(("Dropout", "identity", "_copy", "BlockGrad"), _kind("identity")),
    # MXNet has renamed its arithmetic operators; files have every name.
    **dict.fromkeys(("elemwise_add", "_plus", "_Plus", "broadcast_add"), _add),
    **dict.fromkeys(("elemwise_mul", "_mul", "broadcast_mul"), lambda node, _: _computed(node, torch.mul)),
    **dict.fromkeys(("_plus_scalar", "_PlusScalar"), _with_number("add")),
    **dict.fromkeys(("_minus_scalar", "_MinusScalar"), _with_number("sub")),
    **dict.fromkeys(("_mul_scalar", "_MulScalar"), _with_number("mul")),
    **dict.fromkeys(("_div_scalar", "_DivScalar"), _with_number("div")),
}
"""By the name in the field `op` of a node."""
