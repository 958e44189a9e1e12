"""Reader of the two files of an MXNet network: `NAME-symbol.json`, the graph, and `NAME-0000.params`, the weights.

The graph is JSON, as `nnvm::pass::SaveJSON` writes it (MXNet 1.x):

    {"nodes": [{"op": "null", "name": "data", "inputs": []},
               {"op": "Convolution", "name": "conv0", "attrs": {"kernel": "(3, 3)"}, "inputs": [[0, 0, 0], …]}, …],
     "heads": [[1, 0, 0]]}

An entry of `inputs` and `heads` begins with the number of a node. The op "null" is the image or a weight.
"""

from __future__ import annotations

import ast
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
_LITERAL = re.compile(r"[-+.\w, ()\[\]]{1,100}")
"""Numbers, booleans and short tuples, as MXNet writes attributes."""


def read_symbol(path: Path) -> tuple[str, Any, dict[str, Tensor]]:
    """Return the path of the graph, the decoded graph, and the weights by name.

    `path` is either of the two files.

    Raises:
        ModelError: one of the two files is missing or cannot be read.
    """
    symbol_path, params_path = pair_of_files(path)
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
    needed = {output}
    # MXNet writes nodes in topological order; this also rules out cycles.
    for number in range(output, -1, -1):
        if number in needed:
            inputs = input_nodes(nodes[number])
            if any(not 0 <= source < number for source in inputs):
                raise ValueError(f"node {number} comes before its inputs")
            needed.update(inputs)
    return sorted(needed)


def input_nodes(node: Any) -> list[int]:
    """Return the numbers of the nodes whose values a node takes."""
    return [entry[0] for entry in node["inputs"]]


def attributes_of(node: Any) -> dict[str, Any]:
    """Return the attributes of a node; MXNet has used three names for them, and writes values as text."""
    texts = node.get("attrs") or node.get("attr") or node.get("param") or {}
    return {name: _parse(text) for name, text in texts.items()}


def _parse(text: str) -> Any:
    """Return the number, boolean or tuple that a text represents, or the text."""
    if not _LITERAL.fullmatch(text):
        return text
    try:
        value = ast.literal_eval(text.title() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


def pair_of_files(path: Path) -> tuple[Path, Path]:
    """Return the files of the graph and of the weights; `path` is either of the two.

    Raises:
        ModelError: there is no such file, or its name is not that of such a pair.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    if path.name.endswith("-symbol.json"):
        prefix = path.name.removesuffix("-symbol.json")
        epochs = sorted(path.parent.glob(f"{glob.escape(prefix)}-[0-9][0-9][0-9][0-9].params"))
        if not epochs:
            raise ModelError(f"{path}: {prefix}-0000.params is missing; put it into the same folder")
        # MXNet writes a file for each saved epoch: take the last one.
        return path, epochs[-1]
    weights = re.fullmatch(r"(.+)-\d{4}\.params", path.name)
    if not weights:
        raise ModelError(
            f"{path}: not the name of a file of MXNet; give NAME-symbol.json and NAME-0000.params in one folder"
        )
    return path.with_name(f"{weights[1]}-symbol.json"), path
