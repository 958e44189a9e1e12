"""Writer of ONNX files: the graph with its metadata, and without what the exporter says about this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facetrain.models.checksum import CHECKSUM_KEY, checksum_of_onnx
from facetrain.models.export.checks import fits_onnx_file
from facetrain.models.export.deployed import file_metadata
from facetrain.models.export.formats import FORMATS, ExportOptions
from facetrain.models.model_file import EmbeddingModel


def save_onnx(proto: Any, path: Path, model: EmbeddingModel, options: ExportOptions) -> None:
    """Write the graph of a network, with the weights in NAME.data beside it if they do not fit into one file."""
    import onnx

    _strip(proto)
    checksum = checksum_of_onnx(proto, path.parent)
    onnx.helper.set_model_props(proto, file_metadata(model, options) | {CHECKSUM_KEY: checksum})
    if fits_onnx_file(model):
        onnx.save(proto, str(path))
        return
    _, data = FORMATS["onnx"].files(path)
    onnx.save(proto, str(path), save_as_external_data=True, location=data.name)
    data.chmod(path.stat().st_mode)  # by the umask; onnx writes the second file for its owner only


def _strip(proto: Any) -> None:
    """Remove the notes of torch's exporter: for each node and value, the lines of the program that made it."""
    graphs = [proto.graph, *proto.functions]
    for graph in graphs:
        for noted in (graph, *graph.node, *graph.value_info):
            noted.ClearField("metadata_props")
            noted.ClearField("doc_string")
    for noted in (proto, *proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        noted.ClearField("metadata_props")
        noted.ClearField("doc_string")
