"""MXNet's networks, `NAME-symbol.json` with `NAME-0000.params`, run by torch.

The operators and their defaults are those of MXNet 1.x that InsightFace's published networks use.
Normalization is part of such a graph: it takes pixels from 0 to 255.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facetrain.errors import ModelError
from facetrain.models.mxnet_params import read_params

Operator = Callable[..., Tensor]
EMBEDDING = "fc1"
"""What InsightFace calls the embedding; graphs saved for training go on behind it."""


class Attributes(dict[str, str]):
    """An operator's settings, which the file holds as text."""

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        return float(self.get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """Return a yes or no."""
        return self.get(key, str(default)) in ("True", "true", "1")

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Return the numbers for height and width."""
        found = [int(number) for number in re.findall(r"\d+", self.get(key, ""))]
        height, width = found or (default, default)
        return height, width


def _convolution(attributes: Attributes) -> Operator:
    stride, pad = attributes.pair("stride", 1), attributes.pair("pad", 0)
    dilate, groups = attributes.pair("dilate", 1), int(attributes.number("num_group", 1))
    return lambda x, weight, bias=None: F.conv2d(x, weight, bias, stride, pad, dilate, groups)


def _batch_norm(attributes: Attributes) -> Operator:
    eps, fixed = attributes.number("eps", 1e-3), attributes.flag("fix_gamma", True)
    return lambda x, gamma, beta, mean, variance: F.batch_norm(
        x, mean, variance, torch.ones_like(gamma) if fixed else gamma, beta, training=False, eps=eps
    )


def _leaky_relu(attributes: Attributes) -> Operator:
    kind, slope = attributes.get("act_type", "leaky"), attributes.number("slope", 0.25)
    if kind == "prelu":
        return F.prelu
    kinds: dict[str, Operator] = {"leaky": lambda x: F.leaky_relu(x, slope), "elu": lambda x: F.elu(x, slope)}
    return kinds[kind]


def _activation(attributes: Attributes) -> Operator:
    kinds: dict[str, Operator] = {
        "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softrelu": F.softplus, "softsign": F.softsign,
    }  # fmt: skip
    return kinds[attributes["act_type"]]


def _fully_connected(attributes: Attributes) -> Operator:
    flatten = attributes.flag("flatten", True)
    return lambda x, weight, bias=None: F.linear(x.flatten(1) if flatten else x, weight, bias)


def _pooling(attributes: Attributes) -> Operator:
    pool: Any = {"max": F.max_pool2d, "avg": F.avg_pool2d}[attributes.get("pool_type", "max")]
    if attributes.flag("global_pool", False):
        return lambda x: pool(x, x.shape[2:])
    kernel, stride, pad = (
        attributes.pair("kernel", 1),
        attributes.pair("stride", 1),
        attributes.pair("pad", 0),
    )
    full = attributes.get("pooling_convention", "valid") == "full"
    return lambda x: pool(x, kernel, stride, pad, ceil_mode=full)


def _l2_normalization(attributes: Attributes) -> Operator:
    axes = {"instance": None, "channel": 1}[attributes.get("mode", "instance")]
    eps = attributes.number("eps", 1e-10)
    return lambda x: x / (x.square().sum(axes or tuple(range(1, x.dim())), keepdim=True) + eps).sqrt()


def _concat(attributes: Attributes) -> Operator:
    axis = int(attributes.number("dim", 1))
    return lambda *inputs: torch.cat(inputs, axis)


def _with_scalar(operation: Callable[[Tensor, float], Tensor]) -> Callable[[Attributes], Operator]:
    def build(attributes: Attributes) -> Operator:
        scalar = float(attributes["scalar"])
        return lambda x: operation(x, scalar)

    return build


def _plain(operation: Operator) -> Callable[[Attributes], Operator]:
    return lambda _: operation


_ADD, _MULTIPLY = _plain(torch.add), _plain(torch.mul)
_SAME = _plain(lambda x: x)  # of no effect when a network is not trained
_OPERATORS: dict[str, Callable[[Attributes], Operator]] = {
    "Convolution": _convolution, "BatchNorm": _batch_norm, "LeakyReLU": _leaky_relu,
    "Activation": _activation, "FullyConnected": _fully_connected, "Pooling": _pooling,
    "L2Normalization": _l2_normalization, "Concat": _concat, "Flatten": _plain(lambda x: x.flatten(1)),
    "Dropout": _SAME, "identity": _SAME, "_copy": _SAME, "BlockGrad": _SAME,
    "elemwise_add": _ADD, "_plus": _ADD, "_Plus": _ADD, "broadcast_add": _ADD,
    "elemwise_mul": _MULTIPLY, "_mul": _MULTIPLY, "broadcast_mul": _MULTIPLY,
    "_plus_scalar": _with_scalar(torch.add), "_PlusScalar": _with_scalar(torch.add),
    "_minus_scalar": _with_scalar(torch.sub), "_MinusScalar": _with_scalar(torch.sub),
    "_mul_scalar": _with_scalar(torch.mul), "_MulScalar": _with_scalar(torch.mul),
    "_div_scalar": _with_scalar(torch.div), "_DivScalar": _with_scalar(torch.div),
}  # fmt: skip


class MxnetNetwork(nn.Module):
    """A graph of MXNet's operators with its weights; takes pixels 0 to 255, (B, 3, H, W) RGB."""

    def __init__(self, symbol: Any, weights: dict[str, Tensor], where: str) -> None:
        super().__init__()
        nodes = symbol["nodes"]
        names = [node["name"] for node in nodes]
        self._output = embedding_node(symbol)
        self._steps: list[tuple[int, Operator, list[int]]] = []
        self._data = -1
        for number in needed_nodes(nodes, self._output):
            node = nodes[number]
            if node["op"] != "null":
                operator = _operator(node, where)
                self._steps.append((number, operator, [entry[0] for entry in node["inputs"]]))
            elif names[number] in weights:
                self.register_buffer(f"_{number}", weights[names[number]].float())
            elif self._data < 0:
                self._data = number
            else:
                raise ModelError(f"{where}: there are no weights for {names[number]}")
        self._last_use = {source: number for number, _, sources in self._steps for source in sources}

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map pixels (B, 3, H, W) to embeddings (B, D)."""
        values = {self._data: image_BCHW}
        for number, operator, sources in self._steps:
            values[number] = operator(
                *(values[s] if s in values else self.get_buffer(f"_{s}") for s in sources)
            )
            for source in sources:
                # Without this a network of a hundred layers would hold the features of all of them.
                if self._last_use[source] == number:
                    values.pop(source, None)
        return values[self._output]


def open_mxnet(path: Path) -> MxnetNetwork:
    """Open a network by its `NAME-symbol.json` or its `NAME-0000.params`.

    Raises:
        ModelError: one of the two is missing or broken, or the graph has an operator that is not known.
    """
    where, symbol, weights = read_symbol(path)
    try:
        return MxnetNetwork(symbol, weights, where).eval()
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{where}: is no graph of MXNet's ({type(error).__name__}: {error})") from error


def read_symbol(path: Path) -> tuple[str, Any, dict[str, Tensor]]:
    """Return the graph's path, the graph, and the weights by name, from either of the two files.

    Raises:
        ModelError: one of the two is missing, or cannot be read.
    """
    symbol_path, params_path = _both(path)
    try:
        symbol = json.loads(symbol_path.read_bytes())
    except OSError as error:
        raise ModelError(f"{symbol_path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{symbol_path}: is no graph of MXNet's ({type(error).__name__}: {error})"
        ) from error
    return str(symbol_path), symbol, read_params(params_path)


def _both(path: Path) -> tuple[Path, Path]:
    if path.name.endswith("-symbol.json"):
        prefix = path.name.removesuffix("-symbol.json")
        epochs = sorted(path.parent.glob(f"{prefix}-[0-9][0-9][0-9][0-9].params"))
        if not epochs:
            raise ModelError(f"{path}: {prefix}-0000.params is not beside it")
        return path, epochs[-1]
    return path.with_name(re.sub(r"-\d{4}\.params$", "", path.name) + "-symbol.json"), path


def embedding_node(symbol: Any) -> int:
    """Return the number of the node that gives the embedding."""
    names = [node["name"] for node in symbol["nodes"]]
    return names.index(EMBEDDING) if EMBEDDING in names else int(symbol["heads"][0][0])


def needed_nodes(nodes: list[Any], output: int) -> list[int]:
    """Return the nodes that the output depends on, each behind its inputs.

    Raises:
        ValueError: an input does not stand before the node that takes it.
    """
    needed, waiting = set(), [output]
    while waiting:
        number = waiting.pop()
        if number not in needed:
            needed.add(number)
            inputs = [entry[0] for entry in nodes[number]["inputs"]]
            if any(not 0 <= source < number for source in inputs):
                raise ValueError(f"node {number} stands before its inputs")
            waiting += inputs
    return sorted(needed)


def _operator(node: Any, where: str) -> Operator:
    if node["op"] not in _OPERATORS:
        raise ModelError(f"{where}: {node['name']} is a {node['op']}, which facetrain cannot run")
    return _OPERATORS[node["op"]](attributes_of(node))


def attributes_of(node: Any) -> Attributes:
    """Return the settings of a node, whatever MXNet's version calls them."""
    return Attributes(node.get("attrs") or node.get("attr") or node.get("param") or {})
