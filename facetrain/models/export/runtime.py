"""Programs that run an exported file: a common form to compare, time and evaluate the file."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.models.export.formats import ExportOptions
from facetrain.models.model_file import EmbeddingModel, uint8_pixels
from facetrain.models.onnx_network import run_in_batches


@dataclass(frozen=True)
class Runtime:
    """A file, opened by the program that runs it."""

    name: str
    """Program and version, such as `onnxruntime 1.31.1`."""
    run: Callable[..., np.ndarray]
    """Maps images, as the file takes them, and landmarks (N, 5, 2) if the network takes them, to embeddings (N, D)."""
    batch: int | None = None
    """Number of images that `run` takes; None for any number."""

    def embed(self, *inputs: np.ndarray) -> np.ndarray:
        """Return the embeddings (N, D) of any number of images, given with their landmarks as `run` takes them."""
        return run_in_batches(self.run, inputs, self.batch)


Writer = Callable[[EmbeddingModel, Path, ExportOptions], Runtime | None]
"""Writes a network to a file in a new folder, perhaps with a second file, and returns the file, opened again; None if
no program runs it."""


class RuntimeNetwork(nn.Module):
    """A runtime as a network, so that `facetrain.verify.evaluate` can measure the accuracy of the file."""

    def __init__(self, runtime: Runtime, *, from_pixels: bool, takes_landmarks: bool) -> None:
        super().__init__()
        self._runtime, self._from_pixels, self.takes_landmarks = runtime, from_pixels, takes_landmarks

    def forward(self, image_NCHW: Tensor, *landmarks: Tensor) -> Tensor:
        """Map images (N, 3, H, W), prepared or uint8 as the file takes them, to embeddings (N, D).

        The landmarks (N, 5, 2) follow if the network takes them.
        """
        image = image_NCHW.permute(0, 2, 3, 1) if self._from_pixels else image_NCHW
        arrays = (np.ascontiguousarray(tensor.numpy()) for tensor in (image, *landmarks))
        return torch.from_numpy(self._runtime.embed(*arrays))


def runtime_model(model: EmbeddingModel, runtime: Runtime, options: ExportOptions) -> EmbeddingModel:
    """Return an exported file, opened by its runtime, as a model that `facetrain.verify.evaluate` takes."""
    network = RuntimeNetwork(runtime, from_pixels=options.from_pixels, takes_landmarks=model.takes_landmarks)
    prepare = uint8_pixels if options.from_pixels else model.prepare
    return replace(model, network=network, prepare=prepare)
