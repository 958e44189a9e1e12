"""Networks that came as ONNX, run by onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.errors import ModelError
from facetrain.models.onnx_layers import takes_pixels


class OnnxNetwork(nn.Module):
    """A session that maps images (B, 3, H, W) to embeddings (B, D), wherever the images lie."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self._session = session
        (taken, *_), (given, *_) = session.get_inputs(), session.get_outputs()
        self._name, shape = taken.name, taken.shape
        self.from_pixels = taken.type == "tensor(uint8)"
        """It takes uint8 (B, H, W, 3) RGB and normalizes itself."""
        height = shape[1 if self.from_pixels else 2] if len(shape) == 4 else None
        self.image_size = height if isinstance(height, int) else 112
        width = given.shape[-1] if given.shape else None
        self.embedding_size = width if isinstance(width, int) else 0
        self.notes = _notes(session)
        """What facetrain's exporter has written of it."""
        self.normalizes = False
        """It takes float32 pixels from 0 to 255."""

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map images to the session's first output, on the device of the images."""
        image = image_BCHW.permute(0, 2, 3, 1) if self.from_pixels else image_BCHW
        (embedding, *_) = self._session.run(None, {self._name: np.ascontiguousarray(image.cpu().numpy())})
        return torch.from_numpy(embedding).to(image_BCHW.device)


def open_onnx(path: Path) -> OnnxNetwork:
    """Open an ONNX file on the processor.

    Raises:
        ModelError: it is none, or onnx or onnxruntime is not installed.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ModelError(f"{path}: needs {error.name}: install facetrain[onnx]") from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        network = OnnxNetwork(session)
        network.normalizes = _normalizes(onnx, path, network.notes)
    except Exception as error:  # onnxruntime's own have no common root
        raise ModelError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    return network


def _normalizes(onnx: Any, path: Path, notes: dict[str, Any]) -> bool:
    said = notes.get("preprocessing")
    if isinstance(said, dict):
        return said.get("scale") == 1
    return takes_pixels(onnx.load(str(path), load_external_data=False))


def _notes(session: Any) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    for name, text in session.get_modelmeta().custom_metadata_map.items():
        try:
            notes[name] = json.loads(text)
        except ValueError:  # another program's
            continue
    return notes
