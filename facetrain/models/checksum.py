"""SHA-256 of the tensors of a model file, stored in its metadata: a flipped bit in a weight is an error when read.

A weight with a flipped bit is a number like any other; without the checksum, nothing would show the damage. Files of
other programs, and of versions before it, have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from facetrain.errors import ModelError

CHECKSUM_KEY = "sha256"
"""Key of the metadata."""


def checksum_of(weights: Mapping[str, Tensor]) -> str:
    """Return the checksum of tensors on the CPU by name: of their names, types, shapes and bytes."""
    return _digest(
        (
            f"{name} {tensor.dtype} {list(tensor.shape)}",
            tensor.contiguous().flatten().view(torch.uint8).numpy(),
        )
        # Sorted: the order in which a file lists its tensors means nothing.
        for name, tensor in sorted(weights.items())
    )


def checksum_of_onnx(proto: Any, folder: Path) -> str:
    """Return the checksum of the weights of an ONNX model, whose external data are in `folder`."""
    from onnx import numpy_helper

    return _digest(
        (
            f"{weight.name} {weight.data_type} {list(weight.dims)}",
            # The numbers, however they are stored: inside the file or in a second one.
            numpy_helper.to_array(weight, str(folder)).tobytes(),
        )
        for weight in sorted(proto.graph.initializer, key=lambda weight: str(weight.name))
    )


def require_checksum(metadata: Mapping[str, str], checksum: str, path: Path) -> None:
    """Compare a checksum with the one that the metadata of a file state.

    Raises:
        ModelError: they differ.
    """
    if metadata[CHECKSUM_KEY] != checksum:
        raise ModelError(
            f"{path}: its weights are damaged, or another program has changed them: their SHA-256 is not the stored "
            f"one; copy the file again, or remove {CHECKSUM_KEY} from the metadata of a converted file"
        )


def require_sound_onnx(proto: Any, path: Path) -> None:
    """Compare the weights of an ONNX model with the checksum in its metadata, if there is one.

    Raises:
        ModelError: they differ.
    """
    texts = {entry.key: entry.value for entry in proto.metadata_props}
    if CHECKSUM_KEY in texts:
        require_checksum(texts, checksum_of_onnx(proto, path.parent), path)


def _digest(tensors: Iterable[tuple[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name, data in tensors:
        digest.update(name.encode())
        digest.update(data)
    return digest.hexdigest()
