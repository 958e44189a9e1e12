"""Export to ONNX, opened again by onnxruntime."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from facetrain.errors import ModelError
from facetrain.files import error_reason
from facetrain.models.checksum import CHECKSUM_KEY, checksum_of_onnx
from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.export.deployed import Deployed, file_metadata
from facetrain.models.export.example_inputs import example_pixels, inputs_of_file, split_images
from facetrain.models.export.formats import ExportOptions, Runtime
from facetrain.models.int8.onnx_file import INPUT, OUTPUT, int8_model
from facetrain.models.int8.quantize import folded_network, quantize
from facetrain.models.model_file import THRESHOLDS_KEY
from facetrain.models.mxnet_network import MxnetNetwork
from facetrain.models.onnx_network import LANDMARKS_INPUT

_INPUTS = INPUT, LANDMARKS_INPUT
"""Names of the inputs; a network without KP-RPE has the first one."""
_LEAST_OPSET = 18
"""Lowest opset to which torch's exporter and onnxscript convert every network: they have no lower form of
layer norms and of sums over an axis. The older exporter, which torch deprecates, writes lower opsets."""
_MOST_BYTES = 2**31 - 2**27
"""Largest weights of an ONNX file: protobuf writes less than 2 GiB, and the nodes need some of it."""


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Runtime:
    """Write an ONNX file, with a free batch size unless `batch` fixes it.

    The input is `image`: float32 (N, 3, H, W) as the network takes it, or with `from_pixels` uint8
    (N, H, W, 3) RGB. A network with KP-RPE has a second input `landmarks`: float32 (N, 5, 2), x and y as fractions of
    the image's sides. The output is `embedding`: float32 (N, D), of unit length with `unit`. The metadata
    of the file describe the input and have the description of the model file.

    With `int8` the file has no thresholds: the model has thresholds for other embeddings.

    Raises:
        ModelError: the network is too large, onnxruntime does not open the file, or `int8` does not know the network.
    """
    if options.int8:
        _require_fitting(model)
        kept = {key: value for key, value in model.metadata.items() if key != THRESHOLDS_KEY}
        _save(_quantized(model, options), path, replace(model, metadata=kept), options)
    else:
        write_float_graph(model, path, options)
    return _open(path, model)


def _open(path: Path, model: EmbeddingModel) -> Runtime:
    import onnxruntime

    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = torch.get_num_threads()
    try:
        # On the CPU also beside a GPU, because the network that the file is compared with runs there.
        session = onnxruntime.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base
        raise ModelError(
            f"{model.description}: onnxruntime {onnxruntime.__version__} does not open the file; try a newer version: "
            f"{error_reason(error)}"
        ) from error

    def run(*inputs: np.ndarray) -> np.ndarray:
        embedding: np.ndarray
        (embedding,) = session.run(None, dict(zip(_INPUTS, inputs, strict=False)))
        return embedding

    return Runtime(f"onnxruntime {onnxruntime.__version__}", run)


def write_float_graph(model: EmbeddingModel, path: Path, options: ExportOptions) -> None:
    """Write the ONNX file of a network in float32, see `write`, which other formats are converted from."""
    _require_fitting(model)
    _save(_traced(model, options), path, model, options)


def _traced(model: EmbeddingModel, options: ExportOptions) -> Any:
    """Return the graph of a network, written by the exporter of torch that knows the opset that is asked for."""
    deployed = Deployed(model, options).eval().cpu()
    # Two images for a free batch size: torch.export takes a size of 1 for a constant.
    example = inputs_of_file(model, options, example_pixels(model, options.batch or 2))
    by = _by_older_exporter if (options.opset or _LEAST_OPSET) < _LEAST_OPSET else _by_torch_export
    proto = by(deployed, example, model, options)
    if options.split_prelu:
        _split_prelus(proto.graph)
    return proto


def _by_torch_export(
    deployed: Deployed, example: tuple[Tensor, ...], model: EmbeddingModel, options: ExportOptions
) -> Any:
    free = None if options.batch else ({0: torch.export.Dim("batch", min=1)},) * len(example)
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
    written = program.model.opset_imports[""]
    if options.opset not in (None, written):
        raise ModelError(
            f"{model.description}: torch {torch.version.__version__} and onnxscript write it with opset {written}, not "
            f"{options.opset}; give {written} or a higher one, or one below {_LEAST_OPSET}"
        )
    _name_output(program.model.graph, OUTPUT)
    return program.model_proto


def _by_older_exporter(
    deployed: Deployed, example: tuple[Tensor, ...], model: EmbeddingModel, options: ExportOptions
) -> Any:
    import onnx

    names = list(_INPUTS[: len(example)])
    try:
        with tempfile.TemporaryDirectory() as folder, _without_output():
            file = Path(folder) / "graph.onnx"
            torch.onnx.export(
                deployed,
                example,
                file,
                dynamo=False,
                input_names=names,
                output_names=[OUTPUT],
                dynamic_axes=None if options.batch else {name: {0: "batch"} for name in (*names, OUTPUT)},
                opset_version=options.opset,
            )
            proto = onnx.load(file)
    except RuntimeError as error:  # also all errors of the exporter
        raise ModelError(
            f"{model.description}: torch {torch.version.__version__} does not write it with opset {options.opset} "
            f"({error_reason(error)}); give a higher one, such as --opset {_LEAST_OPSET}"
        ) from error
    # A free batch size makes the exporter declare the size of a quotient, as of `unit`, as free too.
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = model.embedding_size
    return proto


@contextmanager
def _without_output() -> Iterator[None]:
    """Discard standard output, also that of C++: the older exporter prints a graph that it cannot convert, whole."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _name_output(graph: Any, name: str) -> None:
    """Give the output of a graph a name, and another one to a value that has it already.

    `output_names` of the exporter would write the name twice: it names the value of a lookup in a table `embedding`.
    """
    for value in (value for node in graph for value in node.outputs if value.name == name):
        value.name = f"{name}_lookup"
    (output,) = graph.outputs
    output.name = name


