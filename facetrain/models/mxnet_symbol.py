"""Reader of the two files of an MXNet network: `NAME-symbol.json`, the graph, and `NAME-0000.params`, the weights.

The graph is JSON, as `nnvm::pass::SaveJSON` writes it (MXNet 1.x):

    {"nodes": [{"op": "null", "name": "data", "inputs": []},
               {"op": "Convolution", "name": "conv0", "attrs": {"kernel": "(3, 3)"}, "inputs": [[0, 0, 0], …]}, …],
     "heads": [[1, 0, 0]]}

An entry of `inputs` and `heads` begins with the number of a node. The op "null" is the image or a weight.
"""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from facetrain.errors import ModelError
from facetrain.files import os_errors_as
from facetrain.models.mxnet_params import read_params

EMBEDDING = "fc1"
"""Name that InsightFace gives to the embedding; a graph saved for training has more nodes after it."""


class Attributes(dict[str, str]):
    """The attributes of a node, which the file stores as text."""

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        return float(self.get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        return self.get(key, str(default)) in ("True", "true", "1")

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Return the numbers for height and width, from text such as "(3, 3)"."""
        numbers = [int(number) for number in re.findall(r"\d+", self.get(key, ""))]
        height, width = numbers or (default, default)
        return height, width


def read_symbol(path: Path) -> tuple[str, Any, dict[str, Tensor]]:
    """Return the path of the graph, the decoded graph, and the weights by name.

    `path` is either of the two files.

    Raises:
        ModelError: one of the two files is missing or cannot be read.
    """
    symbol_path, params_path = _pair_of_files(path)
    try:
        with os_errors_as(ModelError, symbol_path):
            symbol = json.loads(symbol_path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise not_a_graph(symbol_path, error) from error
    return str(symbol_path), symbol, read_params(params_path)


def not_a_graph(path: Path | str, error: Exception) -> ModelError:
    """Return the error for a file with another content than MXNet writes."""
    return ModelError(f"{path}: not an MXNet graph ({type(error).__name__}: {error})")


def embedding_node(symbol: Any) -> int:
    """Return the number of the node that computes the embedding."""
    names = [node["name"] for node in symbol["nodes"]]
    return names.index(EMBEDDING) if EMBEDDING in names else int(symbol["heads"][0][0])


def needed_nodes(nodes: list[Any], output: int) -> list[int]:
    """Return the numbers of the nodes that the output depends on, in topological order.

    Raises:
        ValueError: a node takes the value of a later node.
    """
    needed, to_visit = set(), [output]
    while to_visit:
        number = to_visit.pop()
        if number not in needed:
            needed.add(number)
            inputs = input_nodes(nodes[number])
            # MXNet writes nodes in topological order; this also rules out cycles.
            if any(not 0 <= source < number for source in inputs):
                raise ValueError(f"node {number} comes before its inputs")
            to_visit += inputs
    return sorted(needed)


def input_nodes(node: Any) -> list[int]:
    """Return the numbers of the nodes whose values a node takes."""
    return [entry[0] for entry in node["inputs"]]


def attributes_of(node: Any) -> Attributes:
    """Return the attributes of a node; MXNet has used three names for them."""
    return Attributes(node.get("attrs") or node.get("attr") or node.get("param") or {})


def _pair_of_files(path: Path) -> tuple[Path, Path]:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    if path.name.endswith("-symbol.json"):
        prefix = path.name.removesuffix("-symbol.json")
        epochs = sorted(path.parent.glob(f"{glob.escape(prefix)}-[0-9][0-9][0-9][0-9].params"))
        if not epochs:
            raise ModelError(f"{path}: {prefix}-0000.params is missing; put it into the same folder")
        return path, epochs[-1]
    weights = re.fullmatch(r"(.+)-\d{4}\.params", path.name)
    if not weights:
        raise ModelError(
            f"{path}: not the name of a file of MXNet; give NAME-symbol.json and NAME-0000.params in one folder"
        )
    return path.with_name(f"{weights[1]}-symbol.json"), path
