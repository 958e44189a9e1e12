"""Table of MXNet's operators: their computation in torch, and their form as layers.

Operators and defaults are those of MXNet 1.x that InsightFace's published networks use
(https://mxnet.apache.org/versions/1.9.1/api/python/docs/api/symbol/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.models.layer_graph import Layer, LayerReader, Node
from facetrain.models.mxnet_symbol import Attributes

Computation = Callable[..., Tensor]
"""Maps the inputs of a node to its value."""


@dataclass(frozen=True)
class Operator:
    """An operator of MXNet."""

    run: Callable[[Attributes], Computation]
    """Returns the computation of a node with these attributes."""
    layer: LayerReader | None = None
    """Reads a node as a layer; None where no backbone has such a layer."""
    is_identity: bool = False
    """Whether it changes no number at inference."""
    arithmetic: str = ""
    """`add`, `sub`, `mul` or `div` for an operation with the number in the attribute `scalar`."""


def _run_convolution(attributes: Attributes) -> Computation:
    stride, pad = attributes.pair("stride", 1), attributes.pair("pad", 0)
    dilate, groups = attributes.pair("dilate", 1), int(attributes.number("num_group", 1))
    return lambda x, weight, bias=None: F.conv2d(x, weight, bias, stride, pad, dilate, groups)


def _convolution_layer(node: Node) -> Layer:
    attributes = Attributes(node.attributes)
    options = {
        "stride": attributes.pair("stride", 1),
        "padding": attributes.pair("pad", 0),
        "dilation": attributes.pair("dilate", 1),
        "groups": int(attributes.number("num_group", 1)),
    }
    return Layer("conv", node.sources[:1], node.weights(), options)


def _run_batch_norm(attributes: Attributes) -> Computation:
    eps, fixed = attributes.number("eps", 1e-3), attributes.flag("fix_gamma", True)
    return lambda x, gamma, beta, mean, variance: F.batch_norm(
        x, mean, variance, torch.ones_like(gamma) if fixed else gamma, beta, training=False, eps=eps
    )


def _batch_norm_layer(node: Node) -> Layer:
    attributes, weights = Attributes(node.attributes), node.weights()
    if attributes.flag("fix_gamma", True):
        # The file stores a gamma here too, but MXNet ignores it.
        weights["weight"] = torch.ones_like(weights["weight"])
    return Layer("norm", node.sources[:1], weights, {"eps": attributes.number("eps", 1e-3)})


def _run_leaky_relu(attributes: Attributes) -> Computation:
    kind, slope = attributes.get("act_type", "leaky"), attributes.number("slope", 0.25)
    if kind == "prelu":
        return F.prelu
    kinds: dict[str, Computation] = {
        "leaky": lambda x: F.leaky_relu(x, slope),
        "elu": lambda x: F.elu(x, slope),
    }
    return kinds[kind]


def _prelu_layer(node: Node) -> Layer | None:
    return (
        Layer("prelu", node.sources[:1], node.weights())
        if node.attributes.get("act_type") == "prelu"
        else None
    )


def _run_activation(attributes: Attributes) -> Computation:
    kinds: dict[str, Computation] = {
        "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softrelu": F.softplus, "softsign": F.softsign,
    }  # fmt: skip
    return kinds[attributes["act_type"]]


def _run_fully_connected(attributes: Attributes) -> Computation:
    flatten = attributes.flag("flatten", True)
    return lambda x, weight, bias=None: F.linear(x.flatten(1) if flatten else x, weight, bias)


def _linear_layer(node: Node) -> Layer:
    return Layer("linear", node.sources[:1], node.weights())


def _run_pooling(attributes: Attributes) -> Computation:
    pool: Any = {"max": F.max_pool2d, "avg": F.avg_pool2d}[attributes.get("pool_type", "max")]
    if attributes.flag("global_pool", False):
        return lambda x: pool(x, x.shape[2:])
    kernel, stride, pad = (
        attributes.pair("kernel", 1),
        attributes.pair("stride", 1),
        attributes.pair("pad", 0),
    )
    options = {"ceil_mode": attributes.get("pooling_convention", "valid") == "full"}
    if pool is F.avg_pool2d:
        options["count_include_pad"] = attributes.flag("count_include_pad", True)
    return lambda x: pool(x, kernel, stride, pad, **options)


def _run_l2_normalization(attributes: Attributes) -> Computation:
    axes = {"instance": None, "channel": 1}[attributes.get("mode", "instance")]
    eps = attributes.number("eps", 1e-10)
    return lambda x: x / (x.square().sum(axes or tuple(range(1, x.dim())), keepdim=True) + eps).sqrt()


def _run_concat(attributes: Attributes) -> Computation:
    axis = int(attributes.number("dim", 1))
    return lambda *inputs: torch.cat(inputs, axis)


def _without_attributes(computation: Computation) -> Callable[[Attributes], Computation]:
    return lambda _: computation


_ARITHMETIC: dict[str, Computation] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


def _scalar_operator(arithmetic: str) -> Operator:
    operation = _ARITHMETIC[arithmetic]

    def run(attributes: Attributes) -> Computation:
        scalar = float(attributes["scalar"])
        return lambda x: operation(x, scalar)

    return Operator(run, arithmetic=arithmetic)


_IDENTITY = Operator(_without_attributes(lambda x: x), is_identity=True)
_ADD = Operator(_without_attributes(torch.add), lambda node: Layer("add", node.sources))
_MULTIPLY = Operator(_without_attributes(torch.mul))

OPERATORS: dict[str, Operator] = {
    "Convolution": Operator(_run_convolution, _convolution_layer),
    "BatchNorm": Operator(_run_batch_norm, _batch_norm_layer),
    "LeakyReLU": Operator(_run_leaky_relu, _prelu_layer),
    "Activation": Operator(_run_activation),
    "FullyConnected": Operator(_run_fully_connected, _linear_layer),
    "Pooling": Operator(_run_pooling),
    "L2Normalization": Operator(_run_l2_normalization),
    "Concat": Operator(_run_concat),
    "Flatten": Operator(_without_attributes(lambda x: x.flatten(1)), is_identity=True),
    "Dropout": _IDENTITY,
    "identity": _IDENTITY,
    "_copy": _IDENTITY,
    "BlockGrad": _IDENTITY,
    # MXNet has renamed its arithmetic operators; files have every name.
    "elemwise_add": _ADD,
    "_plus": _ADD,
    "_Plus": _ADD,
    "broadcast_add": _ADD,
    "elemwise_mul": _MULTIPLY,
    "_mul": _MULTIPLY,
    "broadcast_mul": _MULTIPLY,
    "_plus_scalar": _scalar_operator("add"),
    "_PlusScalar": _scalar_operator("add"),
    "_minus_scalar": _scalar_operator("sub"),
    "_MinusScalar": _scalar_operator("sub"),
    "_mul_scalar": _scalar_operator("mul"),
    "_MulScalar": _scalar_operator("mul"),
    "_div_scalar": _scalar_operator("div"),
    "_DivScalar": _scalar_operator("div"),
}
"""By the name in the field `op` of a node."""