def _split_prelus(graph: Any) -> None:
    """Replace each PRelu of a graph by max(x, 0) + a·min(x, 0), of which one summand is 0: no rounding is added.

    onnxruntime 1.31 computes a PRelu with one slope a channel several times as slowly as these four operators.
    """
    from onnx import helper, numpy_helper

    zero = numpy_helper.from_array(np.zeros((), np.float32), "prelu_zero")
    nodes: list[Any] = []
    for node in graph.node:
        if node.op_type != "PRelu":
            nodes.append(node)
            continue
        (x, slope), (output,) = node.input, node.output
        above, below, scaled = (f"{output}_{part}" for part in ("above", "below", "scaled"))
        nodes += [
            helper.make_node("Relu", [x], [above], name=above),
            helper.make_node("Min", [x, zero.name], [below], name=below),
            helper.make_node("Mul", [below, slope], [scaled], name=scaled),
            helper.make_node("Add", [above, scaled], [output], name=output),
        ]
    if len(nodes) > len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
        graph.initializer.append(zero)


def _quantized(model: EmbeddingModel, options: ExportOptions) -> Any:
    """Return the graph of a network on the CPU that computes in int8, calibrated with most of `options.images`."""
    network = folded_network(model.network)
    if network is None:
        raise ModelError(
            f"{model.description}: --int8 quantizes IResNets and MobileFaceNets, also of MXNet's files; export "
            "it without"
        )
    calibration, _ = split_images(options, model.image_size)
    quantized = quantize(network, model.prepare(calibration))
    return int8_model(quantized, model.image_size, model.embedding_size)


def _require_fitting(model: EmbeddingModel) -> None:
    if sum(weight.nbytes for weight in model.network.state_dict().values()) > _MOST_BYTES:
        raise ModelError(
            f"{model.description}: its weights exceed the 2 GiB of an ONNX file; use --format torch_export"
        )


def _save(proto: Any, path: Path, model: EmbeddingModel, options: ExportOptions) -> None:
    """Write a graph with the metadata of the model."""
    import onnx

    _strip(proto)
    if isinstance(model.network, MxnetNetwork) and not options.from_pixels:
        _mark_normalization(proto.graph)
    checksum = checksum_of_onnx(proto, path.parent)
    onnx.helper.set_model_props(proto, file_metadata(model, options) | {CHECKSUM_KEY: checksum})
    onnx.save(proto, str(path))


def _mark_normalization(graph: Any) -> None:
    """Put the normalization of a network of MXNet first, under the names by which InsightFace's package recognizes it.

    Of version 2.1, model_zoo/arcface_onnx.py gives pixels to a file if a name of its first 8 nodes begins with Sub and
    one with Mul, as MXNet writes them, and normalized images otherwise.
    """
    # Not the only node that takes the image: with a free batch, `--unit` adds one that takes its shape.
    (centered,) = (node for node in graph.node if INPUT in node.input and node.op_type == "Sub")
    (normalized,) = (node for node in graph.node if centered.output[0] in node.input)
    centered.name, normalized.name = "Sub", "Mul"
    # With the constants that they take: the older exporter writes them as nodes.
    first = {*centered.input, *normalized.input, *normalized.output}
    nodes = sorted(graph.node, key=lambda node: node.output[0] not in first)
    del graph.node[:]
    graph.node.extend(nodes)


def _strip(proto: Any) -> None:
    """Remove the notes of torch's exporter: for each node and value, the lines of the program that made it."""
    graph = proto.graph
    noted = [proto, *graph.input, *graph.output, *graph.initializer]
    for part in (graph, *proto.functions):
        noted += [part, *part.node, *part.value_info]
    for each in noted:
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
