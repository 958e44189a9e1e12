"""Digest of all files of a model: another one if the model at a path was replaced, or is another on another host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from facetrain.checkpoint.commit import LATEST
from facetrain.checkpoint.manifest import sha256_of
from facetrain.errors import ModelError
from facetrain.files import os_errors_as
from facetrain.models.model_file import newest_model_file
from facetrain.models.mxnet_symbol import pair_of_files
from facetrain.models.onnx_network import external_files
from facetrain.models.read_model import is_graph, open_checkpoint


def digest_model_files(path: Path) -> str:
    """Return a digest of what `open_model` reads for a path, 32 hexadecimal digits.

    Of a checkpoint only the manifest is read, which has the checksums of its files.

    Raises:
        ModelError: a file is missing, or is no ONNX file.
        CheckpointError: the folder has no sound checkpoint.
    """
    file = newest_model_file(path) if path.is_dir() else path
    if file is None or file.name == LATEST:
        parts = [open_checkpoint(path).manifest.digest]
    else:
        with os_errors_as(ModelError, path):
            # What is no file, such as a pipe, is an error when the model is opened.
            parts = [sha256_of(each) for each in (file, *filter(Path.is_file, _others(file)))]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def _others(file: Path) -> Iterable[Path]:
    """Return the other files of a model, with weights or the graph."""
    if not is_graph(file):
        return ()
    return external_files(file) if file.suffix == ".onnx" else set(pair_of_files(file)) - {file}
