"""ONNX networks, run by onnxruntime."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.errors import ModelError, missing_package
from facetrain.face_landmarks import NORMALIZED_TEMPLATE
from facetrain.files import error_reason
from facetrain.models.onnx_layers import takes_pixels
from facetrain.models.onnx_limits import require_fitting_sizes

_DEFAULT_IMAGE_SIZE = 112
LANDMARKS_INPUT = "landmarks"
"""Name of the second input of a network with KP-RPE: landmarks (B, 5, 2), x and y as fractions of the sides."""


class OnnxNetwork(nn.Module):
    """An onnxruntime session that maps images (B, 3, H, W) on any device to embeddings (B, D)."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self._session = session
        (image, *others), (embedding, *_) = session.get_inputs(), session.get_outputs()
        self._input_name, shape = image.name, image.shape
        self.takes_landmarks = any(other.name == LANDMARKS_INPUT for other in others)
        """Whether the graph takes landmarks (B, 5, 2) after the images, as `facetrain export` writes it for KP-RPE."""
        self.from_pixels = image.type == "tensor(uint8)"
        """Whether the graph takes uint8 (B, H, W, 3) RGB and normalizes it."""
        # A free size is a name or None in the shape.
        height = shape[1 if self.from_pixels else 2] if len(shape) == 4 else None
        self.image_size = height if isinstance(height, int) else _DEFAULT_IMAGE_SIZE
        self._batch = shape[0] if len(shape) == 4 and isinstance(shape[0], int) else None
        width = embedding.shape[-1] if embedding.shape else None
        self.embedding_size = width if isinstance(width, int) else 0
        self.metadata = _json_metadata(session)
        """Metadata that `facetrain export` wrote: `backbone`, `preprocessing`, `config`."""
        self.normalizes = False
        """Whether the graph takes pixels from 0 to 255 and normalizes them."""

    def forward(self, image_BCHW: Tensor, landmarks_B52: Tensor | None = None) -> Tensor:
        """Map images to the first output of the session, on the device of the images.

        A graph that takes landmarks gets those of aligned faces if there are none.
        """
        image = image_BCHW.permute(0, 2, 3, 1) if self.from_pixels else image_BCHW
        inputs = [np.ascontiguousarray(image.cpu().numpy())]
        if self.takes_landmarks:
            points = NORMALIZED_TEMPLATE if landmarks_B52 is None else landmarks_B52.cpu().numpy()
            inputs.append(np.array(np.broadcast_to(points, (len(image_BCHW), 5, 2)), np.float32))
        embedding = run_in_batches(self._run, inputs, self._batch)
        return torch.from_numpy(embedding).to(image_BCHW.device)

    def _run(self, *inputs: np.ndarray) -> np.ndarray:
        names = self._input_name, LANDMARKS_INPUT
        embedding: np.ndarray
        (embedding, *_) = self._session.run(None, dict(zip(names, inputs, strict=False)))
        return embedding


def run_in_batches(
    run: Callable[..., np.ndarray], inputs: Sequence[np.ndarray], batch: int | None
) -> np.ndarray:
    """Return the embeddings (N, D) of inputs (N, …) from a program that takes `batch` of each, or None for any number.

    The last ones are repeated to fill the last batch.
    """
    count = len(inputs[0])
    if batch is None or count == 0:
        return run(*inputs)
    missing = -count % batch
    filled = [
        np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array
        for array in inputs
    ]
    starts = range(0, count, batch)
    embeddings = [run(*(array[start : start + batch] for array in filled)) for start in starts]
    return np.concatenate(embeddings)[:count]


def open_onnx(path: Path) -> OnnxNetwork:
    """Open an ONNX file on the CPU.

    Raises:
        ModelError: it is not an ONNX file, or the package onnx or onnxruntime is not installed.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ModelError(f"{path}: {missing_package(error, 'onnx')}") from error
    try:
        require_fitting_sizes(path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        network = OnnxNetwork(session)
        network.normalizes = _normalizes(onnx, path, network)
    except ModelError:
        raise
    except Exception as error:  # onnxruntime's errors have no common base
        raise ModelError(f"{path}: {error_reason(error)}") from error
    return network


def _normalizes(onnx: Any, path: Path, network: OnnxNetwork) -> bool:
    preprocessing = network.metadata.get("preprocessing")
    if isinstance(preprocessing, dict):
        return preprocessing.get("scale") == 1
    return network.from_pixels or takes_pixels(onnx, onnx.load(str(path), load_external_data=False), path)


def _json_metadata(session: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for name, text in session.get_modelmeta().custom_metadata_map.items():
        try:
            metadata[name] = json.loads(text)
        except ValueError:  # metadata of another program, which is not JSON
            continue
    return metadata
