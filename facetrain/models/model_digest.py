"""Digests of the files, or the weights, of a model: others if the model at a path was replaced, or differs by host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from facetrain.checkpoint.commit import LATEST
from facetrain.errors import ModelError
from facetrain.files import os_errors_as, parse_json, sha256_of
from facetrain.models.checksum import CHECKSUM_KEY
from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.model_file import THRESHOLDS_KEY, newest_model_file
from facetrain.models.mxnet_symbol import pair_of_files
from facetrain.models.onnx_limits import external_files
from facetrain.models.read_model import is_graph, open_checkpoint
from facetrain.models.weight_files import METADATA_KEY, read_weights


def digest_model_files(path: Path) -> str:
    """Return a digest of what `open_model` reads for a path, 32 hexadecimal digits.

    Of a checkpoint only the manifest is read, which has the checksums of its files. The thresholds of a .safetensors
    file do not count: its network stays the same when it is calibrated.

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
            parts = [_digest_file(each) for each in (file, *filter(Path.is_file, _others(file)))]
            parts += _stated_origin(file)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def digest_model(model: EmbeddingModel, path: Path) -> str:
    """Return a digest of a model's weights, whatever file they come from; of its files if it has no tensors."""
    state = model.network.state_dict()
    if not state:  # of ONNX, which onnxruntime keeps
        return digest_model_files(path)
    digest = hashlib.sha256()
    for name in sorted(state):
        # By the weights and not by the file: a checkpoint and the model that was exported from it are one teacher.
        digest.update(f"{name} {list(state[name].shape)} {state[name].dtype}".encode())
        digest.update(state[name].cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _digest_file(file: Path) -> str:
    """Return the SHA-256 of a file; for a model file its own checksum, and its description without thresholds."""
    metadata = _metadata_of(file)
    with suppress(ValueError, KeyError):  # a file of another program, or a damaged one
        description = parse_json(metadata[METADATA_KEY])
        if isinstance(description, dict):
            description.pop(THRESHOLDS_KEY, None)
            return f"{metadata[CHECKSUM_KEY]} {json.dumps(description, sort_keys=True)}"
    return sha256_of(file)


def _metadata_of(file: Path) -> dict[str, str]:
    """Return the metadata of a sound .safetensors file; of others none."""
    if file.suffix == ".safetensors" and file.is_file():
        with suppress(SafetensorError), safe_open(str(file), framework="pt") as opened:
            return opened.metadata() or {}
    return {}


def _others(file: Path) -> Iterable[Path]:
    """Return the other files of a model, with weights or the graph."""
    if not is_graph(file):
        return ()
    return external_files(file) if file.suffix == ".onnx" else set(pair_of_files(file)) - {file}


def _stated_origin(file: Path) -> Iterator[str]:
    """Yield the program and the color order of weights of another program, if a file beside them may state it.

    Not the file itself: it may state more, and beside other weights nothing reads it. The pixels that config.json of
    timm states only decide whether the weights are refused.
    """
    if not is_graph(file) and METADATA_KEY not in _metadata_of(file):
        with suppress(ModelError):  # an error when the model is opened
            yield from filter(None, [read_weights(file).program])
